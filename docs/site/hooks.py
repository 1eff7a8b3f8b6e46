"""What mkdocs adds to docs/: the README as the home page, records, and generated references.

Pages outside of docs/ keep their relative links on GitHub; on the site they are rewritten here.
"""

import importlib
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# Where files of the repository are on the site; everything else is a link to the repository.
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"(\]\(|src=\")(?!https?:|#|mailto:)([^)\s\"#]+)(#[^)\s\"]*)?(?=[)\s\"])")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand folders of the navigation into their pages."""
    config.nav = [_expanded(entry) for entry in config.nav or []]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is not in docs/."""
    for path in _records():
        site = f"records/{path.relative_to(ROOT / 'results').as_posix()}"
        if path.suffix == ".md":
            files.append(File.generated(config, site, content=path.read_text("utf-8")))
        else:
            files.append(File.generated(config, site, abs_src_path=str(path)))
    for name, site in MOVED.items():
        text = (ROOT / name).read_text("utf-8")
        files.append(File.generated(config, site, content=text))
    for site, text in _references().items():
        files.append(File.generated(config, site, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between files of the repository into links between pages of the site."""
    source = _source(page.file.src_uri)

    def rewrite(match: re.Match[str]) -> str:
        before, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        site = _on_site(path)
        if site is None:
            return f"{before}{config.repo_url}/blob/main/{path}{anchor}"
        here = posixpath.dirname(page.file.src_uri)
        return f"{before}{posixpath.relpath(site, here or '.')}{anchor}"

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.M | re.S)
    return "".join(p if p.startswith("```") else _unbroken(LINK.sub(rewrite, p)) for p in parts)


def _unbroken(text: str) -> str:
    """A value, its deviation and its percent sign stay on one line, and so does k = 6."""
    return re.sub(
        r"(?<=\d) (?=[±%×])|(?<=±) (?=\d)|(?<=\bk) (?=[=>])|(?<=k [=>]) (?=\d)", "\u00a0", text
    )


def _records() -> list[Path]:
    """READMEs and figures of all records, and the small files that they link to."""
    found = sorted((ROOT / "results").rglob("*"))
    return [p for p in found if p.is_file() and p.stat().st_size < 1 << 20]


def _source(site: str) -> str:
    """The file of the repository that a page comes from."""
    for name, moved in MOVED.items():
        if site == moved:
            return name
    if site.startswith("records/"):
        return "results/" + site.removeprefix("records/")
    return f"docs/{site}"


def _on_site(path: str) -> str | None:
    """Where a file of the repository is on the site, if it is there."""
    if path in MOVED:
        return MOVED[path]
    if path.startswith("results/") or path == "results":
        whole = ROOT / path
        if whole.is_dir():
            folder = path.removeprefix("results") if (whole / "README.md").is_file() else ""
            return f"records{folder}/README.md"
        return "records/" + path.removeprefix("results/")
    if path.startswith("docs/"):
        site = path.removeprefix("docs/")
        return f"{site}/README.md" if (ROOT / path).is_dir() else site
    return None


def _expanded(entry: Any) -> Any:
    """`Guides: guides/` becomes the pages of that folder, each under its own title."""
    if isinstance(entry, list):
        return [_expanded(one) for one in entry]
    if not isinstance(entry, dict):
        return entry
    ((title, target),) = entry.items()
    if isinstance(target, list):
        return {title: _expanded(target)}
    if not target.endswith("/"):
        return entry
    if target == "records/":
        pages = sorted((ROOT / "results").glob("*/README.md"), reverse=True)
        return {
            title: ["records/README.md", *(f"records/{p.parent.name}/README.md" for p in pages)]
        }
    pages = sorted((ROOT / "docs" / target).glob("*.md"), key=lambda p: (p.name != "README.md", p))
    return {title: [f"{target}{page.name}" for page in pages]}


# What a reader looks for first; every other public name follows in the order of the table.
FIRST = ("averager", "batch_norm", "schedule", "coefficients", "stores.disk", "evaluation")
FRAMEWORKS = (
    "lightning.LatestWeightAveraging",
    "transformers.LatestWeightAveragingCallback",
    "transformers.LatestWeightAveragingTrainer",
    "accelerate.register_averager",
    "deepspeed.save_checkpoint",
    "deepspeed.load_checkpoint",
    "torchtitan.averaged",
    "torchtitan.AveragingOptions",
    "timm.timm_checkpoint",
)
WITHOUT_MEMBERS = ("DiskStore", "Schedule", "Every", "Horizon", "OnPlateau", "Averager")


def _references() -> dict[str, str]:
    """Pages that follow from the code: its public names, its commands and its registries."""
    sys.path.insert(0, str(ROOT / "src"))
    return {
        "reference/python.md": _python_reference(),
        "reference/cli.md": _command_reference(),
        "reference/formats.md": _format_reference(),
    }


def _python_reference() -> str:
    package = importlib.import_module("torch_lawa")
    modules = sorted(package._PUBLIC, key=lambda m: FIRST.index(m) if m in FIRST else len(FIRST))
    lines = [
        "# Python",
        "",
        "Everything public is imported from `torch_lawa`. Other modules are internal and change "
        "without notice, except `torch_lawa.integrations`.",
        "",
    ]
    for module in modules:
        for name in package._PUBLIC[module]:
            lines += [f"::: torch_lawa.{name}", "    options:", "      heading_level: 2"]
            if name in WITHOUT_MEMBERS:
                lines += ["      members: false"]
            lines += [""]
    lines += ["## Frameworks", ""]
    for name in FRAMEWORKS:
        lines += [f"::: torch_lawa.integrations.{name}", "    options:", "      members: false", ""]
    return "\n".join(lines)


def _command_reference() -> str:
    main = importlib.import_module("torch_lawa.cli.main")
    verbs = {**main._VERBS, **importlib.import_module("lawa_lab.cli").VERBS}
    lines = ["# Command line", "", "What `lawa VERB --help` says.", ""]
    for verb, (module, summary) in verbs.items():
        command = importlib.import_module(module).command
        lines += [f"## lawa {verb}", "", summary, "", "```text", _help(command, verb), "```", ""]
    return "\n".join(lines)


def _format_reference() -> str:
    registry = importlib.import_module("torch_lawa.checkpoints.formats.registry")
    rules = importlib.import_module("torch_lawa.coefficients.registry")._RULES
    schedules = importlib.import_module("torch_lawa.schedule")
    lines = [
        "# Formats, coefficients, schedules",
        "",
        "Each is one entry of a registry; [contributing](../contributing.md) says how to add one.",
        "",
        "## Checkpoint formats",
        "",
        "| format | what it is | file suffixes | read | written |",
        "| --- | --- | --- | --- | --- |",
    ]
    for known in registry.FORMATS.values():
        suffixes = ", ".join(f"`{suffix}`" for suffix in known.suffixes) or "folder"
        written = "yes" if known.writer else "as safetensors"
        lines.append(f"| {known.title} | {known.description} | {suffixes} | yes | {written} |")
    lines += ["", "## Coefficient rules", ""]
    lines += [f"- `{e.usage}`: {e.help or 'equal weights'}" for e in rules.values()]
    lines += ["", "## Schedules", ""]
    lines += [f"- `{e.usage}`: {e.help}" for e in schedules.SCHEDULES.values()]
    return "\n".join(lines) + "\n"


def _help(command: click.Command, verb: str) -> str:
    with click.Context(command, info_name=f"lawa {verb}", max_content_width=92) as context:
        return command.get_help(context)
