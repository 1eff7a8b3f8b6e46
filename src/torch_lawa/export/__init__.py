"""Averaged weights out of a running model, into a folder that `from_pretrained` loads.

One tensor at a time: made where its shards lie, gathered, written, forgotten.
"""

from torch_lawa.export.plan import ExportPlan, plan_export
from torch_lawa.export.saving import save

__all__ = ["ExportPlan", "plan_export", "save"]
