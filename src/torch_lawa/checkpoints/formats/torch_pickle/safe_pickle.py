"""Pickles read as data: a name in them becomes a `Label`, a call becomes a `Record` of that call.

Python's unpickler imports what a file names and calls it. This one imports nothing and calls only
the `makers` it is given, which are functions of this package.

It subclasses `pickle._Unpickler`, the implementation in Python. That class is private, so a release
of Python may change it; its table of opcodes is the documented protocol, and the tests of this
module, with damaged and random pickles, run on every supported version. The public
`pickle.Unpickler` is written in C and cannot be used: single opcodes cannot be replaced there, five
bytes can request 64 GiB (LONG_BINPUT), and hashing nested tuples can overflow the stack.
"""

import io
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_lawa.errors import FormatError
from torch_lawa.mean.dtypes import DTYPES

if TYPE_CHECKING:
    from torch_lawa.mean.kernels import Bytes

__all__ = ["MAX_PICKLE", "Label", "Maker", "Record", "Tree", "inside", "load_pickle"]

MAX_PICKLE = 512 * 1024 * 1024
_MAX_MESSAGE = 200
_LONG_KEY = 1 << 16  # characters
_LARGEST_KEY = 1 << 64
_MAX_EQUAL = 64  # keys with equal hashes

Maker = Callable[..., object]


# The names that a pickle may use. None of them is imported: they stay names.


def _paths(text: str) -> set[str]:
    """`module: name name` on each line."""
    lines = (line.split(":") for line in text.strip().splitlines())
    return {f"{module.strip()}.{name}" for module, names in lines for name in names.split()}


# Classes that are read as dicts.
_DICTS = frozenset(
    _paths(
        """
        collections: OrderedDict Counter defaultdict
        lightning.fabric.utilities.data: AttributeDict
        lightning.pytorch.utilities.parsing: AttributeDict
        lightning_fabric.utilities.data: AttributeDict
        pytorch_lightning.utilities.parsing: AttributeDict
        """
    )
)

# What real checkpoints contain beside their weights, and what describes tensors.
_HARMLESS = frozenset(
    _paths(
        """
        argparse: Namespace
        types: SimpleNamespace
        builtins: bool bytearray bytes complex dict float frozenset int list long object range set
        builtins: slice str tuple type unicode xrange getattr
        _codecs: encode
        _io: BytesIO
        copy_reg: _reconstructor
        copyreg: _reconstructor
        datetime: date datetime time timedelta timezone
        decimal: Decimal
        uuid: UUID
        typing: Any
        pathlib: Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath
        pathlib._local: Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath
        numpy: dtype ndarray bool_ float16 float32 float64 int8 int16 int32 int64
        numpy: uint8 uint16 uint32 uint64
        numpy.core.multiarray: _reconstruct scalar
        numpy._core.multiarray: _reconstruct scalar
        numpy._core.numeric: _frombuffer
        numpy.core.numeric: _frombuffer
        omegaconf.base: ContainerMetadata Metadata
        omegaconf.dictconfig: DictConfig
        omegaconf.listconfig: ListConfig
        omegaconf.nodes: AnyNode BooleanNode FloatNode IntegerNode StringNode
        pytorch_lightning.callbacks.early_stopping: EarlyStopping
        pytorch_lightning.callbacks.model_checkpoint: ModelCheckpoint
        torch: Size Tensor device complex32 complex128 float4_e2m1fn_x2 bits8 bits16
        torch: qint8 quint8 qint32 quint4x2 quint2x4
        torch: per_tensor_affine per_channel_affine per_channel_affine_float_qparams
        torch.nn.parameter: Parameter Buffer
        torch.serialization: _get_layout
        torch.storage: TypedStorage _TypedStorage
        torch.torch_version: TorchVersion
        """
    )
    | {f"torch.{dtype.torch_name}" for dtype in DTYPES.values()}
    | {f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
)


@dataclass(frozen=True, slots=True)
class Label:
    """A name that a pickle refers to, such as `torch.float32`; nothing is imported for it."""

    path: str


class Record:
    """An object that was not created: its class or function, the arguments, and its state."""

    __slots__ = ("args", "items", "path", "state")

    def __init__(self, path: str, args: tuple[object, ...] = ()) -> None:
        self.path, self.args = path, args
        self.state: Any = None
        self.items: list[object] | None = None

    def add(self, items: list[object]) -> None:
        """Add items, as to a list or a set."""
        if self.items is None:
            self.items = []
        self.items += items


def load_pickle(
    data: "bytes | Bytes",
    location: object,
    makers: Mapping[str, Maker | None],
    load_storage: Maker | None = None,
    *,
    any_name: bool = False,
) -> Any:
    """Load a pickle: plain values, labels, records, and what `makers` return.

    `makers` are the only functions that are ever called, by the name that the pickle uses; None
    instead of a function allows the name and calls nothing. Other names are an error; with
    `any_name` they are allowed too, and still nothing is called: for files of which only some
    entries are used. `load_storage` resolves persistent ids. Every failure is a FormatError that
    names `location`.

    >>> load_pickle(pickle.dumps({"a": [1, (2.5, None)]}), "a.pt", {})
    {'a': [1, (2.5, None)]}
    >>> load_pickle(pickle.dumps(print), "a.pt", {})
    Traceback (most recent call last):
    torch_lawa.errors.FormatError: a.pt: refers to builtins.print, which weights do not need...
    """
    if len(data) > MAX_PICKLE:
        raise FormatError(
            f"{location}: contains a pickle of {len(data)} bytes, more than {MAX_PICKLE}: save "
            "only model.state_dict()."
        )
    file = io.BytesIO(data if isinstance(data, bytes) else data.tobytes())
    try:
        return _Unpickler(file, location, makers, load_storage, any_name).load()
    except FormatError:
        raise
    except Exception as error:  # random bytes can raise anything
        what = f"{type(error).__name__}: {error}"[:_MAX_MESSAGE]
        raise FormatError(
            f"{location}: the pickle in it is broken ({what}). Write the file again."
        ) from None


def inside(thing: object) -> Iterator[object]:
    """The direct contents of a container in a loaded pickle; nothing for other values."""
    if isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, list | tuple):
        yield from thing
    elif isinstance(thing, Record):
        yield from (*thing.args, thing.state, *(thing.items or ()))


