"""Everything that writes results: how to run it in a folder, and what it may leave there."""

import pickle
import shutil
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor

from support.deepspeed import save_zero
from support.megatron import write_torch_dist

__all__ = ["WRITERS", "Tree", "Writer", "lawa", "link_tree", "tensors", "tree"]

Tree = dict[str, bytes | None]  # the contents of every file of a folder; None for sub-folders

CONFIG = '{"model_type": "toy", "torch_dtype": "float32"}'


@dataclass(frozen=True)
class Writer:
    """A program that writes to its folder.

    Each of the `targets` changes in one step. The `private` folders have states of several files:
    the program `look` fails unless it finds a whole one, and prints which.
    """

    name: str
    prepare: Callable[[Path], None]
    code: str
    targets: tuple[str, ...]
    first: str = ""  # makes the older result
    again: str = ""  # the next run, if other than `code`
    look: str = ""
    private: tuple[str, ...] = ()
    stopped: tuple[int, ...] = (130, 0)  # exit codes after a signal


def tree(folder: Path) -> Tree:
    """Everything in a folder; of a database of Orbax that was written, what it holds."""
    found: Tree = {
        str(path.relative_to(folder)): None if path.is_dir() else _contents(path)
        for path in folder.rglob("*")
    }
    for name in [n for n in found if n.startswith("out/") and n.endswith("/manifest.ocdbt")]:
        above = name.removesuffix("manifest.ocdbt")
        found = {
            n: v for n, v in found.items() if n != name and not f"{n}/".startswith(f"{above}d/")
        }
        found |= {above + key: value for key, value in _database(folder / above).items()}
    return found


def _database(folder: Path) -> dict[str, bytes]:
    """The entries of an OCDBT database, whose files have random names."""
    import tensorstore

    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()
    return {key.decode(): store.read(key).result().value for key in store.list().result()}


def _contents(path: Path) -> bytes:
    """The bytes of a file; of the index of a distributed checkpoint without its random id."""
    data = path.read_bytes()
    if path.name == ".metadata" and data:
        return repr(replace(pickle.loads(data), storage_meta=None)).encode()
    return data


def link_tree(source: Path, target: Path) -> None:
    """The same files under other names: no writer changes a file in place."""
    target.mkdir()
    for path in source.iterdir():
        if path.is_dir():
            link_tree(path, target / path.name)
        else:
            (target / path.name).hardlink_to(path)


def lawa(*words: object) -> str:
    """The command as a program."""
    return f"from torch_lawa.cli.main import main; main({[*map(str, words)]!r})"


def tensors(step: int) -> dict[str, Tensor]:
    """The weights of a step."""
    generator = torch.Generator().manual_seed(step)
    return {
        "a.weight": torch.randn(40, 30, generator=generator),
        "b.weight": torch.randn(7, generator=generator).to(torch.bfloat16),
        "count": torch.tensor([step]),
    }


def files(folder: Path) -> None:
    (folder / "run").mkdir()
    for step in (1, 2, 3):
        save_file(tensors(step), folder / "run" / f"step-{step}.safetensors")


def folders(folder: Path) -> None:
    for step in (1, 2, 3):
        path = folder / "run" / f"checkpoint-{step}"
        path.mkdir(parents=True)
        save_file(tensors(step), path / "model.safetensors")
        (path / "config.json").write_text(CONFIG)


def torch_files(folder: Path) -> None:
    (folder / "run").mkdir()
    for step in (1, 2, 3):
        torch.save({"model": tensors(step)}, folder / "run" / f"step-{step}.pt")


def distributed(folder: Path) -> None:
    (folder / "run").mkdir()
    for step in (1, 2, 3):
        dcp.save(tensors(step), checkpoint_id=folder / "run" / f"step-{step}", no_dist=True)


def megatron(folder: Path) -> None:
    for step in (1, 2, 3):
        write_torch_dist(folder / "run" / f"iter_{step:07d}", tensors(step), step)


def deepspeed(folder: Path) -> None:
    for step in (1, 2, 3):
        found = tensors(step)
        save_zero(
            folder / "run" / f"global_step{step}", [{"a.weight": found["a.weight"]}],
            stage=2, ranks=2, buffers={"count": found["count"]}, step=step,
        )  # fmt: skip


