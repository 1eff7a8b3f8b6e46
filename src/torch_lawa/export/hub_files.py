"""The files beside exported weights, and the names of tensors in them, as the model defines them.

Models of Transformers have a `config` that can save itself, those of Diffusers a `save_config`, and
adapters of PEFT a `peft_config`. They are recognised by these attributes; no library is imported.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_lawa.checkpoints.formats.huggingface import DIFFUSERS
from torch_lawa.errors import LayoutError
from torch_lawa.selection import unwrap
from torch_lawa.shards import is_fsdp

__all__ = ["HubFiles", "hub_files_for"]

Sizes = Iterable[tuple[torch.dtype, int]]  # dtype and number of values of every tensor

# What LoRA adds to a layer, by PEFT's names.
_LORA = r"lora_(?:embedding_)?[AB]"


@dataclass(frozen=True)
class HubFiles:
    """The stem of the weights' file, the names of tensors, and a function that writes the rest."""

    stem: str
    name_of: "TensorNames"
    write: Callable[[Path, Sizes], None]


class TensorNames:
    """The name of a tensor in the file; None if the file does not contain it."""

    def __call__(self, name: str, *, trained: bool) -> str | None:
        """`trained` tensors are averaged, so that none of them may be left out."""
        return name


class _InAdapter(TensorNames):
    """PEFT's names: without the name of the adapter."""

    def __init__(self, adapter: str) -> None:
        name = re.escape(adapter)
        self._added = re.compile(rf"(.*\.{_LORA})\.{name}(\..*)?")
        self._copied = re.compile(rf"(.*)\.modules_to_save\.{name}(\..*)")
        self._adapter = adapter

    def __call__(self, name: str, *, trained: bool) -> str | None:
        found = self._added.fullmatch(name) or self._copied.fullmatch(name)
        if found:
            return found[1] + (found[2] or "")
        if trained:
            raise LayoutError(
                f"tensor {name!r} is trained but not part of the LoRA adapter {self._adapter!r}; "
                f"only the adapter itself can be exported. {_BY_PEFT}"
            )
        return None


_BY_PEFT = (
    "Let PEFT save the model: with averager.swapped_into(model): model.save_pretrained(folder)."
)


def hub_files_for(model: nn.Module | None) -> HubFiles:
    """The files for a model, which may be wrapped, sharded or None."""
    inside = unwrap(model) if model is not None else None
    adapters = getattr(inside, "peft_config", None)
    if inside is not None and adapters:
        return _of_adapter(inside, adapters)
    if inside is not None and _is_diffusers(inside):
        return HubFiles(DIFFUSERS, TensorNames(), partial(_write_diffusers_config, inside))
    config = getattr(inside, "config", None)
    if inside is None or not callable(getattr(config, "save_pretrained", None)):
        return HubFiles("model", TensorNames(), lambda folder, sizes: None)
    return HubFiles("model", TensorNames(), partial(_write_configs, inside))


def _write_configs(model: Any, folder: Path, sizes: Sizes) -> None:
    """Write the configurations as `model.save_pretrained` would, without changing the model."""
    model.config.save_pretrained(str(folder))
    generation = getattr(model, "generation_config", None)
    if generation is not None and callable(getattr(generation, "save_pretrained", None)):
        generation.save_pretrained(str(folder))
    counted: Counter[str] = Counter()
    for dtype, numel in sizes:
        if dtype.is_floating_point:
            counted[str(dtype).removeprefix("torch.")] += numel

    def edit(config: dict[str, Any]) -> None:
        config["architectures"] = [_class_name(model)]
        if counted:
            # Transformers 4 and 5 name it differently.
            key = "torch_dtype" if "torch_dtype" in config else "dtype"
            config[key] = counted.most_common(1)[0][0]

    _edit(folder / "config.json", edit)


def _is_diffusers(model: nn.Module) -> bool:
    """Whether it is a `ModelMixin` of Diffusers, which saves its own configuration."""
    own_config = callable(getattr(model, "save_config", None))
    return own_config and getattr(model, "config_name", None) == "config.json"


def _write_diffusers_config(model: Any, folder: Path, sizes: Sizes) -> None:
    model.save_config(str(folder))
    _edit(folder / "config.json", lambda found: found.update(_class_name=_class_name(model)))


def _class_name(model: nn.Module) -> str:
    """The name of the model's class, without what FSDP2 puts before it."""
    name = type(model).__name__
    return name.removeprefix("FSDP") if is_fsdp(type(model)) else name


def _of_adapter(model: Any, adapters: Any) -> HubFiles:
    name = getattr(model, "active_adapter", None)
    config = adapters.get(name) if isinstance(name, str) and isinstance(adapters, dict) else None
    kind = str(getattr(getattr(config, "peft_type", None), "value", ""))
    if _is_diffusers(model):
        raise LayoutError(
            f"this {_class_name(model)} has the adapters {', '.join(map(str, adapters))}; only a "
            "whole model or a PeftModel can be exported. Let Diffusers save the adapter: with "
            "averager.swapped_into(model): model.save_lora_adapter(folder)."
        )
    if config is None or len(adapters) != 1 or not hasattr(model, "base_model"):
        raise LayoutError(
            f"this model has the adapters {', '.join(map(str, adapters))}; only a PeftModel with "
            f"one adapter can be exported. {_BY_PEFT}"
        )
    if kind != "LORA" or getattr(config, "use_dora", False):
        raise LayoutError(
            f"the adapter {name!r} is a {kind or type(config).__name__} adapter"
            f"{' with DoRA' if kind == 'LORA' else ''}; only plain LoRA can be exported. "
            f"{_BY_PEFT}"
        )

    def write(folder: Path, sizes: Sizes) -> None:
        config.save_pretrained(str(folder))
        # As PEFT does: a saved adapter is loaded for inference by default.
        _edit(folder / "adapter_config.json", lambda found: found.update(inference_mode=True))

    return HubFiles("adapter_model", _InAdapter(str(name)), write)


def _edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    change(config)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
