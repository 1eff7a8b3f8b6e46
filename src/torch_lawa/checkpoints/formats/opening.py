"""One way in: which reader a place needs, and what does not look like a checkpoint at all."""

from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.checkpoints.formats.huggingface import find_weights, open_folder
from torch_lawa.checkpoints.formats.safetensors import SafetensorsFile
from torch_lawa.checkpoints.storage.paths import Place
from torch_lawa.errors import FormatError

__all__ = ["SUFFIXES", "TORCH_SUFFIXES", "is_checkpoint_folder", "open_checkpoint"]

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
SUFFIXES = (".safetensors", *TORCH_SUFFIXES)


def is_checkpoint_folder(folder: Place) -> bool:
    """Whether a folder is itself one checkpoint (and not a run that holds some)."""
    return folder.child(".metadata").is_file() or find_weights(folder) is not None


def open_checkpoint(place: Place, *, key: str | None = None) -> Checkpoint:
    """Open whatever lies there.

    `key` names the entry of a PyTorch file that holds the weights, where there is a choice.
    """

    def open_torch(file: Place) -> Checkpoint:
        from torch_lawa.checkpoints.formats.torch_file import TorchFile

        return TorchFile(file, key=key)

    if place.is_folder():
        if place.child(".metadata").is_file():
            from torch_lawa.checkpoints.formats.dcp import DistributedCheckpoint

            return DistributedCheckpoint(place, key=key)
        return open_folder(place, open_torch)
    if not place.is_file():
        raise FormatError(f"{place}: there is no such file or folder.")
    if place.suffix == ".safetensors":
        return SafetensorsFile(place)
    if place.suffix in TORCH_SUFFIXES:
        return open_torch(place)
    raise FormatError(
        f"{place}: not a checkpoint by its name; known are {', '.join(SUFFIXES)} and folders."
    )