def orbax(folder: Path) -> None:
    """Two recorded checkpoints, and one of them again as a third."""
    recorded = Path(__file__).parents[1] / "jax_checkpoints" / "recorded" / "run"
    for step, name in enumerate(("20", "10", "20"), 1):
        shutil.copytree(recorded / name, folder / "run" / str(step))


def nothing(folder: Path) -> None:
    """No inputs."""


def _api(code: str, **variables: object) -> str:
    """A program that reports errors and Ctrl-C as the command does."""
    given = "".join(f"{name} = {value!r}\n" for name, value in variables.items())
    return given + (
        "import sys\n"
        "from torch_lawa.signals import interruptible\n"
        "from torch_lawa.errors import LawaError\n"
        "try:\n  with interruptible():\n" + textwrap.indent(textwrap.dedent(code), "    ") + "\n"
        "except (LawaError, OSError) as error:\n"
        "    print('Error:', error, file=sys.stderr)\n"
        "    sys.exit(1)\n"
        "except KeyboardInterrupt:\n"
        "    sys.exit(130)\n"
    )


# The k latest of the steps 1, 2, 3, … of one tensor; the mean is known.
_AVERAGER = """
import torch
from pathlib import Path
from torch_lawa import DiskStore, LatestWeightAverager

def values(step):
    return torch.arange(5000.0) * step

def averaged(*steps):
    averager = LatestWeightAverager(k=2)
    for step in steps:
        averager.collect({"w": values(step)}, step=step)
    return averager

def check(averager):
    *_, newest = averager.snapshot_steps
    assert averager.snapshot_steps == [newest - 1, newest], averager.snapshot_steps
    assert torch.equal(averager.average()["w"], torch.arange(5000.0) * (newest - 0.5)), newest
    return newest
"""
_EXPORT = _AVERAGER + "averaged(*steps).save_pretrained('out', **how)"
_COLLECT = (
    _AVERAGER
    + """
averager = LatestWeightAverager(k=2, store=DiskStore("store"))
for step in range(first, last + 1):
    averager.collect({"w": values(step)}, step=step)
    averager.wait()
    print(step, flush=True)
"""
)
_LOAD = (
    _AVERAGER
    + """
averager = LatestWeightAverager(k=2, store=DiskStore("store"))
averager.load_state_dict(averaged(6, 7).state_dict())
averager.wait()
print(7, flush=True)
"""
)
_CONTINUE = (
    _AVERAGER
    + """
averager = LatestWeightAverager(k=2, store=DiskStore("store"))
newest = check(averager)
for step in range(newest + 1, 9):
    averager.collect({"w": values(step)}, step=step)
averager.wait()
assert check(averager) == 8
"""
)
_OPEN = _AVERAGER + "print(check(LatestWeightAverager(k=2, store=DiskStore('store'))))\n"
# A checkpoint that is one file, with its window beside it, as Lightning writes them.
_CHECKPOINT = (
    _AVERAGER
    + """
from torch import nn
from torch_lawa.checkpoints.storage.atomic import replacing
from torch_lawa.integrations.window_files import window_beside
Path("run").mkdir(exist_ok=True)
window = window_beside("run/last.ckpt")
window.write({"w": averaged(*steps)}, nn.Linear(1, 1), writes=True, token=str(steps[-1]))
with replacing(Path("run/last.ckpt")) as file:
    file.write(str(steps[-1]).encode())
window.publish()
"""
)
_RESUME = (
    _AVERAGER
    + """
from torch import nn
from torch_lawa.integrations.window_files import window_beside
token = Path("run/last.ckpt").read_text()
saved, = (w for w in window_beside("run/last.ckpt").read() if w.token == token)
averager = LatestWeightAverager(k=2)
saved.load({"w": averager}, nn.Linear(1, 1))
print(check(averager))
assert check(averager) == int(token)
"""
)
_INSIDE = (
    _AVERAGER
    + """
from torch import nn
from torch_lawa.integrations.window_files import save_window
save_window(averaged(*steps), nn.Linear(1, 1), Path("checkpoint-1/averaged/window"), writes=True)
"""
)
_RUN = """
from pathlib import Path
import torch
from lawa_lab.recipes.run_folder import RunFolder
folder = RunFolder(Path("run"))
folder.path.mkdir(exist_ok=True)
folder.recover()
folder.save({"step": step, "model": {"w": torch.arange(9000.0) * step}})
folder.save_snapshot({"w": torch.arange(9000.0) * step}, 5, 2.0)
"""


