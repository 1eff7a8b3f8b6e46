"""Checkpoints that were given one by one, by pattern, by URL, or whose names say nothing."""

import itertools
from pathlib import Path

import fsspec
import pytest
from support.layouts import hugging_face, make, names, save

from torch_lawa.checkpoints.find import discovery as module
from torch_lawa.checkpoints.find.discovery import Discovery, FoundCheckpoint, find_checkpoints
from torch_lawa.checkpoints.formats.base import TrainingProgress
from torch_lawa.checkpoints.storage.paths import LocalPath
from torch_lawa.errors import ConfigError, FormatError

# Steps that the contents know, where the names do not.


def test_contents_are_asked_where_names_say_nothing(tmp_path: Path) -> None:
    for name, step in (("new", "1000"), ("old", "500"), ("mid", "700")):
        save(tmp_path / f"{name}.safetensors", step=step)
    save(tmp_path / "plain.safetensors")
    found = find_checkpoints([tmp_path])
    assert [(f.location.name, f.step) for f in found.found] == [
        ("old.safetensors", 500), ("mid.safetensors", 700), ("new.safetensors", 1000),
    ]  # fmt: skip
    assert found.notes == (
        "steps and epochs were read from the checkpoints: their names have none",
        "left out: plain.safetensors (no step or epoch in the name or contents)",
    )


def test_the_trainer_state_is_asked(tmp_path: Path) -> None:
    for name, step in (("a", 1000), ("b", 500)):
        save(tmp_path / name / "model.safetensors")
        (tmp_path / name / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
    assert [f.label for f in find_checkpoints([tmp_path]).found] == ["step 500", "step 1000"]


def test_several_series_in_a_folder_are_not_mixed(tmp_path: Path) -> None:
    for name in ("model_1", "model_2", "ema_1", "ema_2"):
        save(tmp_path / f"{name}.safetensors")
    with pytest.raises(FormatError, match=r"none of ema_1.safetensors, .* has a step or epoch"):
        find_checkpoints([tmp_path])
    assert [f.step for f in find_checkpoints([tmp_path / "ema_*"]).found] == [1, 2]


def test_nothing_is_opened_where_names_suffice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "open_checkpoint", None)
    make(tmp_path, ["step-1.pt", "step-2.pt", "best.pt"])
    assert len(find_checkpoints([tmp_path]).found) == 2
    assert len(find_checkpoints([tmp_path / "step-2.pt", tmp_path / "step-1.pt"]).found) == 2


def test_the_key_is_passed_on_and_the_checkpoint_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []

    class Opened:
        progress = TrainingProgress(epoch=4)

        def __enter__(self) -> "Opened":
            return self

        def __exit__(self, *_: object) -> None:
            calls.append("closed")

    def opened(location: object, *, key: str | None) -> Opened:
        calls.append((str(location), key))
        return Opened()

    monkeypatch.setattr(module, "open_checkpoint", opened)
    path = make(tmp_path, ["a.pt"]) / "a.pt"
    found = find_checkpoints([path], key="ema")
    assert found == Discovery((FoundCheckpoint(LocalPath(path), None, 4),), "epoch", False, ())
    assert calls == [(str(path), "ema"), "closed"]
    assert found.found[0].label == "epoch 4"


def test_a_broken_file_that_had_to_be_opened_says_so(tmp_path: Path) -> None:
    make(tmp_path, ["a.safetensors", "b.safetensors"])
    with pytest.raises(FormatError, match=r"a\.safetensors: .*opened to read its step"):
        find_checkpoints([tmp_path])


# Checkpoints that were given one by one, and patterns.


def test_given_checkpoints_are_ordered_by_their_steps(tmp_path: Path) -> None:
    make(tmp_path, ["step-1000.pt", "x/step-500.pt"])
    given = [tmp_path / "step-1000.pt", tmp_path / "x/step-500.pt"]
    found = find_checkpoints(given)
    assert names(found, tmp_path) == ["x/step-500.pt", "step-1000.pt"]
    assert found.notes == ("ordered by step, which is not the order given",)
    assert find_checkpoints(given[::-1]).notes == ()


