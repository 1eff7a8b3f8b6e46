"""Pickles that are read as data: what comes out, what is refused, and that nothing ever runs."""

import argparse
import collections
import contextlib
import copyreg
import datetime
import math
import os
import pathlib
import pickle
import random
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.damage import tuples_of_one_hash

from torch_lawa.checkpoints.formats.torch_pickle import safe_pickle as unpickling
from torch_lawa.checkpoints.formats.torch_pickle.safe_pickle import (
    Label,
    Record,
    Tree,
    inside,
    load_pickle,
)
from torch_lawa.errors import FormatError

PLAIN = {
    "numbers": [0, -1, 255, 65536, 2**40, -(2**70), 1.5, -math.inf, True, False, None],
    "text": ["", "ü", "a" * 300, b"", b"\xff" * 300],
    "nested": {"a": {"b": ({"c": []},)}, 3: (), (1, "x"): "tuple as a key"},
}


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_come_out_as_they_went_in(protocol: int) -> None:
    made = {k: v for k, v in PLAIN.items() if k != "text" or protocol > 2}
    assert load_pickle(pickle.dumps(made, protocol), "a.pt", {}) == made


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
        max_leaves=20,
    ),
    st.integers(0, pickle.HIGHEST_PROTOCOL),
)
def test_the_same_as_pickle_reads(value: object, protocol: int) -> None:
    data = pickle.dumps(value, protocol)
    assert load_pickle(data, "a.pt", {}) == pickle.loads(data)


def test_dicts_of_any_kind_become_dicts() -> None:
    made = [
        collections.OrderedDict(a=1, b=2),
        collections.Counter("aab"),
        collections.defaultdict(list, a=[1]),
    ]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        found = load_pickle(pickle.dumps(made, protocol), "a.pt", {})
        assert found == [{"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": [1]}]
        assert all(type(d) is Tree for d in found)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_harmless_things_stay_records(protocol: int) -> None:
    made = {
        "args": argparse.Namespace(lr=0.1),
        "path": pathlib.PurePosixPath("a/b"),
        "when": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
        "took": datetime.timedelta(seconds=3),
        "set": {1, 2},
        "frozen": frozenset([3]),
        "slice": slice(1, 2),
        "range": range(3),
        "bytes": b"\xff",
        "bytearray": bytearray(b"\xff"),
        "scalar": np.float64(3),
        "array": np.arange(3),
        "dtype": np.dtype("f4"),
        "type": float,
    }
    found = load_pickle(pickle.dumps(made, protocol), "a.pt", {})
    assert list(found) == list(made)
    assert found["args"].path == "argparse.Namespace"
    assert found["args"].state == {"lr": 0.1}
    assert found["type"] == Label("builtins.float")
    assert {3, 2, 1} >= {n for name in ("set", "frozen") for n in numbers(found[name])} > set()
    assert all(isinstance(found[name], Record | Label | bytes) for name in made)


def numbers(thing: object) -> Iterator[int]:
    if isinstance(thing, int):
        yield thing
    for part in inside(thing):
        yield from numbers(part)


def test_makers_are_called_and_nothing_else() -> None:
    data = pickle.dumps([random.Random, collections.deque])
    found = load_pickle(data, "a.pt", {"random.Random": None, "collections.deque": list})
    assert found == [Label("random.Random"), Label("collections.deque")]
    data = b"crandom\nRandom\n(I3\ntR."
    assert load_pickle(data, "a.pt", {"random.Random": lambda seed: seed + 1}) == 4
    assert load_pickle(data, "a.pt", {"random.Random": None}).args == (3,)
    for old in (b"(I3\nirandom\nRandom\n.", b"(crandom\nRandom\nI3\no."):
        assert load_pickle(b"(" + old[:-1] + b"l.", "a.pt", {"random.Random": float}) == [3.0]