class Tree(dict[object, object]):
    """A dict that was an OrderedDict or similar, with the attributes it was given."""

    attributes: object = None


class _DictKeys:
    """Puts items into dicts, of which an attack can make every access slow.

    Integers, and tuples of them, have hashes that can be chosen, and a dict whose keys all have
    one hash takes quadratic time. Long keys that are equal but not the same object are compared
    to their ends. Hashing a long integer, or a nested tuple, takes its length every time.
    """

    def __init__(self) -> None:
        self._by_hash: dict[int, list[object]] = {}  # of tuples and fractions

    def put(self, target: object, key: object, value: object) -> None:
        """Set an item of a dict, or add it to a record."""
        if isinstance(target, Record):
            target.add([(key, value)])
        elif isinstance(target, dict):
            if type(key) is not str or len(key) > _LONG_KEY:
                self._check(target, key)
            target[key] = value
        else:
            raise pickle.UnpicklingError(f"an item was set on a {type(target).__name__}")

    def make_dict(self, *args: Any) -> Tree:
        """OrderedDict, Counter or defaultdict; which of them does not matter here."""
        found = Tree()
        for arg in args:
            pairs = arg.items() if isinstance(arg, dict) else arg if isinstance(arg, list) else ()
            for key, value in pairs:
                self.put(found, key, value)
        return found

    def _check(self, target: dict[Any, Any], key: object) -> None:
        if isinstance(key, str | bytes):
            if len(key) > _LONG_KEY and key in target:
                raise pickle.UnpicklingError(f"a key of {len(key)} characters appears twice")
            return
        _check_part(key)
        if isinstance(key, tuple | float | complex):
            equal = self._by_hash.setdefault(hash(key), [])
            if key not in equal:
                equal.append(key)
            if len(equal) > _MAX_EQUAL:
                raise pickle.UnpicklingError("many keys have equal hashes")


def _check_part(key: object, depth: int = 0) -> None:
    """Allow only small integers, texts and tuples: see `_DictKeys`."""
    if isinstance(key, tuple) and depth < 3 and len(key) <= 16:
        for part in key:
            _check_part(part, depth + 1)
    elif not isinstance(key, str | bytes | int | float | complex | Label | Record | None):
        raise pickle.UnpicklingError(f"a {type(key).__name__} was used as a key")
    elif isinstance(key, int):
        if not -_LARGEST_KEY < key < _LARGEST_KEY:  # at most 16 of these have equal hashes
            raise pickle.UnpicklingError(f"a number of {key.bit_length()} bits was used as a key")
    elif isinstance(key, str | bytes | Label):
        text = key.path if isinstance(key, Label) else key
        if len(text) > _LONG_KEY:
            raise pickle.UnpicklingError(f"a key contains a text of {len(text)} characters")


