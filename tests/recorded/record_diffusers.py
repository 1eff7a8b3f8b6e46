"""Folders as Diffusers and its training scripts write them, for tests that have no Diffusers.

`make record-diffusers` writes `diffusers.tar.xz`; tests/finetuning compares with larger models.
"""

import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ARCHIVE = Path(__file__).with_name("diffusers.tar.xz")


def tiny_model() -> Any:
    """A model of Diffusers with a few weights."""
    from diffusers import ConfigMixin, ModelMixin
    from diffusers.configuration_utils import register_to_config
    from diffusers.loaders import PeftAdapterMixin

    class TinyModel(ModelMixin, ConfigMixin, PeftAdapterMixin):  # type: ignore[misc]
        @register_to_config
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.to_q = nn.Linear(width, width)
            self.out = nn.Linear(width, 2)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.out(self.to_q(inputs))

    return TinyModel()


def record(folder: Path) -> None:
    """Write every kind of folder into `folder`."""
    from diffusers.training_utils import EMAModel
    from peft import LoraConfig

    torch.manual_seed(0)
    model = tiny_model()
    about = {"model_cls": type(model), "model_config": model.config}
    ema = EMAModel(model.parameters(), decay=0.9, **about)
    for step in _train(model, (500, 1000, 1500)):
        ema.step(model.parameters())
        checkpoint = folder / f"run/checkpoint-{step}"
        model.save_pretrained(checkpoint / "unet")
        ema.save_pretrained(checkpoint / "unet_ema")
        torch.save({"state": {}}, checkpoint / "optimizer.bin")
        (checkpoint / "random_states_0.pkl").write_bytes(b"")
        model.save_pretrained(folder / f"sharded/checkpoint-{step}/unet", max_shard_size=40)
        pipeline = folder / f"pipelines/checkpoint-{step}"
        model.save_pretrained(pipeline / "unet")
        model.save_pretrained(pipeline / "vae")
        (pipeline / "model_index.json").write_text('{"_class_name": "DDPMPipeline"}\n')
    for step in _train(model.half(), (500, 1000)):
        model.save_pretrained(folder / f"variant/checkpoint-{step}/unet", variant="fp16")
    model.float().requires_grad_(False)
    model.add_adapter(LoraConfig(r=1, lora_alpha=8, target_modules=["to_q"]))
    for step in _train(model, (500, 1000)):
        checkpoint = folder / f"lora/checkpoint-{step}"
        model.save_lora_adapter(checkpoint)
        torch.save({"state": {}}, checkpoint / "optimizer.bin")
        # As Accelerate saves the whole model beside it.
        model.save_pretrained(checkpoint)
        (checkpoint / "diffusion_pytorch_model.safetensors").rename(
            checkpoint / "model.safetensors"
        )
        (checkpoint / "config.json").unlink()


def _train(model: nn.Module, steps: tuple[int, ...]) -> Iterator[int]:
    for step in steps:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn(parameter.shape))
        yield step


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


def main(argv: list[str]) -> None:
    """Write the archive."""
    target = Path(argv[0]) if argv else ARCHIVE
    with tempfile.TemporaryDirectory() as name:
        record(Path(name))
        with tarfile.open(target, "w:xz") as archive:
            for path in sorted(Path(name).iterdir()):
                archive.add(path, arcname=path.name, filter=_plain)
    print(f"{target}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
