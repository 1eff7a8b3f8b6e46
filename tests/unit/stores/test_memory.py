"""The parts of the host store that can be seen without a GPU."""

import pytest
import torch

from torch_lawa.stores import memory
from torch_lawa.stores.base import Content, Entry, Group, Layout, Snapshot
from torch_lawa.stores.memory import HostStore


def layout(device: str) -> Layout:
    entry = Entry("w", torch.Size([4]), (1,), 0, 4)
    return Layout((Group(torch.device(device), torch.float32, torch.float32, 4, (entry,)),))


def test_memory_that_cannot_be_locked_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        def cudaHostRegister(self, *_: int) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    with pytest.warns(UserWarning, match=r"CUDA error 2.*collect will hold the caller"):
        memory._page_lock(torch.zeros(4), torch.device("cuda:0"))


def test_a_window_loaded_before_the_model_was_seen_is_locked_when_it_is_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else every collect after a resume would hold the caller until the copy is done."""
    locked: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(
        memory, "_page_lock", lambda flat, device: locked.append((flat.data_ptr(), device))
    )
    store = HostStore()
    store.open(layout("cpu"), Layout(()), k=3)
    for i in range(2):
        store.put(Content(Snapshot(i, i), {"w": torch.full((4,), float(i))}, {}), {})
    assert not locked
    store.retarget(layout("cuda:0"), Layout(()))
    expected = {store.flats(s)[0].data_ptr() for s in store.snapshots}
    assert {address for address, _ in locked} == expected
    assert {device for _, device in locked} == {torch.device("cuda:0")}
