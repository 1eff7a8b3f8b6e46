"""Windows beside checkpoints: in shards or whole, pending or published, local or remote."""

import errno
import io
from pathlib import Path

import pytest
import torch
from support.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from torch_lawa import LatestWeightAverager
from torch_lawa.errors import StateError, StoreError
from torch_lawa.integrations.window_files import WindowFile, load_window, save_window, window_beside

K = 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))


def collected(model: nn.Module) -> LatestWeightAverager:
    averager = LatestWeightAverager(k=K)
    for step in range(1, 6):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + 0.1 * step)
        averager.collect(model, step=step)
    return averager


def save_shards(rank: int, folder: str) -> None:
    model = fully_shard(net())
    save_window(collected(model), model, Path(folder, "window"), writes=rank == 0)
    plain = net()
    save_window(collected(plain), plain, Path(folder, "whole"), writes=rank == 0)
    torch.distributed.barrier()
    with pytest.raises(StateError, match=r"whole\.pt: the model was not sharded"):
        load_window(LatestWeightAverager(k=K), model, Path(folder, "whole"))


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        map(torch.equal, found.values(), expected.values())
    )


@pytest.mark.matrix
def test_shards_are_loaded_by_one_process(tmp_path: Path) -> None:
    on_ranks(2, save_shards, str(tmp_path))
    model = net()
    expected, again = collected(net()), LatestWeightAverager(k=K)
    assert load_window(again, model, tmp_path / "window")
    assert again.snapshot_steps == [3, 4, 5]
    assert same(again.average(), expected.average())
    # Now it belongs to a model that is not sharded, and is saved so, in place of the folder.
    save_window(again, model, tmp_path / "window", writes=True)
    assert [path.name for path in tmp_path.glob("window*")] == ["window.pt"]
    third = LatestWeightAverager(k=K)
    assert load_window(third, model, tmp_path / "window")
    assert same(third.average(), expected.average())


def test_there_may_be_none(tmp_path: Path) -> None:
    averager = collected(net())
    assert not load_window(averager, net(), tmp_path / "window")
    assert averager.snapshot_steps == [3, 4, 5]


def test_only_the_one_that_writes_does(tmp_path: Path) -> None:
    model = net()
    save_window(collected(model), model, tmp_path / "deep" / "window", writes=False)
    assert not list(tmp_path.iterdir())
    save_window(collected(model), model, tmp_path / "deep" / "window", writes=True)
    assert load_window(LatestWeightAverager(k=K), model, tmp_path / "deep" / "window")


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_a_window_is_pending_until_its_checkpoint_is_complete(tmp_path: Path, scheme: str) -> None:
    model = net()
    averager = collected(model)
    window = window_beside(f"{scheme}{tmp_path}/last.ckpt")

    def write(token: str) -> None:
        notes = {"written": token}
        window.write({"a": averager}, model, writes=True, notes=notes, token=token)

    def tokens() -> list[str | None]:
        return [saved.token for saved in window.read()]

    write("first")
    assert tokens() == ["first"]  # pending
    window.publish()
    write("second")
    assert tokens() == ["first", "second"]
    window.discard_pending()
    assert tokens() == ["first"]
    write("third")
    window.publish()
    [saved] = window.read()
    assert (saved.token, saved.notes) == ("third", {"written": "third"})
    again = LatestWeightAverager(k=K)
    saved.load({"a": again}, model)
    assert same(again.average(), averager.average())
    window.remove()
    assert tokens() == []
    assert not list(tmp_path.iterdir())


def test_what_is_no_window_is_refused(tmp_path: Path) -> None:
    torch.save({"version": 7}, tmp_path / "window.pt")
    with pytest.raises(StateError, match=r"window\.pt: the window cannot be read"):
        load_window(LatestWeightAverager(k=K), net(), tmp_path / "window")
    torch.save({"version": 1}, tmp_path / "other")
    with pytest.raises(StateError, match="cannot be read"):
        list(WindowFile(str(tmp_path / "other")).read())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_of_a_layer_that_was_unfrozen_after_the_start(tmp_path: Path) -> None:
    window, model = WindowFile(str(tmp_path / "window")), net()
    averager = collected(model)
    window.write({"averager": averager}, model, writes=True, sharded=True)
    window.publish()
    (saved,), again, model = window.read(), {"averager": LatestWeightAverager(k=K)}, net()
    model[0].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(StateError, match=r"0\.weight.*Before you resume, unfreeze"):
        saved.load(again, model, sharded=True)
    model[0].requires_grad_(True)  # type: ignore[index]
    saved.load(again, model, sharded=True)
    assert same(again["averager"].average(), averager.average())


def test_shards_are_not_saved_to_a_url() -> None:
    """They were written to a local path, and the window was lost."""
    averager, model = LatestWeightAverager(k=1), nn.Linear(1, 1)
    with pytest.raises(StoreError, match="local path"):
        WindowFile("memory://run/window").write(
            {"averager": averager}, model, writes=True, sharded=True
        )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not one of PyTorch that does not say what happened."""
    averager, model, opened = collected(net()), net(), Path.open
    full = Path("/dev/full")
    monkeypatch.setattr(Path, "open", lambda path, *mode: opened(full, *mode))
    with pytest.raises(OSError, match="window") as caught:
        save_window(averager, model, tmp_path / "window", writes=True)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_pytorch_writes_is_ctrl_c(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not a RuntimeError that the file has another size than expected."""

    class Interrupted(io.BytesIO):
        def write(self, data: object, /) -> int:
            raise KeyboardInterrupt

    averager, model = collected(net()), net()
    monkeypatch.setattr(Path, "open", lambda path, *mode: Interrupted())
    with pytest.raises(KeyboardInterrupt):
        save_window(averager, model, tmp_path / "window", writes=True)
    assert list(tmp_path.iterdir()) == []
