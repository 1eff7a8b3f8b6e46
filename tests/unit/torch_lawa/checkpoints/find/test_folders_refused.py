"""Folders in which no checkpoint can be read, or not known which: refused with the way out."""

from pathlib import Path

import pytest
from support.layouts import hugging_face, make

from torch_lawa.checkpoints.find.discovery import find_checkpoints
from torch_lawa.errors import FormatError

REFUSED: dict[str, tuple[list[str], str]] = {
    "nothing": ([], r"no checkpoint here or one folder down; looked for \.metadata, model\.saf"),
    "DeepSpeed without rank 0": (
        ["global_step5/zero_pp_rank_1_mp_rank_00_optim_states.pt", "latest"],
        r"global_step5 \(a DeepSpeed checkpoint without the files of rank 0",
    ),
    "one of DeepSpeed's layers": (["layer_00-model_states.pt"], "run: a DeepSpeed checkpoint"),
    "Megatron, two ranks": (
        ["iter_0000900/mp_rank_00/model_optim_rng.pt",
         "iter_0000900/mp_rank_01/model_optim_rng.pt"],
        r"iter_0000900 \(a model-parallel Megatron checkpoint.* merge its ranks",
    ),
    "Diffusers": (
        ["model_index.json", "text_encoder/model.safetensors", "text_encoder_2/model.safetensors"],
        "a Diffusers pipeline.* give the sub-folder",
    ),
    "shards without an index": (
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        r"found model-00001-of-00002.safetensors, .*the index",
    ),
    "several runs": (
        [f"{run}/step-{n}.pt" for run in ("a", "b") for n in (1, 2)],
        r"run: its sub-folders are runs \(a, b\)\. Give one",
    ),
    "several runs of the Trainer": (
        [*hugging_face("a", "b"), *hugging_face("a/checkpoint-1", "b/checkpoint-1")],
        r"run: its sub-folders are runs \(a, b\)\. Give one",
    ),
    "several runs, and a file": (
        ["best.pt", *(f"{run}/step-{n}.pt" for run in ("a", "b") for n in (1, 2))],
        r"are runs \(a, b\)",
    ),
    "a run further down": (["x/a/step-1.pt", "x/a/step-2.pt"], r"are runs \(x\)"),
    "several versions of Lightning": (
        [f"lightning_logs/version_{n}/checkpoints/epoch=0-step={n}.ckpt" for n in (0, 1)],
        r"several runs \(.*version_0/checkpoints, .*version_1/checkpoints\)\. Give one",
    ),
    "the same step twice": (
        ["epoch=3-step=400.ckpt", "epoch=3-step=400-v1.ckpt", "epoch=4-step=500.ckpt"],
        r"run/epoch=3-step=400-v1.ckpt and .*run/epoch=3-step=400.ckpt are both step 400. "
        "Give a pattern",
    ),
    "the same epoch twice": (["ep1.pt", "epoch_1.pt"], r"ep1.pt and .* are both epoch 1\."),
    "steps and epochs": (
        ["step-5.pt", "step-6.pt", "epoch_1.pt"],
        r"a step \(step-5.pt, step-6.pt\) and some an epoch \(epoch_1.pt\).*Give a pattern",
    ),
    "unfinished": (["step-5.partial/model.safetensors"], r"found step-5.partial \(unfinished\)"),
}  # fmt: skip


@pytest.mark.parametrize("layout", REFUSED)
def test_unsupported_folders_are_refused_with_advice(tmp_path: Path, layout: str) -> None:
    files, message = REFUSED[layout]
    folder = tmp_path / "run"
    folder.mkdir()
    make(folder, files)
    with pytest.raises(FormatError, match=message):
        find_checkpoints([folder])
