"""Importing timm where it is installed, also beside a torchvision whose operators cannot load.

timm needs torchvision, and PyPI's torchvision is built for CUDA: beside the CPU build of torch it
does not import, and as long as it is there most of Transformers does not either. So timm is no
part of the development environment: `make test-timm` makes one for it.
"""

import importlib
import sys
from types import ModuleType

import torch

_OPERATOR = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[torch.library.Library] = []  # what a library declares goes when it does


def import_timm() -> ModuleType | None:
    """timm, or None where it is not installed."""
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return None
    except RuntimeError:
        # Its compiled part could not be loaded, and without that two names are not declared.
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        _declared.append(torch.library.Library("torchvision", "FRAGMENT"))
        _declared[0].define(f"nms{_OPERATOR}")
        _declared[0].define(f"qnms{_OPERATOR}")
    try:
        return importlib.import_module("timm")
    except ModuleNotFoundError:
        return None
