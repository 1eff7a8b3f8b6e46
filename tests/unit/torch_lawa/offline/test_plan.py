"""What a plan refuses, chooses and says, before anything is written."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from torch_lawa.errors import ConfigError, FormatError, LayoutError, OutputError
from torch_lawa.offline.average import average_checkpoints, run_average
from torch_lawa.offline.options import AverageOptions
from torch_lawa.offline.plan import plan_average
from torch_lawa.offline.sweep import sweep_checkpoints


def write(folder: Path, step: int, **tensors: torch.Tensor) -> Path:
    path = folder / f"step_{step}.safetensors"
    save_file(tensors or {"w": torch.full((4,), float(step)), "n": torch.tensor(step)}, path)
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    for step in (100, 200, 300, 400):
        write(folder, step)
    return folder


def test_the_plan_reads_like_one(run: Path, tmp_path: Path) -> None:
    text = str(plan_average(run, tmp_path / "m.safetensors", last=2))
    assert "step 300  weight 0.5" in text
    assert "1 averaged (F32; 4 values), 1 from the newest" in text
    assert "m.safetensors: one safetensors file" in text
    assert not (tmp_path / "m.safetensors").exists()


def test_a_run_needs_a_selection(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"4 checkpoints .*--last 4"):
        plan_average(run, tmp_path / "m")


@pytest.mark.parametrize(
    ("selection", "steps"),
    [
        ({"last": 2}, [300, 400]),
        ({"at": 300, "last": 2}, [200, 300]),
        ({"start": 200}, [200, 300, 400]),
        ({"stop": 300, "start": 200}, [200, 300]),
        ({"every": 200}, [200, 400]),
    ],
)
def test_selections(run: Path, tmp_path: Path, selection: dict[str, int], steps: list[int]) -> None:
    plan = plan_average(run, tmp_path / "m", **selection)  # type: ignore[arg-type]
    assert [i.step for i in plan.inputs] == steps


def test_weights_go_with_their_files(run: Path, tmp_path: Path) -> None:
    files = [run / "step_400.safetensors", run / "step_100.safetensors"]
    plan = plan_average(files, tmp_path / "m.safetensors", weights=[3, 1])
    assert [(i.step, i.weight) for i in plan.inputs] == [(100, 0.25), (400, 0.75)]
    run_average(plan)
    from safetensors.torch import load_file

    assert load_file(tmp_path / "m.safetensors")["w"].tolist() == [325.0] * 4


def test_weights_are_counted(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 weights for 1 input "):
        plan_average(run, tmp_path / "m", last=3, weights=[1, 2, 3])
    with pytest.raises(ConfigError, match="exclude each other"):
        options = AverageOptions(coefficients="exponential:0.5")
        plan_average(run / "step_100.safetensors", tmp_path / "m", weights=[1], options=options)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"w": torch.zeros(5), "n": torch.tensor(1)}, r"'w' is F32\[5\], but F32\[4\]"),
        ({"w": torch.zeros(4).half(), "n": torch.tensor(1)}, r"'w' is F16\[4\], but F32\[4\]"),
        ({"n": torch.tensor(1)}, "'w' of .* is missing"),
        (
            {"w": torch.zeros(4), "n": torch.tensor(1), "x": torch.zeros(1)},
            "'x' is not in",
        ),
    ],
)
def test_checkpoints_that_do_not_fit(
    run: Path, tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    write(run, 300, **tensors)
    with pytest.raises(LayoutError, match=message) as caught:
        plan_average(run, tmp_path / "m", last=3)
    assert "step_300.safetensors" in str(caught.value)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("first_tied", "message"),
    [
        (True, "'b' of .*2.pt is missing: it is tied to 'a'"),
        (False, "'b' is tied to 'a' in .*2.pt"),
    ],
)
def test_a_tensor_that_is_tied_in_one_checkpoint_only_is_named_so(
    tmp_path: Path, first_tied: bool, message: str
) -> None:
    for step, tied in ((1, first_tied), (2, not first_tied)):
        one, other = torch.ones(2), torch.zeros(2)
        torch.save({"a": one, "b": one if tied else other}, tmp_path / f"step_{step}.pt")
    with pytest.raises(LayoutError, match=message):
        plan_average(tmp_path, tmp_path / "m.pt", last=2)


def test_excluding_the_tensor_that_does_not_fit_helps(run: Path, tmp_path: Path) -> None:
    write(run, 300, w=torch.zeros(4), n=torch.tensor(1), x=torch.zeros(1))
    with pytest.raises(ConfigError, match=r"no tensor of .* matches the pattern 'y'"):
        plan_average(run, tmp_path / "m", last=3, options=AverageOptions(exclude=["y"]))
    plan_average(run, tmp_path / "m", last=3, options=AverageOptions(exclude=["x"]))
    plan = plan_average(run, tmp_path / "m", last=3, options=AverageOptions(include=["w"]))
    assert [t.name for t in plan.tensors] == ["w"]


def test_prefixes_come_off_all_names_or_none(tmp_path: Path) -> None:
    path = write(tmp_path, 1, **{"model.a": torch.ones(1), "loss.b": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"'loss.b' .* does not begin with 'model.'"):
        plan_average(path, tmp_path / "m", options=AverageOptions(strip_prefix="model."))
    plan = plan_average(
        path, tmp_path / "m", options=AverageOptions(strip_prefix="model.", include=["model.*"])
    )
    assert [t.written for t in plan.tensors] == ["a"]


def test_an_existing_target_is_kept(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    target.write_text("precious")
    with pytest.raises(OutputError, match="--overwrite"):
        plan_average(run, target, last=2)
    assert target.read_text() == "precious"
    plan_average(run, target, last=2, overwrite=True)


def test_an_input_is_never_the_target(run: Path, tmp_path: Path) -> None:
    for target in (run / "step_400.safetensors", run, run / "step_400.safetensors" / "x"):
        with pytest.raises(OutputError, match="rite elsewhere"):
            plan_average(run, target, last=2, overwrite=True)


def test_a_folder_of_other_things_is_never_replaced(run: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("")
    with pytest.raises(OutputError, match="other files than a checkpoint"):
        plan_average(run, home, last=2, overwrite=True)


def test_layouts_that_cannot_be(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names one file"):
        plan_average(
            run, tmp_path / "m.safetensors", last=2, options=AverageOptions(layout="sharded")
        )
    with pytest.raises(ConfigError, match="max-shard-size"):
        plan_average(
            run, tmp_path / "m.safetensors", last=2, options=AverageOptions(max_shard_size=100)
        )
    with pytest.raises(ConfigError, match="max_shard_size=0"):
        plan_average(run, tmp_path / "m", last=2, options=AverageOptions(max_shard_size=0))


def test_shards_of_a_size(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.zeros(10) for i in range(5)}
    path = write(tmp_path, 1, **tensors)
    plan = plan_average(path, tmp_path / "m", options=AverageOptions(max_shard_size=90))
    assert [len(s.tensors) for s in plan.output.shards] == [2, 2, 1]
    assert plan.output.shards[0].file == "model-00001-of-00003.safetensors"
    run_average(plan)
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 200


def test_opaque_numbers_have_no_mean(tmp_path: Path) -> None:
    header = b'{"s":{"dtype":"F8_E8M0","shape":[2],"data_offsets":[0,2]}}'
    path = tmp_path / "step_1.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(LayoutError, match="'s' is F8_E8M0, which has no mean"):
        plan_average(path, tmp_path / "m")


def test_adapters_that_scale_differently(tmp_path: Path) -> None:
    for step, alpha in ((1, 16), (2, 32)):
        folder = tmp_path / "run" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        save_file({"a.lora_A.weight": torch.ones(2)}, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": alpha}))
    with pytest.raises(LayoutError, match="lora_alpha is 16, but 32"):
        plan_average(tmp_path / "run", tmp_path / "m", last=2)
    plan = plan_average(tmp_path / "run", tmp_path / "m", last=1)
    assert plan.output.shards[0].file == "adapter_model.safetensors"
    assert any("product of averaged factors" in note for note in plan.notes)
    assert [p.name for p in plan.output.copied] == ["adapter_config.json"]


def test_batch_norm_statistics_are_spoken_of(tmp_path: Path) -> None:
    path = write(tmp_path, 1, **{"n.running_mean": torch.ones(2), "n.running_var": torch.ones(2),
                                 "n.weight": torch.ones(2)})  # fmt: skip
    plan = plan_average(path, tmp_path / "m")
    assert {t.name: t.rule for t in plan.tensors} == {
        "n.running_mean": "newest",
        "n.running_var": "newest",
        "n.weight": "average",
    }
    assert any("BatchNorm" in note for note in plan.notes)
    plan = plan_average(path, tmp_path / "m", options=AverageOptions(buffers="average"))
    assert {t.rule for t in plan.tensors} == {"average"}


def test_dtype_of_the_output_reaches_the_config(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    save_file({"w": torch.ones(3), "n": torch.tensor(1)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"torch_dtype": "float32", "x": 1}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "optimizer.pt").write_text("")
    (folder / "trainer_state.json").write_text('{"global_step": 1}')
    average_checkpoints(folder, tmp_path / "m", options=AverageOptions(dtype="bf16"))
    names = sorted(p.name for p in (tmp_path / "m").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert json.loads((tmp_path / "m" / "config.json").read_text()) == {
        "torch_dtype": "bfloat16",
        "x": 1,
    }


def test_a_file_cut_short_is_named(run: Path, tmp_path: Path) -> None:
    path = run / "step_300.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(FormatError, match=r"step_300.safetensors.*truncated"):
        plan_average(run, tmp_path / "m", last=3)


def test_a_full_disk_is_known_before_the_work(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10))
    with pytest.raises(OutputError, match="24 bytes are needed and 10 are free"):
        average_checkpoints(run, tmp_path / "m.safetensors", last=2)
    with pytest.raises(OutputError, match="24 bytes are needed"):
        average_checkpoints(run, tmp_path / "made" / "for" / "m", last=2)
    with pytest.raises(OutputError, match="24 bytes are needed"):
        sweep_checkpoints(run, [2, 3], output=tmp_path / "many")
    assert not list(tmp_path.glob("m*"))


def test_more_than_two_to_the_31_values(tmp_path: Path) -> None:
    """A sparse file: its size is claimed, its zeros take no room; only a few values are real."""
    numel = 2**31 + 10
    header = json.dumps({"w": {"dtype": "I8", "shape": [numel], "data_offsets": [0, numel]}})
    path = tmp_path / "step_1.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + numel)
        file.seek(-1, 2)
        file.write(b"\x07")
    plan = plan_average(path, tmp_path / "m.safetensors")
    assert plan.bytes_written == numel
    from torch_lawa.checkpoints.formats.safetensors import SafetensorsFile
    from torch_lawa.checkpoints.storage.paths import LocalPath
    from torch_lawa.offline.engine import cut_spans, whole_tensors

    last = list(cut_spans(whole_tensors(plan.tensors), 1 << 28))[-1]
    assert last[2] == numel
    with SafetensorsFile(LocalPath(path)) as opened:
        assert opened.read("w", numel - 2, numel).tolist() == [0, 7]


def test_weights_find_a_checkpoint_inside_the_folder_that_was_given(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / f"step-{step}").mkdir()
        save_file({"w": torch.ones(1)}, tmp_path / f"step-{step}" / "weights.safetensors")
    folders = [tmp_path / "step-2", tmp_path / "step-1"]
    plan = plan_average(folders, tmp_path / "m", weights=[3, 1])
    assert [(i.step, i.weight) for i in plan.inputs] == [(1, 0.25), (2, 0.75)]


@pytest.mark.parametrize("output", ["m.safetensors", "m.pt", "m"])
def test_a_reserved_name_is_refused_before_any_work(tmp_path: Path, output: str) -> None:
    for step in (1, 2):
        tensors = {"w": torch.full((2,), float(step)), "__metadata__": torch.ones(2)}
        torch.save(tensors, tmp_path / f"step_{step}.pt")
    with pytest.raises(ConfigError, match=r"'__metadata__' cannot be stored.*--exclude"):
        plan_average(tmp_path, tmp_path / output, last=2)
    without = AverageOptions(exclude="__metadata__")
    average_checkpoints(tmp_path, tmp_path / "m.safetensors", last=2, options=without)
    assert load_file(tmp_path / "m.safetensors")["w"].tolist() == [1.5, 1.5]
