"""The lab's verbs of the `lawa` command, found through the entry point `lawa.verbs`."""

__all__ = ["VERBS"]

VERBS = {
    "demo": ("lawa_lab.cli.demo", "Train a small net on embedded data; show what averaging saves."),
    "train": ("lawa_lab.cli.train", "Train a recipe with averaging inside."),
    "report": ("lawa_lab.cli.report", "Show what averaging saved: tables, figures, one page."),
}
