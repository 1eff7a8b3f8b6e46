"""The names that a checkpoint's pickle may use. None of them is imported: they stay names."""

from torch_lawa.mean.dtypes import DTYPES

__all__ = ["DICTS", "HARMLESS"]


def _paths(text: str) -> set[str]:
    """`module: name name` on each line."""
    lines = (line.split(":") for line in text.strip().splitlines())
    return {f"{module.strip()}.{name}" for module, names in lines for name in names.split()}


# Classes that are dicts as far as weights go.
DICTS = frozenset(
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

# What real checkpoints carry beside their weights, and what tensors are described with.
HARMLESS = frozenset(
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
