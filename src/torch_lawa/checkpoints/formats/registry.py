"""One way in: which reader a place needs, and what does not look like a checkpoint at all."""

from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.checkpoints.formats.huggingface import find_weights_file, open_folder
from torch_lawa.checkpoints.formats.safetensors import SafetensorsFile
from torch_lawa.checkpoints.storage.paths import Location
from torch_lawa.errors import FormatError

__all__ = ["SUFFIXES", "TORCH_SUFFIXES", "is_checkpoint_folder", "open_checkpoint"]

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
SUFFIXES = (".safetensors", *TORCH_SUFFIXES)


def is_checkpoint_folder(folder: Location) -> bool:
    """Whether a folder is itself one checkpoint (and not a run that holds some)."""
    return folder.child(".metadata").is_file() or find_weights_file(folder) is not None


def open_checkpoint(location: Location, *, key: str | None = None) -> Checkpoint:
    """Open whatever lies there.

    `key` names the entry of a PyTorch file that holds the weights, where there is a choice.
    """

    def open_torch(file: Location) -> Checkpoint:
        from torch_lawa.checkpoints.formats.torch_file import TorchFile

        return TorchFile(file, key=key)

    if location.is_folder():
        if location.child(".metadata").is_file():
            from torch_lawa.checkpoints.formats.dcp import DistributedCheckpoint

            return DistributedCheckpoint(location, key=key)
        return open_folder(location, open_torch)
    if not location.is_file():
        raise FormatError(f"{location}: there is no such file or folder.")
    if location.suffix == ".safetensors":
        return SafetensorsFile(location)
    if location.suffix in TORCH_SUFFIXES:
        return open_torch(location)
    raise FormatError(
        f"{location}: not a checkpoint by its name; known are {', '.join(SUFFIXES)} and folders."
    )