def test_the_epoch_orders_where_steps_do_not(tmp_path: Path) -> None:
    make(tmp_path, ["step=5-epoch=2.pt", "step=5-epoch=1.pt"])
    found = find_checkpoints(sorted(tmp_path.iterdir(), reverse=True))
    assert (found.ordered_by, found.numbers) == ("epoch", [1, 2])


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"b": {}, "a": {}}, "no step or epoch in the names or contents"),
        ({"b": {"step": "5"}, "a": {"step": "5"}}, "several have the same step or epoch"),
        ({"b": {"step": "5"}, "a": {}}, "not all have a step, nor an epoch"),
        ({"step-5": {}, "a": {"epoch": "3"}}, "not all have a step, nor an epoch"),
    ],
)
def test_otherwise_the_order_given_stands(
    tmp_path: Path, files: dict[str, dict[str, str]], why: str
) -> None:
    paths = [save(tmp_path / f"{name}.safetensors", **data) for name, data in files.items()]
    found = find_checkpoints(paths)
    assert [f.location for f in found.found] == [LocalPath(path) for path in paths]
    assert (found.ordered_by, found.is_run) == ("given", False)
    assert found.notes == (f"in the order given, oldest first: {why}",)


def test_one_checkpoint_without_a_number_is_fine(tmp_path: Path) -> None:
    """A number that may be a version's is not called a step."""
    path = save(tmp_path / "llama-3.safetensors")
    found = find_checkpoints([path])
    assert found == Discovery((FoundCheckpoint(LocalPath(path), None, None),), "given", False, ())
    assert found.found[0].label == "llama-3.safetensors"


def test_a_pattern_takes_the_checkpoints_it_matches(tmp_path: Path) -> None:
    make(tmp_path, [*hugging_face("checkpoint-1000", "checkpoint-500"), "checkpoint-x.json"])
    make(tmp_path, ["checkpoint-7-tmp/model.safetensors"])
    found = find_checkpoints([str(tmp_path / "checkpoint-*")])
    assert names(found, tmp_path) == ["checkpoint-500", "checkpoint-1000"]
    assert not found.is_run
    assert len(found.notes) == 1
    assert "checkpoint-x.json (not a checkpoint by its name" in found.notes[0]
    assert "checkpoint-7-tmp (unfinished)" in found.notes[0]


def test_the_matches_of_a_pattern_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for name in ("a-v10", "a-v9", "a-v100"):
        save(tmp_path / f"{name}.safetensors")
    found = find_checkpoints([tmp_path / "a-*"])
    assert names(found, tmp_path) == [f"a-v{n}.safetensors" for n in (9, 10, 100)]


def test_a_pattern_may_match_a_run_and_nothing_else(tmp_path: Path) -> None:
    make(tmp_path, ["run-a/step-1.pt", "run-a/step-2.pt"])
    assert find_checkpoints([tmp_path / "run-*"]).is_run
    make(tmp_path, ["run-b/step-1.pt", "run-b/step-2.pt"])
    with pytest.raises(ConfigError, match=r"run-a is a run's folder, but 1 more input"):
        find_checkpoints([tmp_path / "run-*"])


def test_a_name_with_brackets_is_a_name_first(tmp_path: Path) -> None:
    make(tmp_path, ["run[1]/step-1.pt", "run[1]/step-2.pt", "run1/step-8.pt"])
    assert find_checkpoints([tmp_path / "run[1]"]).numbers == [1, 2]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("*.nothing", r"\*\.nothing: no checkpoint matches this pattern\.$"),
        ("opt*", r"It matches optimizer.pt \(not weights\)"),
        ("model-*", r"It matches model-00001-of-00002.safetensors \(a shard"),
        ("empty*", r"no checkpoint matches this pattern. .*empty: no checkpoint here"),
    ],
)
def test_a_pattern_without_a_checkpoint_is_refused(
    tmp_path: Path, pattern: str, message: str
) -> None:
    make(tmp_path, ["optimizer.pt", "model-00001-of-00002.safetensors", "empty/"])
    with pytest.raises(FormatError, match=message):
        find_checkpoints([tmp_path / pattern])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("optimizer.bin", "optimizer.bin: not weights"),
        ("training_args.bin", "not weights"),
        ("model.safetensors.index.json", "not weights"),
        ("notes.txt", "not a checkpoint by its name; known are .safetensors"),
        ("model-00001-of-00002.safetensors", "a shard"),
        ("out.safetensors.5.partial", "unfinished"),
        ("out.partial/", "unfinished"),
        ("missing.pt", "missing.pt: there is no such file or folder"),
    ],
)
def test_what_is_no_checkpoint_is_refused_when_given(
    tmp_path: Path, name: str, message: str
) -> None:
    if "missing" not in name:
        make(tmp_path, [name])
    with pytest.raises(FormatError, match=message):
        find_checkpoints([tmp_path / name])


def test_a_run_goes_alone(tmp_path: Path) -> None:
    make(tmp_path, ["run/step-1.pt", "run/step-2.pt", "step-3.pt"])
    with pytest.raises(ConfigError, match=r"run is a run's folder, but 1 more input.*run/\*"):
        find_checkpoints([tmp_path / "run", tmp_path / "step-3.pt"])


