"""One rank of torchtitan on a CPU: its own trainer and command line, with a tiny model and data.

`support.torchtitan.train` starts it, with the configurations of the example made smaller. What a
CPU lacks is replaced here, and only here: torchtitan asks its accelerator for names and memory,
FlexAttention has no backward pass on CPUs, and gloo has fewer reductions.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch._utils

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchtitan"
VOCABULARY = 32  # letters, a space, three special tokens and two without use


def use_cpu() -> None:
    """Before torchtitan is imported: let it take the CPU for its accelerator."""
    torch._utils._get_available_device_type = lambda: "cpu"

    class Properties:
        name, total_memory = "cpu", 2**30

    for name, value in {
        "get_device_name": "cpu",
        "get_device_properties": Properties,
        "reset_peak_memory_stats": None,
        "empty_cache": None,
        "memory_stats": {},
    }.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda device=None, value=value: value)

    from torch.distributed.fsdp import FSDPModule

    def set_factor(module: FSDPModule, factor: float) -> None:
        """FSDP would multiply gradients by 1 inside a collective, which gloo cannot."""
        assert factor == 1
        set_own_factor(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    set_own_factor = FSDPModule.set_gradient_divide_factor
    FSDPModule.set_gradient_divide_factor = set_factor


def take_microbatches() -> None:
    """torchtitan gives a pipeline schedule its microbatches, as PyTorch after 2.13 expects."""
    from torch.distributed.pipelining import schedules

    def step(
        self: Any,
        *,
        arg_mbs: Any,
        kwarg_mbs: Any,
        target_mbs: Any,
        losses: Any,
        return_outputs: bool = False,
        loss_kwargs: Any = None,
        target: None = None,
    ) -> None:
        for stage in self._stages if hasattr(self, "_stages") else [self._stage]:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        batches = arg_mbs, kwarg_mbs, target_mbs
        self._step_microbatches(*batches, losses, return_outputs, loss_kwargs=loss_kwargs)

    schedules.PipelineScheduleSingle.step = step  # type: ignore[method-assign]
    schedules.PipelineScheduleMulti.step = step  # type: ignore[method-assign]


def tiny(*, plain: bool = False, dim: int = 16, layers: int = 4) -> Any:
    """The example's configuration with a model of four layers and sixteen dimensions."""
    import averaged_llama3
    from torchtitan.config import ParallelismConfig
    from torchtitan.models import llama3
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import config_registry

    config = averaged_llama3.llama3_debugmodel()
    if plain:
        config = config_registry.llama3_debugmodel()
        config.checkpoint.enable = config.validator.enable = True
    large = config.model_spec.model
    blocks = llama3._build_llama3_layers(
        n_layers=layers,
        dim=dim,
        n_heads=2,
        hidden_dim=2 * dim,
        rope=type(large.layers[0].attention.rope)(dim=dim // 2, max_seq_len=64, theta=1e4),
        attn_backend="flex",
    )
    for block in blocks:
        block.attention.inner_attention = ScaledDotProductAttention.Config()
    large.dim, large.vocab_size, large.layers = dim, VOCABULARY, blocks
    large.tok_embeddings.num_embeddings = large.lm_head.out_features = VOCABULARY
    large.tok_embeddings.embedding_dim = large.lm_head.in_features = dim
    large.norm.normalized_shape = dim
    config.loss.loss_fn.global_vocab_size = VOCABULARY
    config.parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    config.training.seq_len, config.training.local_batch_size = 16, 2
    config.training.disable_cuda_graphs = True
    config.checkpoint.interval = config.validator.freq = 2
    config.checkpoint.keep_latest_k = 0
    config.validator.steps = 2
    config.metrics.enable_tensorboard = True  # see record_metrics
    config.debug.seed = 1
    config.debug.deterministic = True
    return config


def plain() -> Any:
    """The same without an averager: torchtitan's own trainer."""
    return tiny(plain=True)


def still() -> Any:
    """Training with a learning rate of zero."""
    config = plain()
    for group in config.optimizer.param_groups:
        group.optimizer_kwargs["lr"] = 0.0
    return config


def smallest() -> Any:
    """A model of a kilobyte, to be recorded."""
    return tiny(dim=4, layers=1)


def use_assets(config: Any, assets: Path) -> Any:
    """Texts and tokens from a folder of `write_assets`."""
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    loader = {"dataset": "c4_test", "dataset_path": str(assets / "text")}
    config.hf_assets_path = str(assets)
    config.dataloader = HuggingFaceTextDataLoader.Config(**loader)
    config.validator.dataloader = HuggingFaceTextDataLoader.Config(**loader)
    return config


def record_metrics(file: Path) -> None:
    """Append everything that torchtitan logs as a metric, exactly."""
    from torchtitan.components.metrics import LoggerContainer

    def log(self: object, metrics: dict[str, Any], step: int) -> None:
        losses = {name: float(v).hex() for name, v in metrics.items() if "loss" in name}
        with file.open("a") as out:
            out.write(json.dumps({"step": step, **losses}) + "\n")

    LoggerContainer.log = log


def kill_in_save(number: int) -> None:
    """End rank 0 without warning in its nth save: tensors are written, the metadata is not."""
    from torch.distributed.checkpoint import FileSystemWriter

    finish, saves = FileSystemWriter.finish, 0

    def finish_or_die(*args: Any) -> None:
        nonlocal saves
        saves += 1
        if saves == number:
            os.kill(os.getpid(), signal.SIGKILL)
        finish(*args)

    FileSystemWriter.finish = finish_or_die  # type: ignore[method-assign]


def main() -> None:
    """Run torchtitan's own main function."""
    torch.set_num_threads(1)
    assets = Path(sys.argv.pop(1))
    use_cpu()
    take_microbatches()
    sys.path.insert(0, str(EXAMPLE))
    from torchtitan import train
    from torchtitan.distributed import utils

    utils.set_pg_timeouts = lambda **options: None  # its barrier names a device of NCCL
    module = sys.modules["__main__"]
    for make in (tiny, plain, still, smallest):
        setattr(module, f"{make.__name__}_run", lambda make=make: use_assets(make(), assets))
    folder = Path(sys.argv[sys.argv.index("--dump_folder") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    record_metrics(folder / f"metrics-{os.environ['RANK']}.jsonl")
    if number := int(os.environ.get("LAWA_KILL_IN_SAVE", 0)):
        kill_in_save(number)
    train.main()


if __name__ == "__main__":
    main()
