"""Llama 3 in torchtitan, with averaged weights: its own configurations, extended by a section.

pip install torch-lawa torchtitan
PYTHONPATH=examples/torchtitan torchrun --nproc-per-node 8 -m torchtitan.train \
  --module averaged_llama3 --config llama3_8b --averager.k 16 --averager.horizon 0.25

Any option of torchtitan can follow; `--help` lists those of the section `averager`.
"""

from torchtitan.models.llama3 import config_registry

from torch_lawa.integrations.torchtitan import AveragedTrainer, AveragingOptions, averaged


def llama3_debugmodel() -> AveragedTrainer.Config:
    """The small model of torchtitan's tests: a window of 4 snapshots, one in two steps."""
    config = averaged(
        config_registry.llama3_debugmodel(), AveragingOptions(k=4, collect_every=2, min_snapshots=1)
    )
    config.checkpoint.enable = True
    config.validator.enable = True
    return config


def llama3_8b() -> AveragedTrainer.Config:
    """Llama 3 8B: 8 snapshots over the last quarter of the run, each a mean of 4 points of it."""
    config = averaged(config_registry.llama3_8b(), AveragingOptions(k=8, samples=4))
    config.checkpoint.enable = True
    config.averager.export = "hf"
    return config
