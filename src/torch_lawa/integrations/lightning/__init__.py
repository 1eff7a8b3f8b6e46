"""`LatestWeightAveraging`, a callback for Lightning 2.6: two lines, and evaluation is averaged."""

from torch_lawa.integrations.lightning.callback import LatestWeightAveraging

__all__ = ["LatestWeightAveraging"]