class Executed:
    """Leaves the folder when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.chdir, ("/",)


def test_any_name_is_a_record_and_not_executed() -> None:
    """Also what a function in the file would have returned, called again."""
    before = pathlib.Path.cwd()
    data = pickle.dumps({"a": [Executed()], "b": 3, "c": random.Random(0)})
    found = load_pickle(data, "a.pt", {}, any_name=True)
    assert (found["b"], found["a"][0].path, found["a"][0].args) == (3, "posix.chdir", ("/",))
    made = load_pickle(b"cos\ngetenv\n(S'a'\ntR(I1\ntR.", "a.pt", {}, any_name=True)
    assert (made.path, made.args) == ("os.getenv()", (1,))
    assert pathlib.Path.cwd() == before
    with pytest.raises(FormatError, match=r"posix\.chdir"):
        load_pickle(data, "a.pt", {})


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def attacks(target: Path) -> dict[str, bytes]:
    """Ways to have `os.system` or the like called by a pickle."""
    command = f"touch {target}"
    call, code = text(command), text(f"open({str(target)!r},'w').close()")
    return {
        "REDUCE": b"cos\nsystem\n" + call + b"\x85R.",
        "posix": b"cposix\nsystem\n" + call + b"\x85R.",
        "eval": b"cbuiltins\neval\n" + code + b"\x85R.",
        "python 2 eval": b"c__builtin__\neval\n" + code + b"\x85R.",
        "open": b"c_io\nopen\n" + text(str(target)) + text("w") + b"\x86R.",
        "INST": b"(S'" + command.encode() + b"'\nios\nsystem\n.",
        "OBJ": b"(cos\nsystem\n" + call + b"o.",
        "STACK_GLOBAL": b"\x80\x04" + text("os") + text("system") + b"\x93" + call + b"\x85R.",
        "dotted": b"\x80\x04" + text("argparse") + text("_os.system") + b"\x93" + call + b"\x85R.",
        "NEWOBJ": b"\x80\x02csubprocess\nPopen\n" + call + b"\x85\x81.",
        "NEWOBJ_EX": b"\x80\x04csubprocess\nPopen\n" + call + b"\x85}\x92.",
        "BUILD": b"\x80\x02cargparse\nNamespace\n)\x81}" + text("__class__") + b"cos\nsystem\nsb.",
        "a user's class": b"c__main__\nMyModel\n)R.",
        "nested": b"}" + text("hyper_parameters") + b"}" + text("a") + b"]cos\nsystem\n"
        + call + b"\x85Rass.",
    }  # fmt: skip


@pytest.mark.parametrize("kind", attacks(Path()))
def test_attacks_are_refused_by_name_and_not_executed(tmp_path: Path, kind: str) -> None:
    canary = tmp_path / "canary"
    attack = attacks(canary)[kind]
    with pytest.raises(
        FormatError, match=r"^bad\.pt: refers to \w+.*\w; it was not exec.*"
    ) as told:
        load_pickle(attack, "bad.pt", {})
    assert not canary.exists()
    assert "model.state_dict()" in str(told.value)


def test_the_attacks_would_work_elsewhere(tmp_path: Path) -> None:
    """So that the test above proves something."""
    for kind in ("REDUCE", "INST", "OBJ", "STACK_GLOBAL", "eval", "nested"):
        canary = tmp_path / kind
        pickle.loads(attacks(canary)[kind])
        assert canary.exists(), kind


@pytest.mark.parametrize(
    "attack",
    [
        b"cargparse\nNamespace\n)R)R.",  # calling what a call gave
        b"cbuiltins\ngetattr\ncargparse\nNamespace\nX\4\0\0\0_os.\x86R)R.",
        b"K\1)R.",  # calling a number
        b"cargparse\nNamespace\nK\1R.",  # arguments that are none
        b"cargparse\nNamespace\n}X\1\0\0\0aK\1sb.",  # a state for a class
        b"cargparse\nNamespace\nN}X\10\0\0\0__init__K\1s\x86b.",  # slots of a class
        b"K\1}b.",
        b"K\1K\2a.",
        b"K\1(K\2e.",
        b"K\1K\2K\3s.",
        b"]K\2K\3s.",
        b"}]K\3s.",  # a list as a key
        b"}(K\1u.",  # a key without a value
        b"(K\1d.",
        b"I1\nQ.",  # persistent ids where there are none
        b"P1\n.",
        b"\x97.",  # buffers from elsewhere
        b"\x96\xff\xff\xff\xff\xff\0\0\0a.",  # a bytearray of 1 TiB
        b"\x8e\xff\xff\xff\xff\xff\0\0\0a.",  # bytes of 1 TiB
        b"\x95\xff\xff\xff\xff\xff\0\0\0a.",  # a frame of 1 TiB
        b"\x8b\xff\xff\xff\x7fa.",
        b"\x80\x09.",
        b"I" + b"9" * 5000 + b"\n.",
        b"",
        b".",
        b"N",
        b"h\0.",
        b"\xff.",
    ],
)
def test_nonsense_is_refused(attack: bytes) -> None:
    with pytest.raises(FormatError, match=r"^bad\.pt: the pickle in it is broken"):
        load_pickle(attack, "bad.pt", {})


def test_extension_codes_are_not_looked_up() -> None:
    """Another library may have registered one, and Python keeps what it once resolved."""
    copyreg.add_extension("os", "system", 217)
    try:
        assert pickle.loads(b"\x82\xd9.") is os.system
        for attack in (b"\x82\xd9.", b"\x83\xd9\0.", b"\x84\xd9\0\0\0.", b"\x82\xd9)R."):
            with pytest.raises(FormatError, match="broken"):
                load_pickle(attack, "bad.pt", {})
    finally:
        copyreg.remove_extension("os", "system", 217)
        copyreg.clear_extension_cache()


def test_a_large_memo_number_takes_no_memory() -> None:
    """Python's own unpickler reserves 64 GiB here."""
    tracemalloc.start()
    try:
        assert load_pickle(b"K\1r\xff\xff\xff\xff0j\xff\xff\xff\xff.", "a.pt", {}) == 1
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_deep_tuples_are_no_crash() -> None:
    """Hashing tuples in tuples recurses without a limit in C: Python itself would end here."""
    deep = b")" + b"\x85" * 200_000
    for attack in (b"}" + deep + b"K\1s.", b"(" + deep + b"K\1d.", b"}(" + deep + b"K\1u."):
        with pytest.raises(FormatError, match=r"a tuple was used as a key"):
            load_pickle(attack, "bad.pt", {})
    for fine in (b"(" + deep + b"\x91.", b"\x8f(" + deep + b"\x90.", deep + b"."):
        assert load_pickle(fine, "a.pt", {}) is not None


