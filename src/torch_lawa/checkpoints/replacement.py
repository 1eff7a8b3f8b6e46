"""What may be overwritten: a file by a file, or the checkpoint in a folder of files."""

from torch_lawa.checkpoints.formats.registry import checkpoint_parts, is_checkpoint_folder
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.errors import OutputError

__all__ = ["require_replaceable"]


def require_replaceable(location: LocalPath, *, is_file: bool) -> None:
    """Refuse to overwrite what exists at `location` by a file, or else a folder, if that is unsafe.

    Of a folder, only what belongs to its checkpoint is replaced (`checkpoint_parts`) and all other
    files stay. Another sub-folder cannot be kept in one step, so it is refused. Where a file system
    cannot exchange two folders, another writer's may be missing for a moment: that is no reason.
    """
    for last in (False, True):
        try:
            _require(location, is_file=is_file)
            return
        except (FileNotFoundError, OutputError):
            if not location.exists():
                return
            if last:
                raise


def _require(location: LocalPath, *, is_file: bool) -> None:
    if location.is_folder() == is_file:
        there, new = ("folder", "file") if is_file else ("file", "folder")
        raise OutputError(f"{location}: is a {there}, but a {new} is written. Write elsewhere.")
    if is_file or not (children := location.children()):
        return
    is_part = checkpoint_parts(location)
    others = (child for child in children if child.is_folder() and not is_part(child.name))
    folder = next((child.name for child in others), None)
    if folder is not None:
        raise OutputError(
            f"{location}: contains the folder {folder}, and only a checkpoint can be overwritten. "
            f"Write elsewhere, such as to {location.child('averaged')}."
        )
    if not is_checkpoint_folder(location):
        raise OutputError(
            f"{location}: contains other files than a checkpoint, and only a checkpoint can be "
            "overwritten. Write elsewhere, or remove the folder yourself."
        )
