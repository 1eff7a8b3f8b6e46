"""A finished result goes to a server, so that a reader finds a whole checkpoint or none.

Stores like S3 show an object when it is whole, but a folder is several objects and nothing there
can be renamed in one step. What makes the folder a checkpoint (the index, or the only weights file)
goes last. An older index comes off first if its shards are about to be replaced: half old and half
new shards under a valid index would be a checkpoint that never was.
"""

import contextlib
import re
from pathlib import Path

from torch_lawa.checkpoints.formats.huggingface import INDEXES, WEIGHTS
from torch_lawa.checkpoints.storage.paths import RemoteURL
from torch_lawa.errors import LawaError
from torch_lawa.offline.output import Output

__all__ = ["upload"]

_SHARD = re.compile(r".+-[0-9]{5}-of-[0-9]{5}\.(safetensors|bin)|.+\.distcp")
_NOTES = ("lawa.json", "trainer_state.json")  # what would be said of the older result


def upload(folder: Path, location: RemoteURL, output: Output) -> None:
    """Upload what lies in `folder`; of an older result there, no weights are left."""
    if not output.is_folder:
        location.upload(folder / output.shards[0].file)
        return
    last = output.index or output.shards[0].file
    names = sorted((path.name for path in folder.iterdir()), key=lambda name: (name == last, name))
    older = {found.name for found in location.children()} if location.exists() else set()
    if older & {shard.file for shard in output.shards} - {last}:
        for name in older & set(INDEXES):
            location.child(name).remove()
    new: list[RemoteURL] = []
    try:
        for name in names:
            target = location.child(name)
            if name not in older:
                new.append(target)
            target.upload(folder / name)
    except BaseException:
        for target in new:
            with contextlib.suppress(LawaError):
                target.remove()
        raise
    for name in sorted(older - set(names), key=_is_shard):  # what names shards goes before them
        if name in (*WEIGHTS, *INDEXES, *_NOTES, ".metadata") or _is_shard(name):
            location.child(name).remove()


def _is_shard(name: str) -> bool:
    return _SHARD.fullmatch(name) is not None