def test_deep_lists_and_cycles_come_out() -> None:
    found = load_pickle(b"]q\0" + b"]" * 100_000 + b"a" * 100_000 + b".", "a.pt", {})
    assert isinstance(found[0][0], list)
    loop = load_pickle(b"}q\0K\1h\0s.", "a.pt", {})
    assert loop[1] is loop


def test_a_pickle_may_not_be_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpickling, "MAX_PICKLE", 100)
    assert load_pickle(pickle.dumps("a" * 50), "a.pt", {}) == "a" * 50
    with pytest.raises(FormatError, match="more than 100"):
        load_pickle(pickle.dumps("a" * 100), "a.pt", {})


def test_a_hostile_name_does_not_flood_the_message() -> None:
    with pytest.raises(FormatError) as told:
        load_pickle(b"\x80\x04" + text("\x1b[2J" + "a" * 9999) + text("b") + b"\x93.", "bad.pt", {})
    assert len(str(told.value)) < 600
    assert str(told.value).isprintable()


GOOD: dict[str, Any] = {**PLAIN, "args": argparse.Namespace(a=1), "set": {1}, "c": 1j}


@given(
    content=st.binary(max_size=60),
    protocol=st.integers(0, 5),
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4),
    cut=st.integers(0, 10_000),
)
@example(content=b"\x80\x04\x95", protocol=4, changes=[], cut=3)
def test_no_bytes_crash_the_reader(
    content: bytes, protocol: int, changes: list[tuple[int, int]], cut: int
) -> None:
    good = bytearray(pickle.dumps(GOOD, protocol))
    for location, value in changes:
        good[location % len(good)] = value
    for data in (content, content + b".", bytes(good), bytes(good[: cut % len(good)])):
        with contextlib.suppress(FormatError):
            load_pickle(data, "f.pt", {}, lambda pid: pid)


HOSTILE_KEYS: dict[str, tuple[list[object], str]] = {
    "ints": ([i * (2**61 - 1) for i in range(1, 60_000)], "bits was used"),
    "tuples": (list(tuples_of_one_hash(30_000)), "equal hashes"),
    "nested": ([((pair,), 1) for pair in tuples_of_one_hash(30_000)], "equal hashes"),
    "long texts": ([("a" * 100_000,)], "100000 characters"),
}


@pytest.mark.parametrize("kind", HOSTILE_KEYS)
def test_keys_with_chosen_hashes_are_refused(kind: str) -> None:
    keys, why = HOSTILE_KEYS[kind]
    if kind != "long texts":
        assert len({hash(key) for key in keys[:1000]}) < 30
    data = b"\x80\x04}(" + b"".join(pickle.dumps(key, 4)[2:-1] + b"N" for key in keys) + b"u."
    began = time.monotonic()
    with pytest.raises(FormatError, match=why):
        load_pickle(data, "bad.pt", {})
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("mark", ["u", "B"])
def test_a_long_key_is_compared_once(mark: str) -> None:
    """Equal texts that are not the same object are compared to their ends, every time."""
    text = mark.encode() * 1_000_000
    code = (b"X" if mark == "u" else b"B") + len(text).to_bytes(4, "little") + text
    data = b"\x80\x04}" + code + b"Ns" + code + b"\x94Ns" + b"h\0Ns" * 1_000_000 + b"."
    began = time.monotonic()
    with pytest.raises(FormatError, match="appears twice"):
        load_pickle(data, "bad.pt", {})
    assert time.monotonic() - began < 2


def test_ordinary_keys_are_read() -> None:
    keys = [0, -1, -2, 2**63, True, 1.5, (1, 2), ("a", (0,)), None, b"b", "x" * 100_000]
    tree = {**dict.fromkeys(keys, 1), **{(i, -i): i for i in range(2000)}}
    assert load_pickle(pickle.dumps(tree), "a.pt", {}) == tree
