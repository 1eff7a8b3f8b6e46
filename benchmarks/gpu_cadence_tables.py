"""The tables of `gpu_cadence.py`, from its raw file alone, whole or cut short."""

import json
from pathlib import Path
from statistics import median
from typing import Any

STORES = ("host", "device")
SHORT, LONG = 10, 100  # steps in a block

Row = dict[str, Any]


def show(folder: Path) -> None:
    """Print the results in a folder, one table per model."""
    lines = (folder / "raw.jsonl").read_text().split("\n")[:-1]  # a last one without end is torn
    rows = [json.loads(line) for line in lines]
    for model in dict.fromkeys(row["model"] for row in rows if "model" in row):
        _show_model(model, [row for row in rows if row.get("model") == model])


def _show_model(model: str, rows: list[Row]) -> None:
    facts = _one(rows, "model")
    whole = "" if any(row["kind"] == "end" for row in rows) else "; CUT SHORT"
    print(
        f"\n{model}: {facts['parameters']:,} parameters, {facts['tokens']}, k = {facts['k']}{whole}"
    )
    blocks = [row for row in rows if row["kind"] == "block" and row["round"] >= 0]
    print("  store   every   ms without   with     with / without (rounds)        collect holds")
    for every in (1, SHORT, LONG):
        num_steps = LONG if every == LONG else SHORT
        base = _times(blocks, num_steps, "none", 0)
        for store in STORES:
            _show_cell(base, blocks, num_steps, store, every)
    base, again = _times(blocks, SHORT, "none", 0), _times(blocks, SHORT, "none", 0, again=True)
    if again:
        print(f"  none    against none{'':12} {_spread(_ratios(again, base))}")
    for row in rows:
        if row["kind"] == "memory":
            print(
                f"  GPU memory, {row['store']} store, in copies of the parameters:"
                f" collecting adds {row['collecting']:.3f} to the peak of training;"
                f" {row['lent']:.3f} while the average is swapped in,"
                f" {row['peak_of_lending']:.3f} at the peak of the swap"
            )
        elif row["kind"] not in ("block", "model"):
            told = {n: v for n, v in row.items() if n not in ("kind", "model")}
            print(f"  {row['kind']}: {json.dumps(told)}")


def _show_cell(
    base: dict[int, float], blocks: list[Row], num_steps: int, store: str, every: int
) -> None:
    times = _times(blocks, num_steps, store, every)
    if not times or not base:
        return
    held = [
        1e3 * value
        for row in blocks
        if (row["store"], row["every"]) == (store, every)
        for value in row["held"]
    ]
    print(
        f"  {store:7} {every:5} {1e3 * median(base.values()):12.2f}"
        f" {1e3 * median(times.values()):7.2f}  {_spread(_ratios(times, base))}"
        f" {median(held):8.3f} ms, at most {max(held):.3f}"
    )


def _times(
    blocks: list[Row], num_steps: int, store: str, every: int, *, again: bool = False
) -> dict[int, float]:
    """Seconds a step, by round."""
    wanted = (num_steps, store, every, again)
    return {
        row["round"]: row["seconds"]
        for row in blocks
        if (row["num_steps"], row["store"], row["every"], row["again"]) == wanted
    }


def _ratios(times: dict[int, float], base: dict[int, float]) -> list[float]:
    """Round by round, of rounds that have both."""
    return [seconds / base[turn] for turn, seconds in times.items() if turn in base]


def _spread(ratios: list[float]) -> str:
    if not ratios:
        return f"{'no whole round':>30}"
    return f"{median(ratios):8.4f} ({min(ratios):.4f} to {max(ratios):.4f}, {len(ratios):2})"


def _one(rows: list[Row], kind: str) -> Row:
    return next(row for row in rows if row["kind"] == kind)
