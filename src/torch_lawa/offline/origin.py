"""How a checkpoint was averaged, read back from what `average` noted in it."""

import json
from collections.abc import Mapping
from typing import Any

from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.checkpoints.formats.huggingface import read_json
from torch_lawa.checkpoints.provenance import PROVENANCE
from torch_lawa.offline.printing import aligned, plain, wrapped

__all__ = ["describe_provenance", "read_provenance"]


def read_provenance(opened: Checkpoint) -> dict[str, Any] | None:
    """How a result was made, as it says itself: in its metadata, or in a file beside it."""
    text: object = opened.metadata.get(PROVENANCE)
    if text is None and opened.layout == "distributed":
        beside = opened.location.child("lawa.json")
        text = read_json(beside).get(PROVENANCE) if beside.is_file() else None
    try:
        made = json.loads(text) if isinstance(text, str) else text
    except (ValueError, RecursionError):
        return None
    return made if isinstance(made, dict) else None


def describe_provenance(made: Mapping[str, Any] | None) -> list[str]:
    """Lines for people; none where it was not averaged."""
    if made is None:
        return []
    found = made.get("inputs")
    inputs = [i for i in found if isinstance(i, dict)] if isinstance(found, list) else []
    lines = wrapped(f"by torch-lawa {made.get('version')}, {made.get('date')}")
    # An averager's snapshots never were files.
    kind = "checkpoints" if any("path" in each for each in inputs) else "snapshots"
    lines += wrapped(f"{len(inputs)} {kind}, {made.get('coefficients')}:")
    rows = []
    for each in inputs:
        number = next((f"{by} {each[by]}" for by in ("step", "epoch") if each.get(by) is not None),
                      "")  # fmt: skip
        weight = each.get("weight")
        shown = f"{weight:.4g}" if isinstance(weight, int | float) else str(weight)
        rows.append((number, f"weight {shown}", plain(str(each.get("path", "")))))
    return lines + aligned(rows, right={0})
