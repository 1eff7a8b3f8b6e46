"""Saves and loads an averager with Accelerate's checkpoints.

```python
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
averager = LatestWeightAverager(k=6)
register_averager(accelerator, averager, model)
```
"""

from pathlib import Path
from typing import Any

from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.logging import get_logger  # type: ignore[import-untyped]
from torch import nn

from torch_lawa.averager import LatestWeightAverager
from torch_lawa.errors import ConfigError
from torch_lawa.integrations.window_files import load_window, save_window
from torch_lawa.masters import require_visible_parameters
from torch_lawa.swap import refuse_if_swapped

__all__ = ["register_averager"]

logger = get_logger(__name__)


def register_averager(
    accelerator: Accelerator,
    averager: LatestWeightAverager,
    model: nn.Module,
    *,
    name: str = "averager",
) -> None:
    """Save and load an averager with `accelerator.save_state` and `load_state`.

    Call it in every process, with the model that `accelerator.prepare` returned. The whole window
    goes into each checkpoint folder as `averager.pt`. For a sharded model (FSDP2) it is a folder
    `averager` that every process writes to and any number of processes can load. A second
    averager, of another model, needs another `name`.

    Do not use `accelerator.register_for_checkpointing`: it saves what the main process holds,
    which is one shard of a sharded model.
    """
    require_visible_parameters(model)
    hooks = _AveragerHooks(accelerator, averager, model, name)
    for other in accelerator._save_model_state_pre_hook.values():
        if isinstance(other, _AveragerHooks) and other.name == name:
            raise ConfigError(
                f"an averager is registered as {name!r} already: give this one another name=..."
            )
    accelerator.register_save_state_pre_hook(hooks)
    accelerator.register_load_state_pre_hook(hooks.load)


class _AveragerHooks:
    """The save and load hooks of one averager; called in every process."""

    def __init__(
        self,
        accelerator: Accelerator,
        averager: LatestWeightAverager,
        model: nn.Module,
        name: str,
    ) -> None:
        if Path(name).name != name or name in ("", ".."):
            raise ConfigError(f"name={name!r}: it must be the name of a file, without folders.")
        self.name = name
        self._accelerator, self._averager, self._model = accelerator, averager, model

    def __call__(self, models: Any, weights: Any, folder: str) -> None:
        # Otherwise the run would silently resume from the mean.
        refuse_if_swapped(self._model, "accelerator.save_state was called")
        configuration = self._accelerator.project_configuration
        writes = (
            self._accelerator.is_local_main_process
            if configuration.save_on_each_node
            else self._accelerator.is_main_process
        )
        save_window(self._averager, self._model, Path(folder) / self.name, writes=writes)

    def load(self, models: Any, folder: str) -> None:
        refuse_if_swapped(self._model, "accelerator.load_state was called")
        if not load_window(self._averager, self._model, Path(folder) / self.name):
            logger.warning(
                f"{folder} holds no window named {self.name!r} (it was saved without an "
                "averager): a new window begins."
            )
            self._averager.reset()
