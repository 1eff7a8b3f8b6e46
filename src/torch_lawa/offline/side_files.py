"""The files beside the weights that a result takes over."""

from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.checkpoints.formats.huggingface import weights_stem
from torch_lawa.checkpoints.provenance import PROVENANCE_FILE
from torch_lawa.checkpoints.storage.paths import LocalPath, Location

__all__ = ["links_out", "side_files"]

# Files that `from_pretrained` may need beside the weights, but not the state of the run.
_COPIED = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
_NOT_COPIED = (
    "trainer_state.json",
    PROVENANCE_FILE,
    "_strings.json",
    "zero_to_fp32.py",
    "zero_to_torch.py",
)


def side_files(newest: Checkpoint) -> list[Location]:
    """The files beside the weights that are copied into an output folder."""
    return [location for location in _beside(newest) if not _leads_out(location)]


def links_out(newest: Checkpoint) -> list[Location]:
    """Links to files elsewhere. They are not copied: results are passed on, such files are not."""
    return [location for location in _beside(newest) if _leads_out(location)]


def _beside(newest: Checkpoint) -> list[Location]:
    folder = newest.beside or newest.location
    if not folder.is_folder():
        if weights_stem(folder.name) is None:
            return []
        folder = folder.parent
    weights = {location.name for location in newest.files}
    return [
        location
        for location in folder.children()
        if location.suffix in _COPIED
        and location.name not in weights
        and location.is_file()
        and location.name not in _NOT_COPIED
        and not location.name.endswith(".index.json")
    ]


def _leads_out(location: Location) -> bool:
    if not isinstance(location, LocalPath) or not location.path.is_symlink():
        return False
    folder = location.path.parent.resolve()
    homes = [folder]
    if folder.parent.name == "snapshots":  # of the Hugging Face cache, whose files are links
        homes.append(folder.parent.parent / "blobs")
    return not any(location.path.resolve().is_relative_to(home) for home in homes)