@pytest.mark.parametrize("inputs", [[], "run", Path("run")])
def test_inputs_are_a_list(inputs: list[str]) -> None:
    with pytest.raises(ConfigError, match="give a list"):
        find_checkpoints(inputs)


# One checkpoint under two names.


def test_a_link_in_a_run_is_counted_once(tmp_path: Path) -> None:
    make(tmp_path, [*hugging_face("checkpoint-5", "checkpoint-10"), "step-4.pt"])
    (tmp_path / "latest").symlink_to("checkpoint-10")
    (tmp_path / "a-step-4.pt").symlink_to(tmp_path / "step-4.pt")
    found = find_checkpoints([tmp_path])
    assert names(found, tmp_path) == ["step-4.pt", "checkpoint-5", "checkpoint-10"]
    assert sorted(found.notes) == [
        f"counted once: {tmp_path}/checkpoint-10 is also {tmp_path}/latest",
        f"counted once: {tmp_path}/step-4.pt is also {tmp_path}/a-step-4.pt",
    ]


def test_a_link_to_nothing_is_left_out_with_a_note(tmp_path: Path) -> None:
    """It may be the newest checkpoint, and an older one is taken in its place."""
    make(tmp_path, ["run/step-4.pt", "run/step-8.pt"])
    for name in ("step-9.pt", "checkpoint-10", "notes.txt", "optimizer.pt"):
        (tmp_path / "run" / name).symlink_to("nowhere")
    found = find_checkpoints([tmp_path / "run"])
    assert names(found, tmp_path) == ["run/step-4.pt", "run/step-8.pt"]
    assert found.notes == ("left out: checkpoint-10, step-9.pt (a link to nothing)",)


def test_links_alone_keep_the_name_with_a_step(tmp_path: Path) -> None:
    make(tmp_path, ["store/x.pt", "run/"])
    for name in ("best.pt", "step-3.pt"):
        (tmp_path / "run" / name).symlink_to(tmp_path / "store/x.pt")
    assert names(find_checkpoints([tmp_path / "run"]), tmp_path) == ["run/step-3.pt"]


def test_given_twice_is_a_mistake(tmp_path: Path) -> None:
    path = make(tmp_path, ["step-1.pt", "x/"]) / "step-1.pt"
    with pytest.raises(ConfigError, match=r"step-1.pt: given twice\. Give each"):
        find_checkpoints([path, path])
    with pytest.raises(ConfigError, match=r"given twice, also as"):
        find_checkpoints([path, tmp_path / "x/../step-1.pt"])
    link = tmp_path / "link.pt"
    link.symlink_to(path)
    with pytest.raises(ConfigError, match=r"link.pt: given twice, also as .*step-1.pt"):
        find_checkpoints([path, link])


def test_matched_twice_is_counted_once(tmp_path: Path) -> None:
    make(tmp_path, ["step-1.pt", "step-2.pt"])
    found = find_checkpoints([tmp_path / "step-1.pt", tmp_path / "*.pt"])
    assert names(found, tmp_path) == ["step-1.pt", "step-2.pt"]
    assert found.notes == (f"counted once: {tmp_path}/step-1.pt was matched 2 times",)


# URLs.

_counter = itertools.count()


@pytest.fixture
def remote() -> str:
    """A folder of fsspec's memory."""
    return f"memory://discovery-{next(_counter)}"


def put(root: str, *names: str) -> None:
    for name in names:
        with fsspec.open(f"{root}/{name}", "wb") as file:
            file.write(b"")


def test_a_run_behind_a_url(remote: str) -> None:
    put(remote, *hugging_face("checkpoint-1000", "checkpoint-500"), "model.safetensors", "last.pt")
    found = find_checkpoints([remote])
    assert [str(f.location) for f in found.found] == [
        f"{remote}/checkpoint-500", f"{remote}/checkpoint-1000",
    ]  # fmt: skip
    assert found.is_run
    assert "model.safetensors" in found.notes[0]
    assert "last.pt" in found.notes[1]


def test_a_pattern_behind_a_url(remote: str) -> None:
    put(remote, "step-1000.pt", "step-500.pt", "optimizer.pt")
    found = find_checkpoints([f"{remote}/*.pt"])
    assert (found.numbers, found.is_run) == ([500, 1000], False)
    with pytest.raises(FormatError, match="no checkpoint matches this pattern"):
        find_checkpoints([f"{remote}/*.ckpt"])
    with pytest.raises(FormatError, match="there is no such file or folder"):
        find_checkpoints([f"{remote}/other.pt"])
    with pytest.raises(ConfigError, match="given twice"):
        find_checkpoints([f"{remote}/step-500.pt"] * 2)