class _Unpickler(pickle._Unpickler):
    """Replaces the opcodes that name, call, build or fill something; has no extension codes."""

    if TYPE_CHECKING:
        stack: list[Any]
        metastack: list[list[Any]]
        memo: dict[int, Any]
        proto: int
        read: Callable[[int], bytes]
        _file_read: Callable[[int], bytes]
        _file_readline: Callable[[], bytes]
        append: Callable[[object], None]
        pop_mark: Callable[[], list[Any]]
        readline: Callable[[], bytes]
        load_binbytes8: Callable[..., None]

    def __init__(
        self,
        file: io.BytesIO,
        location: object,
        makers: Mapping[str, Maker | None],
        load_storage: Maker | None,
        any_name: bool,
    ) -> None:
        super().__init__(file, encoding="utf-8", errors="replace")
        self._location, self._load_storage, self._any_name = location, load_storage, any_name
        self._keys = _DictKeys()
        dicts = dict.fromkeys(_DICTS, self._keys.make_dict)
        self._makers: Mapping[str, Maker | None] = {**dicts, **makers}

    def load(self) -> Any:
        # As the original, but without its layer for frames, which only group bytes: every byte is
        # read one Python call less deep.
        self.read, self.readline = self._file_read, self._file_readline
        self.metastack, self.stack = [], []
        self.append = self.stack.append
        self.proto = 0
        read = self.read
        dispatch: Any = self.dispatch
        try:
            while True:
                code = read(1)
                if not code:
                    raise EOFError("the pickle ends early")
                dispatch[code[0]](self)
        except pickle._Stop as stopped:  # type: ignore[attr-defined]
            return stopped.value

    def _frame(self) -> None:
        self.read(8)

    def _long_binput(self) -> None:  # after every object of a large file
        self.memo[int.from_bytes(self.read(4), "little")] = self.stack[-1]

    def find_class(self, module: str, name: str) -> Label:
        path = f"{'builtins' if module == '__builtin__' else module}.{name}"
        if self._any_name or path in self._makers or path in _HARMLESS:
            return Label(path)
        shown = path if path.isprintable() else repr(path)
        raise FormatError(
            f"{self._location}: refers to {shown[:_MAX_MESSAGE]}, which weights do not need; it "
            "was not executed. If you trust the file, load it with torch and save only "
            "model.state_dict(), or convert it to safetensors."
        )

    def persistent_load(self, pid: object) -> object:
        if self._load_storage is None:
            raise pickle.UnpicklingError("a persistent id where there are no storages")
        return self._load_storage(pid)

    def _call(self, label: object, args: object) -> object:
        if self._any_name and isinstance(label, Record):  # what a function in the file returned
            label = Label(f"{label.path}()")
        if not isinstance(label, Label) or not isinstance(args, tuple):
            raise pickle.UnpicklingError(f"a {type(label).__name__} was called")
        maker = self._makers.get(label.path)
        return Record(label.path, args) if maker is None else maker(*args)

    def _reduce(self) -> None:  # and NEWOBJ: (what to call, arguments)
        args = self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], args)

    def _newobj_ex(self) -> None:
        kwargs, args = self.stack.pop(), self.stack.pop()
        self.stack[-1] = self._call(self.stack[-1], (*args, kwargs))

    def _inst(self) -> None:
        module, name = (self.readline()[:-1].decode() for _ in range(2))
        made = self._call(self.find_class(module, name), tuple(self.pop_mark()))
        self.append(made)  # looked up after `pop_mark`, which replaces `append`

    def _obj(self) -> None:
        label, *args = self.pop_mark()
        self.append(self._call(label, tuple(args)))

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Record):
            target.state = state
        elif isinstance(target, Tree):
            target.attributes = state
        elif not isinstance(target, dict):
            raise pickle.UnpicklingError(f"a {type(target).__name__} was given a state")

    def _extend(self, items: list[object]) -> None:
        target = self.stack[-1]
        if isinstance(target, Record):
            target.add(items)
        elif isinstance(target, list):
            target.extend(items)
        else:
            raise pickle.UnpicklingError(f"an item was added to a {type(target).__name__}")

    def _append(self) -> None:
        item = self.stack.pop()
        self._extend([item])

    def _appends(self) -> None:  # and ADDITEMS
        items = self.pop_mark()
        self._extend(items)

    def _setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._keys.put(self.stack[-1], key, value)

    def _setitems(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._keys.put(self.stack[-1], key, value)

    def _dict(self) -> None:
        items = self.pop_mark()
        self.append(self._keys.make_dict(list(zip(items[::2], items[1::2], strict=True))))

    def _empty_set(self) -> None:
        self.append(Record("builtins.set"))

    def _frozenset(self) -> None:
        items = self.pop_mark()
        self.append(Record("builtins.frozenset", tuple(items)))

    dispatch = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if bytes([code]) not in (pickle.EXT1, pickle.EXT2, pickle.EXT4)
    } | {
        pickle.FRAME[0]: _frame,
        pickle.LONG_BINPUT[0]: _long_binput,
        pickle.REDUCE[0]: _reduce,
        pickle.NEWOBJ[0]: _reduce,
        pickle.NEWOBJ_EX[0]: _newobj_ex,
        pickle.INST[0]: _inst,
        pickle.OBJ[0]: _obj,
        pickle.BUILD[0]: _build,
        pickle.APPEND[0]: _append,
        pickle.APPENDS[0]: _appends,
        pickle.ADDITEMS[0]: _appends,
        pickle.SETITEM[0]: _setitem,
        pickle.SETITEMS[0]: _setitems,
        pickle.DICT[0]: _dict,
        pickle.EMPTY_SET[0]: _empty_set,
        pickle.FROZENSET[0]: _frozenset,
        # The same bytes on disk; the original allocates the claimed length before it checks it.
        pickle.BYTEARRAY8[0]: pickle._Unpickler.dispatch[pickle.BINBYTES8[0]],
    }  # type: ignore[assignment]
