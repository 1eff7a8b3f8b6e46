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
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
# Where files of the repository are on the site; everything else is a link to the repository.
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
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
            files.append(File.generated(config, _page(site), content=path.read_text("utf-8")))
        else:
            files.append(File.generated(config, site, abs_src_path=str(path)))
    for name, site in MOVED.items():
        text = (ROOT / name).read_text("utf-8")
        files.append(File.generated(config, site, content=text))
    files.append(File.generated(config, "records/index.md", content=_record_index()))
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
    return "".join(p if p.startswith("```") else LINK.sub(rewrite, p) for p in parts)


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:
    """Nothing to change; the navigation is complete after `on_config`."""
    return nav


def _records() -> list[Path]:
    """READMEs and figures of all records, and the small files that they link to."""
    found = sorted((ROOT / "results").rglob("*"))
    return [p for p in found if p.is_file() and p.stat().st_size < 1 << 20]


def _record_index() -> str:
    lines = ["# Records", "", "Every number in these pages comes from one of these runs.", ""]
    for path in sorted((ROOT / "results").glob("*/README.md"), reverse=True):
        title = path.read_text("utf-8").splitlines()[0].lstrip("# ")
        lines.append(f"- [{title}]({path.parent.name}/README.md)")
    return "\n".join(lines) + "\n"


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
            readme = whole / "README.md"
            return (
                f"records{path.removeprefix('results')}/README.md"
                if readme.is_file()
                else ("records/index.md")
            )
        return "records/" + path.removeprefix("results/")
    if path.startswith("docs/"):
        site = path.removeprefix("docs/")
        return f"{site}/README.md" if (ROOT / path).is_dir() else site
    return None


def _page(site: str) -> str:
    return site


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
        return {title: ["records/index.md", *(f"records/{p.parent.name}/README.md" for p in pages)]}
    pages = sorted((ROOT / "docs" / target).glob("*.md"), key=lambda p: (p.name != "README.md", p))
    return {title: [f"{target}{page.name}" for page in pages]}


def _references() -> dict[str, str]:
    """The command-line reference, from the commands themselves."""
    sys.path.insert(0, str(ROOT / "src"))
    main = importlib.import_module("torch_lawa.cli.main")
    verbs = {**main._VERBS, **importlib.import_module("lawa_lab.cli").VERBS}
    lines = ["# Command line", "", "What `lawa VERB --help` says.", ""]
    for verb, (module, summary) in verbs.items():
        command = importlib.import_module(module).command
        lines += [f"## lawa {verb}", "", summary, "", "```text", _help(command, verb), "```", ""]
    return {"reference/cli.md": "\n".join(lines)}


def _help(command: click.Command, verb: str) -> str:
    with click.Context(command, info_name=f"lawa {verb}", max_content_width=92) as context:
        return command.get_help(context)
