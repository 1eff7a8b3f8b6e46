"""The lab's verbs of the `lawa` command, found through the entry point `lawa.verbs`."""

__all__ = ["VERBS"]

VERBS = {
    "demo": ("lawa_lab.cli.demo", "Train a small network and show what averaging saves."),
    "train": (
        "lawa_lab.cli.train",
        "Train a recipe and evaluate its raw and averaged weights.",
    ),
    "report": (
        "lawa_lab.cli.report",
        "Show what averaging saved, as tables, figures and one page.",
    ),
}
