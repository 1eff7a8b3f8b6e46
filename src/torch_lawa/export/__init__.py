"""Export of averaged weights from a running model to a folder that `from_pretrained` loads.

One tensor at a time is averaged on the ranks that hold it, gathered, written and released.
"""

from torch_lawa.export.exporter import export_average
from torch_lawa.export.plan import ExportPlan, plan_export

__all__ = ["ExportPlan", "export_average", "plan_export"]