def _average(name: str, prepare: Callable[[Path], None], out: str, *words: str) -> list[Writer]:
    command: tuple[object, ...] = ("average", "run", "-o", out, *words)
    older, newer = lawa(*command, "--last", 3), lawa(*command, "--last", 2)
    overwriting = lawa(*command, "--last", 2, "--overwrite")
    return [
        Writer(f"average to a new {name}", prepare, newer, (out,), again=overwriting),
        Writer(f"average over a {name}", prepare, overwriting, (out,), first=older),
    ]


def _exported(*steps: int, **how: object) -> str:
    return _api(_EXPORT, steps=steps, how=how)


_WATCH = lawa("watch", "run", "-o", "out.safetensors", "--k", 2, "--settle", 0, "--once")
_SWEEP = lawa("sweep", "run", "--k", "1,2", "-o", "out")
_SWEPT = tuple(
    f"out/step-{step}-k-{k}.safetensors" for step in (1, 2, 3) for k in (1, 2) if k <= step
)

_ALL = [
    *_average("file", files, "out.safetensors"),
    *_average("folder", folders, "out"),
    *_average("sharded folder", folders, "out", "--max-shard-size", "1KB"),
    *_average("PyTorch file", torch_files, "out.pt"),
    *_average("distributed checkpoint", distributed, "out"),
    *_average("Megatron checkpoint", megatron, "out"),
    *_average("folder from ZeRO", deepspeed, "out"),
    *(_average("Orbax checkpoint", orbax, "out") if find_spec("tensorstore") else ()),
    Writer("sweep", files, _SWEEP, _SWEPT),
    Writer(
        "watch from the start", files, _WATCH, ("out.safetensors",),
        private=("out.safetensors.window",), stopped=(0, 130),
    ),
    Writer(
        "watch", files, _WATCH, ("out.safetensors",),
        first=(
            "import os; os.rename('run/step-3.safetensors', 'later')\n"
            f"try:\n    {_WATCH}\n"
            "except SystemExit: pass\n"
            "os.rename('later', 'run/step-3.safetensors')"
        ),
        private=("out.safetensors.window",), stopped=(0, 130),
    ),
    Writer(
        "save_pretrained", nothing, _exported(2, 3), ("out",),
        again=_exported(2, 3, overwrite=True),
    ),
    Writer(
        "save_pretrained over shards", nothing, _exported(2, 3, overwrite=True), ("out",),
        first=_exported(1, 2, max_shard_size=1000),
    ),
    Writer(
        "disk store", nothing, _api(_COLLECT, first=4, last=6), (),
        first=_api(_COLLECT, first=1, last=3), again=_CONTINUE, look=_OPEN,
        private=("store",),
    ),
    Writer(
        "disk store, loaded", nothing, _api(_LOAD), (),
        first=_api(_COLLECT, first=1, last=3), again=_CONTINUE, look=_OPEN,
        private=("store",),
    ),
    Writer(
        "window beside a checkpoint", nothing,
        _api(_CHECKPOINT, steps=(2, 3)), ("run/last.ckpt",),
        first=_api(_CHECKPOINT, steps=(1, 2)), look=_RESUME,
        private=("run/.lawa",),
    ),
    Writer(
        "window in a checkpoint", nothing, _api(_INSIDE, steps=(2, 3)),
        ("checkpoint-1/averaged/window.pt",), first=_api(_INSIDE, steps=(1, 2)),
    ),
    Writer(
        "train", nothing, _api(_RUN, step=2),
        ("run/checkpoint.pt", "run/trajectory/step-00000005-epoch-2.safetensors"),
        first=_api(_RUN, step=1),
    ),
]  # fmt: skip
WRITERS: Mapping[str, Writer] = {writer.name: writer for writer in _ALL}
