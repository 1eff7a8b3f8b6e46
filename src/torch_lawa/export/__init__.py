"""Averaged weights out of a running model, into a folder that `from_pretrained` loads.

One tensor at a time: made where its shards lie, gathered, written, forgotten.
"""

from torch_lawa.export.exporter import export_average
from torch_lawa.export.plan import ExportPlan, plan_export

__all__ = ["ExportPlan", "export_average", "plan_export"]
