"""The tables of docs/guides/scale.md, made by the calculator. Run it to update the page."""

from collections.abc import Callable, Iterable
from pathlib import Path

from torch_lawa.capacity.estimate import Cost, TrainingRun, cost_of, parse_count
from torch_lawa.capacity.fit import check_fit, format_seconds, largest_k, smallest_nu
from torch_lawa.capacity.machine import GIB, Machine, constants
from torch_lawa.units import format_bytes

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "scale.md"
SIZES = ("7B", "70B", "400B")
GPUS = (8, 64, 512, 4096)
SETTINGS = {
    "7B": (8, 64, 512, 4096),
    "70B": (8, 16, 32, 64, 512, 4096),
    "400B": (64, 128, 256, 512, 4096),
}
REASONS = {"run": "the run", "gpu": "GPU memory", "host": "RAM", "time": "time"}


def plan(size: str, gpus: int, **options: object) -> Cost:
    return cost_of(TrainingRun(params=parse_count(size), gpus=gpus, **options))  # type: ignore[arg-type]


def conclusion(cost: Cost) -> str:
    problems = check_fit(cost).problems
    if problems:
        return "no: " + ", ".join(REASONS[p.kind] for p in problems)
    return f"yes, {format_bytes(cost.gpu_left)} left"


def without_averaging(cost: Cost) -> str | None:
    """How much a run needs that does not fit even without averaging."""
    if conclusion(cost) != "no: the run":
        return None
    return f"the run alone needs {format_bytes(cost.gpu_training)} per GPU"


def table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [list(head), *([str(cell) for cell in row] for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def up_to_a_hundred(k: int | None) -> str:
    return "none" if k is None else str(k) if k <= 100 else "more than 100"


def snapshot() -> str:
    head = (
        "parameters, GPUs",
        "snapshot, per GPU",
        "window, RAM per node",
        "of 1 TiB",
        "copy on the GPU",
        "to RAM, in the background",
        "to disk, in the background",
        "mean read from RAM",
        "from disk",
    )
    rows = []
    for size in SIZES:
        for gpus in GPUS:
            host, disk = plan(size, gpus), plan(size, gpus, store="disk")
            named = f"{size}, {gpus}"
            if too_large := without_averaging(host):
                rows.append([named, too_large, *[""] * 7])
                continue
            rows.append(
                [
                    named,
                    format_bytes(host.snapshot.gpu),
                    format_bytes(host.host.node),
                    percent(host.host.node / (1024 * GIB)),
                    *map(format_seconds, (host.stream_seconds, host.behind_seconds)),
                    format_seconds(disk.behind_seconds),
                    *map(format_seconds, (host.read_seconds, disk.read_seconds)),
                ]
            )
    return table(head, rows)


def stores() -> str:
    options: dict[str, dict[str, object]] = {
        "host": {},
        "host, bfloat16": {"storage_dtype": "bfloat16"},
        "device": {"store": "device"},
        "device, bfloat16": {"store": "device", "storage_dtype": "bfloat16"},
        "disk": {"store": "disk"},
    }
    rows = []
    for size, counts in SETTINGS.items():
        for gpus in counts:
            if too_large := without_averaging(plan(size, gpus)):
                rows.append([f"{size}, {gpus}", too_large, *[""] * 4])
                continue
            cells = [conclusion(plan(size, gpus, **option)) for option in options.values()]
            rows.append([f"{size}, {gpus}", *cells])
    return table(("parameters, GPUs", *options), rows)


def windows() -> str:
    head = ("parameters, GPUs", "1 TiB, float32", "1 TiB, bfloat16", "2 TiB, float32", "bfloat16")
    rows = []
    for size, counts in SETTINGS.items():
        for gpus in counts:
            runs = [
                plan(size, gpus, storage_dtype=dtype, machine=Machine(host_ram_gib=ram)).run
                for ram in (1024, 2048)
                for dtype in (None, "bfloat16")
            ]
            found = [largest_k(run) for run in runs]
            if any(found):
                rows.append([f"{size}, {gpus}", *map(up_to_a_hundred, found)])
    return table(head, rows)


def intervals() -> str:
    head = ["parameters, GPUs", "to RAM", "ν, 1 s steps"]
    for disk in (5, 1):
        head += [f"to disk, {disk} GB/s per node", "ν, 1 s steps", "ν, 10 s steps"]
    rows = []
    for size, counts in SETTINGS.items():
        for gpus in counts:
            host = plan(size, gpus, step_seconds=1.0)
            if not check_fit(host).fits:
                continue
            row = [f"{size}, {gpus}", format_seconds(host.behind_seconds), smallest_nu(host.run)]
            for disk in (5, 1):
                short, long = (
                    plan(
                        size, gpus, store="disk", step_seconds=step, machine=Machine(disk_gbs=disk)
                    )
                    for step in (1.0, 10.0)
                )
                row += [format_seconds(short.behind_seconds)]
                row += [smallest_nu(short.run), smallest_nu(long.run)]
            rows.append(row)
    return table(head, rows)


def replicated() -> str:
    head = (
        "parameters",
        "snapshot, per GPU",
        "window, RAM per node",
        "of 1 TiB",
        "saved by one window per node",
        "fits",
    )
    rows = []
    for size, dtype in (
        ("125M", "float32"),
        ("1.3B", "float32"),
        ("3B", "float32"),
        ("7B", "bfloat16"),
        ("7B", "float32"),
    ):
        cost = plan(size, 8, dtype=dtype, sharding="ddp")
        row = [
            format_bytes(cost.snapshot.gpu),
            format_bytes(cost.host.node),
            percent(cost.host.node / (1024 * GIB)),
            format_bytes(cost.saved_by_sharing),
            conclusion(cost),
        ]
        rows.append([f"{size}, {dtype}", *row])
    return table(head, rows)


def checkpoints() -> str:
    head = ["parameters", "weights and Adam", "window, float32", "window, bfloat16"]
    head += [f"writing the float32 window, {gpus} GPUs" for gpus in GPUS[1:]]
    rows = []
    for size in SIZES:
        plain, narrow = (plan(size, 512, storage_dtype=dtype) for dtype in (None, "bfloat16"))
        sizes = (plain.checkpoint_plain, plain.checkpoint_window, narrow.checkpoint_window)
        times = [plan(size, gpus).checkpoint_seconds for gpus in GPUS[1:]]
        rows.append([size, *map(format_bytes, sizes), *map(format_seconds, times)])
    return table(head, rows)


def machine() -> str:
    rows = [
        [f"`--{c.name.replace('_', '-')}`", f"{c.value:g} {c.unit}".strip(), c.what, c.source]
        for c in constants(Machine())
    ]
    return table(("option", "value", "what it is", "source"), rows)


TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f for f in (snapshot, stores, windows, intervals, replicated, checkpoints, machine)
}


def filled(text: str) -> str:
    """`text` with every table between its markers replaced."""
    for name, make in TABLES.items():
        begin, end = f"<!-- table {name} -->\n", f"<!-- end {name} -->"
        assert text.count(begin) == text.count(end) == 1, name
        before, _, rest = text.partition(begin)
        text = before + begin + make() + "\n" + end + rest.partition(end)[2]
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
