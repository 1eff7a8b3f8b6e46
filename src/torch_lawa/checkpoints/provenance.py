"""The provenance of an average: in its metadata, or in a file of the folder it is written to."""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_lawa._version import __version__

if TYPE_CHECKING:
    from torch_lawa.checkpoints.storage.paths import Location

__all__ = [
    "PROVENANCE",
    "PROVENANCE_FILE",
    "note_provenance",
    "provenance",
    "read_provenance",
    "write_provenance",
]

PROVENANCE = "torch_lawa"  # the key of the metadata
PROVENANCE_FILE = "lawa.json"  # has the metadata in folders of formats without any


def provenance(coefficients: str, inputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Coefficients and inputs, oldest first, with the version and the date."""
    now = os.environ.get("SOURCE_DATE_EPOCH")
    date = datetime.fromtimestamp(int(now), UTC) if now else datetime.now(UTC)
    return {
        "version": __version__,
        "date": date.isoformat(timespec="seconds"),
        "coefficients": coefficients,
        "inputs": [dict(each) for each in inputs],
    }


def note_provenance(made: Mapping[str, Any], metadata: Mapping[str, str]) -> dict[str, str]:
    """Metadata for safetensors files of PyTorch tensors, including the provenance `made`."""
    return {"format": "pt", **metadata, PROVENANCE: json.dumps(made)}


def write_provenance(folder: Path, metadata: Mapping[str, str]) -> None:
    """Write metadata, which includes the provenance, to a file of a folder."""
    text = json.dumps(dict(metadata), indent=2) + "\n"
    (folder / PROVENANCE_FILE).write_text(text)


def read_provenance(folder: "Location") -> dict[str, str]:
    """The metadata with the provenance that `write_provenance` wrote to a folder, if it did."""
    file = folder.child(PROVENANCE_FILE)
    found = file.read_json().get(PROVENANCE) if file.is_file() else None
    return {PROVENANCE: found} if isinstance(found, str) else {}
