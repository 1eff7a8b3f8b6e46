"""`LatestWeightAveraging`, a callback for Lightning 2.6: evaluation uses the average of the run."""

from torch_lawa.integrations.lightning.callback import LatestWeightAveraging

__all__ = ["LatestWeightAveraging"]
