"""The parts of the host store that can be seen without a GPU."""

import contextlib

import pytest
import torch

from torch_lawa.stores import memory
from torch_lawa.stores.base import Buffer, Content, FlatEntry, FlatGroup, FlatLayout, Snapshot
from torch_lawa.stores.memory import DeviceStore, HostStore


def layout(device: str) -> FlatLayout:
    entry = FlatEntry("w", torch.Size([4]), (1,), 0, 4)
    return FlatLayout((FlatGroup(torch.device(device), torch.float32, torch.float32, 4, (entry,)),))


def test_memory_that_cannot_be_locked_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        def cudaHostRegister(self, *_: int) -> int:
            return 2

    dropped: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(memory, "_clear_last_error", dropped.append)
    with pytest.warns(UserWarning, match=r"CUDA error 2.*collect will block"):
        memory._pin(torch.zeros(4), torch.device("cuda:1"))
    assert dropped == [torch.device("cuda:1")]  # else the next kernel is blamed for it


def test_a_window_loaded_before_the_model_was_seen_is_locked_when_it_is_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else every collect after a resume would block until the copy is done."""
    locked: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(
        memory, "_pin", lambda flat, device: locked.append((flat.data_ptr(), device))
    )
    store = HostStore()
    store.open(layout("cpu"), FlatLayout(()), k=3)
    for i in range(2):
        store.put(Content(Snapshot(i, i), {"w": torch.full((4,), float(i))}, {}), {})
    assert not locked
    store.retarget(layout("cuda:0"), FlatLayout(()))
    expected = {store.flats(s)[0].data_ptr() for s in store.snapshots}
    assert {address for address, _ in locked} == expected
    assert {device for _, device in locked} == {torch.device("cuda:0")}


def test_a_window_on_a_gpu_is_ordered_over_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collected on one stream and read or collected on another: each waits for the one before."""
    told: list[str] = []

    class Event:
        def __init__(self, name: str) -> None:
            self.name = name

        def synchronize(self) -> None:
            told.append(f"caller waits for {self.name}")

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: Event) -> None:
            told.append(f"{self.name} waits for {event.name}")

        def record_event(self) -> Event:
            return Event(self.name)

    class Flat:
        is_cuda, device = True, torch.device("cuda:0")

        def record_stream(self, stream: Stream) -> None:
            told.append(f"memory is used on {stream.name}")

    class Buffer:
        flat, home = Flat(), None

        def __init__(self, group: FlatGroup) -> None:
            Buffer.home = current[0]

        def fill(self, tensors: object) -> None:
            told.append(f"copy on {current[0].name}")

    first, second = Stream("first"), Stream("second")
    current = [first]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(memory, "Buffer", Buffer)
    store = DeviceStore()
    store.open(layout("cuda:0"), FlatLayout(()), k=1)
    store.put(Content(Snapshot(0, 0), {}, {}), {})
    assert told == ["copy on first"]
    current[0] = second
    store.put(Content(Snapshot(1, 1), {}, {}), {})
    assert told[1:] == ["second waits for first", "copy on second", "memory is used on second"]
    told.clear()
    store.flats(store.snapshots[-1])
    assert told == ["caller waits for second"]


def test_idle_staging_memory_goes_to_one_swap_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And comes back, unless a snapshot meanwhile has made other memory."""
    told: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_stream(self, other: "Stream") -> None:
            told.append(f"{self.name} waits for {other.name}")

        def record_event(self) -> str:
            return f"{self.name}, {len(told)}"

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream("caller"))
    monkeypatch.setattr(memory.Stage, "_stream", lambda *_: Stream("ours"))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    [wide] = layout("cpu").groups
    entry = FlatEntry("half", torch.Size([4]), (1,), 0, 4)
    narrow = FlatGroup(wide.device, torch.float32, torch.bfloat16, 4, (entry,))
    stage = memory.Stage(FlatLayout((wide, narrow)))
    first = {i: Buffer(group) for i, group in enumerate((wide, narrow))}
    stage._staging = dict(first)
    monkeypatch.setattr(stage, "wait", lambda: told.append("caller waits"))

    with pytest.raises(ZeroDivisionError), stage.idle() as room:
        assert told == ["caller waits"]  # until the last snapshot has left it
        assert list(room) == ["w"]  # what is stored in fewer bits does not fit
        assert room["w"].data_ptr() == first[0].flat.data_ptr()
        with stage.idle() as nothing:
            assert nothing == {}
        raise ZeroDivisionError
    assert stage._staging == {0: first[0]}
    assert told[-1] == "ours waits for caller"
    assert stage._feeds[wide.device].hurry() == f"ours, {len(told)}"  # the next snapshot waits

    other = {0: Buffer(wide)}
    with stage.idle():
        stage._staging = other
    assert stage._staging is other
