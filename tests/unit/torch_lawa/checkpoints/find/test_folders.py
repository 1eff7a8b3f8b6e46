"""Folders as frameworks leave them, and what is made of them."""

import errno
import os
import re
from pathlib import Path

import pytest
from support.layouts import hugging_face, make, names

from torch_lawa.checkpoints.find.discovery import FoundCheckpoint, find_checkpoints
from torch_lawa.checkpoints.storage.paths import LocalPath, Location

# layout -> files, what is found (oldest first), ordered by, what the notes speak of
RUNS: dict[str, tuple[list[str], list[str], str, list[str]]] = {
    "Hugging Face Trainer": (
        [*hugging_face("checkpoint-1000", "checkpoint-500"), "runs/Jan01/events.out.tfevents.1.a"],
        ["checkpoint-500", "checkpoint-1000"], "step", [],
    ),
    "Hugging Face Trainer, with the final model": (
        [*hugging_face("checkpoint-500", "checkpoint-1000"), "model.safetensors", "config.json",
         "mp_rank_00_model_states.pt"],
        ["checkpoint-500", "checkpoint-1000"], "step", ["model.safetensors"],
    ),
    "Hugging Face Trainer, one checkpoint so far": (
        [*hugging_face("checkpoint-500"), "model.safetensors"], ["checkpoint-500"], "step",
        ["model.safetensors"],
    ),
    "adapters of PEFT, sharded models": (
        ["checkpoint-5/adapter_model.safetensors", "checkpoint-10/model.safetensors.index.json",
         "checkpoint-10/model-00001-of-00001.safetensors", "adapter_model.safetensors"],
        ["checkpoint-5", "checkpoint-10"], "step", ["adapter_model.safetensors"],
    ),
    "Hugging Face Trainer with DeepSpeed beside the weights": (
        [f"checkpoint-{n}/{file}" for n in (5, 10)
         for file in ("model.safetensors", f"global_step{n}/mp_rank_00_model_states.pt")],
        ["checkpoint-5", "checkpoint-10"], "step", [],
    ),
    "Hugging Face Trainer with DeepSpeed and no weights": (
        [f"checkpoint-{n}/{file}" for n in (5, 10)
         for file in (f"global_step{n}/zero_pp_rank_0_mp_rank_00_model_states.pt", "latest",
                      "config.json", "zero_to_fp32.py")],
        ["checkpoint-5/global_step5", "checkpoint-10/global_step10"], "step", [],
    ),
    "DeepSpeed": (
        ["global_step500/mp_rank_00_model_states.pt", "latest", "zero_to_fp32.py",
         *(f"global_step500/zero_pp_rank_{n}_mp_rank_00_optim_states.pt" for n in (0, 1)),
         *(f"global_step1000/zero_pp_rank_{n}_mp_rank_00_model_states.pt" for n in (0, 1)),
         "global_step1000/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"],
        ["global_step500", "global_step1000"], "step", [],
    ),
    "DeepSpeed, with the final model": (
        ["model.safetensors", *(f"global_step{n}/mp_rank_00_model_states.pt" for n in (5, 10))],
        ["global_step5", "global_step10"], "step", ["model.safetensors"],
    ),
    "DeepSpeed, in a folder": (
        [f"checkpoints/global_step{n}/mp_rank_00_model_states.pt" for n in (5, 10)],
        ["checkpoints/global_step5", "checkpoints/global_step10"], "step", [],
    ),
    "Accelerate": (
        [f"step_{n}/{file}" for n in (20, 100)
         for file in ("pytorch_model.bin", "optimizer.bin", "random_states_0.pkl", "sampler.bin")],
        ["step_20", "step_100"], "step", [],
    ),
    "Accelerate with FSDP": (
        [f"checkpoint-{n}/{part}_0/.metadata" for n in (20, 100)
         for part in ("pytorch_model_fsdp", "optimizer")],
        ["checkpoint-20/pytorch_model_fsdp_0", "checkpoint-100/pytorch_model_fsdp_0"], "step", [],
    ),
    "Lightning": (
        ["epoch=9-step=1000.ckpt", "epoch=10-step=1100.ckpt", "last.ckpt"],
        ["epoch=9-step=1000.ckpt", "epoch=10-step=1100.ckpt"], "step", ["last.ckpt"],
    ),
    "Lightning, epochs and a metric": (
        ["epoch=9-val_loss=0.25.ckpt", "epoch=10-val_loss=0.5.ckpt"],
        ["epoch=9-val_loss=0.25.ckpt", "epoch=10-val_loss=0.5.ckpt"], "epoch", [],
    ),
    "Lightning, from the project's folder": (
        ["lightning_logs/version_3/checkpoints/epoch=0-step=9.ckpt",
         "lightning_logs/version_3/checkpoints/epoch=1-step=18.ckpt",
         "lightning_logs/version_3/hparams.yaml", "lightning_logs/version_2/hparams.yaml"],
        ["lightning_logs/version_3/checkpoints/epoch=0-step=9.ckpt",
         "lightning_logs/version_3/checkpoints/epoch=1-step=18.ckpt"], "step", [],
    ),
    "Lightning, from a version's folder": (
        ["checkpoints/epoch=0-step=9.ckpt", "hparams.yaml", "final.pt"],
        ["checkpoints/epoch=0-step=9.ckpt"], "step", ["final.pt"],
    ),
    "timm": (
        ["checkpoint-9.pth.tar", "checkpoint-12.pth.tar", "last.pth.tar", "model_best.pth.tar",
         "recovery-12-50.pth.tar", "args.yaml", "summary.csv"],
        ["checkpoint-9.pth.tar", "checkpoint-12.pth.tar"], "step",
        ["last.pth.tar", "model_best.pth.tar", "recovery-12-50.pth.tar"],
    ),
    "Megatron, torch_dist": (
        ["iter_0000900/.metadata", "iter_0000900/common.pt", "iter_0000900/__0_0.distcp",
         "iter_0001000/.metadata", "latest_checkpointed_iteration.txt"],
        ["iter_0000900", "iter_0001000"], "step", [],
    ),
    "Megatron, one rank": (
        [f"iter_{n:07}/mp_rank_00/{file}" for n in (900, 1000)
         for file in ("model_optim_rng.pt", "distrib_optim.pt")],
        ["iter_0000900/mp_rank_00/model_optim_rng.pt",
         "iter_0001000/mp_rank_00/model_optim_rng.pt"], "step", [],
    ),
    "torchtitan": (
        ["checkpoint/step-500/.metadata", "checkpoint/step-500/__0_0.distcp",
         "checkpoint/step-1000/.metadata", "tb/events.out.tfevents.1.host"],
        ["checkpoint/step-500", "checkpoint/step-1000"], "step", [],
    ),
    "DCP, the model in a folder of its own": (
        [f"step-{n}/{part}/.metadata" for n in (500, 1000) for part in ("model", "optimizer")],
        ["step-500/model", "step-1000/model"], "step", [],
    ),
    "LitGPT": (
        ["step-000200/lit_model.pth", "step-000200/model_config.yaml", "step-000400/lit_model.pth",
         "final/lit_model.pth"],
        ["step-000200/lit_model.pth", "step-000400/lit_model.pth"], "step", ["final"],
    ),
    "Composer": (
        ["ep0-ba100-rank0.pt", "ep0-ba200-rank0.pt"],
        ["ep0-ba100-rank0.pt", "ep0-ba200-rank0.pt"], "step", [],
    ),
    "numbers and nothing else": (
        ["500.pt", "1000.pt", "best.pt"], ["500.pt", "1000.pt"], "step", ["best.pt"],
    ),
    "a padded number": (
        ["model_0500.safetensors", "model_10000.safetensors", "model.png"],
        ["model_0500.safetensors", "model_10000.safetensors"], "step", [],
    ),
    "one so far": (["model_0500.safetensors"], ["model_0500.safetensors"], "step", []),
    "unfinished and hidden": (
        ["step-1.pt", "step-2.pt.77.partial", "step-3.partial/model.safetensors", ".step-4.pt",
         "step-5/optimizer.pt", "step-6/", "tmp-checkpoint-7/model.safetensors", "step-8-tmp.pt"],
        ["step-1.pt"], "step", ["step-2.pt.77.partial", "step-3.partial", "step-5", "step-6",
                                "tmp-checkpoint-7", "step-8-tmp.pt"],
    ),
    "a model beside the steps of its run": (
        ["model.safetensors", "step-1.safetensors"], ["step-1.safetensors"], "step",
        ["model.safetensors"],
    ),
    "a model beside the folder of its run": (
        ["model.safetensors", "checkpoints/step-1.pt", "checkpoints/step-2.pt"],
        ["checkpoints/step-1.pt", "checkpoints/step-2.pt"], "step", ["model.safetensors"],
    ),
    "data in folders": (
        ["step-1.pt", *(f"images/{n}/class.bin" for n in range(65))], ["step-1.pt"], "step", [],
    ),
    "a run beside its parts": (
        ["step-1.pt", "step-2.pt", "old/step-1.pt", "old/step-2.pt", "checkpoints/step-9.pt"],
        ["step-1.pt", "step-2.pt"], "step", ["old", "checkpoints"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("layout", RUNS)
def test_a_run_is_expanded(tmp_path: Path, layout: str) -> None:
    files, expected, ordered_by, spoken_of = RUNS[layout]
    found = find_checkpoints([make(tmp_path, files)])
    assert names(found, tmp_path) == expected
    assert (found.ordered_by, found.is_run) == (ordered_by, True)
    notes = "\n".join(found.notes)
    assert [name for name in spoken_of if name not in notes] == []
    assert bool(notes) == bool(spoken_of)


ONE: dict[str, tuple[list[str], str]] = {
    "a model's folder": (["model.safetensors", "config.json"], "."),
    "an adapter": (["adapter_model.safetensors", "adapter_config.json"], "."),
    "a sharded model": (
        ["model.safetensors.index.json", "model-00001-of-00001.safetensors"], "."
    ),
    "DCP": ([".metadata", "__0_0.distcp"], "."),
    "nanoGPT": (["ckpt.pt"], "ckpt.pt"),
    "DCP, the model in a folder of its own": (["model/.metadata", "optimizer/.metadata"], "model"),
    "Megatron, one rank": (["mp_rank_00/model_optim_rng.pt"], "mp_rank_00/model_optim_rng.pt"),
    "Megatron, one rank of a pipeline": (
        ["mp_rank_00_000/model_optim_rng.pt"], "mp_rank_00_000/model_optim_rng.pt",
    ),
    "a numbered name within": (["model_0/.metadata"], "model_0"),
    "a folder of checkpoints with one": (["checkpoints/last.ckpt"], "checkpoints/last.ckpt"),
    "one here, one in a folder": (["final.pt", "checkpoints/last.ckpt"], "final.pt"),
    "two adapters, one within the other": (
        ["adapter_model.safetensors", "adapter_2/adapter_model.safetensors"], ".",
    ),
    "Llama's own files beside": (
        ["model.safetensors", "consolidated.00.pth", "consolidated.01.pth"], ".",
    ),
    "sentence-transformers": (["model.safetensors", "2_Dense/model.safetensors"], "."),
    "DeepSpeed's files beside": (
        ["model.safetensors", "global_step5/mp_rank_00_model_states.pt"], ".",
    ),
    "DeepSpeed": (
        ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"], ".",
    ),
    "DeepSpeed, universal": (["mp_rank_00_model_states.pt", "zero/a.weight/fp32.pt"], "."),
    "DeepSpeed's files in it": (["model.safetensors", "mp_rank_00_model_states.pt"], "."),
}  # fmt: skip


@pytest.mark.parametrize("layout", ONE)
def test_a_folder_that_is_one_checkpoint(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own name is a step's, so that the (empty) files are not opened."""
    files, expected = ONE[layout]
    folder = make(tmp_path / "step-7", files)
    found = find_checkpoints([folder])
    assert found.found == (FoundCheckpoint(LocalPath(folder / expected), 7, None),)
    assert (found.ordered_by, found.is_run) == ("step", False)
    monkeypatch.chdir(folder)
    assert find_checkpoints(["."]).found[0].step == 7


@pytest.mark.parametrize(
    ("files", "notes"),
    [
        (["model.safetensors", "2_Dense/model.safetensors"], []),
        (["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"], []),
        (["model.safetensors.index.json", "model-00001-of-00001.safetensors"], []),
        (
            ["model.safetensors", "model_0500.safetensors"],
            ["{}: taken as one checkpoint (model.safetensors); ignored: "
             "model_0500.safetensors"],
        ),
        (["ckpt.pt"], ["{}: taken as one checkpoint, {}/ckpt.pt"]),
        (
            ["ckpt.pt", "checkpoints/last.ckpt"],
            ["{}: taken as one checkpoint, {}/ckpt.pt",
             "left out: {}/checkpoints (checkpoints are in {} itself)"],
        ),
        (
            ["ckpt.pt", "x.pt.5.partial"],
            ["{}: taken as one checkpoint, {}/ckpt.pt", "left out: x.pt.5.partial (unfinished)"],
        ),
    ],
)  # fmt: skip
def test_what_is_taken_as_one_is_noted(tmp_path: Path, files: list[str], notes: list[str]) -> None:
    folder = make(tmp_path / "step-7", files)
    assert list(find_checkpoints([folder]).notes) == [n.replace("{}", str(folder)) for n in notes]


def test_what_lies_beside_the_run_is_noted(tmp_path: Path) -> None:
    make(tmp_path, ["checkpoints/step-9.pt", "final.pt"])
    assert find_checkpoints([tmp_path]).notes == (
        f"left out: {tmp_path}/final.pt (not in {tmp_path}/checkpoints)",
    )


@pytest.mark.parametrize(
    ("name", "code"), [("step-2", errno.EACCES), ("step-2", errno.EIO), ("lost+found", errno.EIO)]
)
def test_no_other_checkpoint_takes_the_place_of_one_that_cannot_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int
) -> None:
    make(tmp_path, ["step-1/model.safetensors", f"{name}/", "step-3/model.safetensors"])
    children = LocalPath.children

    def listed(location: LocalPath) -> list[Location]:
        if location.name == name:
            raise OSError(code, os.strerror(code), str(location))
        return children(location)

    monkeypatch.setattr(LocalPath, "children", listed)
    with pytest.raises(OSError, match=re.escape(name)):
        find_checkpoints([tmp_path])


def test_a_folder_that_cannot_be_listed_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not ours to read, or deleted by the run while we look."""
    make(tmp_path, ["step-1.pt", "lost+found/"])
    children = LocalPath.children

    def listed(location: LocalPath) -> list[Location]:
        if location.name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return children(location)

    monkeypatch.setattr(LocalPath, "children", listed)
    assert find_checkpoints([tmp_path]).notes == (
        "left out: lost+found (cannot be listed: Permission denied)",
    )
