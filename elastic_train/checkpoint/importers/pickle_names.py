"""The names that may stand in a pickle: storages, dtypes, and words of torch and Python that are inert."""

from __future__ import annotations

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "QUInt8Storage": "quint8",
    "QInt8Storage": "qint8",
    "QInt32Storage": "qint32",
    "QUInt4x2Storage": "quint4x2",
    "QUInt2x4Storage": "quint2x4",
    "UntypedStorage": None,
}
DTYPES = frozenset(
    (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "int64", "int32", "int16", "int8", "uint64",
        "uint32", "uint16", "uint8", "bool", "complex32", "complex64", "complex128", "quint8", "qint8",
        "qint32", "quint4x2", "quint2x4",
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in range(1, 8)),
    )
)  # fmt: skip
"""Types that a tensor may say it has; which of them can be stored is for the format to say."""

DICTIONARIES = {
    "AttributeDict": frozenset({"lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning"}),
}
"""Classes that are dictionaries and nothing more, by the packages that have them."""

KEPT = (
    "torch.distributed.checkpoint.", "megatron.", "deepspeed.", "argparse.Namespace", "numpy.dtype",
)  # fmt: skip
"""Where these names begin, what an object holds is looked at; of others nothing is kept but the name."""

WORDS_OF_PYTHON = frozenset(
    (
        "argparse", "datetime", "decimal", "enum", "fractions", "ipaddress", "pathlib", "typing", "uuid",
        "zoneinfo", "types.GenericAlias", "types.NoneType", "types.UnionType", "dataclasses._MISSING_TYPE",
        "collections.Counter", "collections.deque", "collections.ChainMap", "collections.UserDict",
        "collections.UserList", "copyreg._reconstructor", "copy_reg._reconstructor", "functools.partial",
        "types.SimpleNamespace", "types.MappingProxyType", "random.Random", "re._compile", "logging.Logger",
    )
)  # fmt: skip
"""Modules and names of Python's library that appear in settings, where they are words like any other."""

WORDS_OF_TORCH = (
    "torch.Tensor", "torch.device", "torch.dtype", "torch.per_", "torch.contiguous_format", "torch.Generator",
    "torch._C.Generator",
    "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer", "torch.nn.modules.", "torch.nn.functional.",
    "torch._C._nn.", "torch.ao.", "torch.optim.", "torch.amp.", "torch.cuda.amp.", "torch.distributed.",
    "torch.utils.data.",
)  # fmt: skip
"""Where names of torch may begin that are words: classes and functions in settings and in whole models."""

_DENSE = "Save it as a plain tensor."
ODD = {
    ("torch._utils", "_rebuild_sparse_tensor"): ("a sparse tensor", "Save it with .to_dense()."),
    ("torch._utils", "_rebuild_sparse_csr_tensor"): ("a sparse tensor", "Save it with .to_dense()."),
    ("torch._utils", "_rebuild_nested_tensor"): ("a nested tensor", _DENSE),
    ("torch._utils", "_rebuild_qtensor"): ("a quantized tensor", "Save it with .dequantize()."),
    ("torch._utils", "_rebuild_wrapper_subclass"): ("a tensor that wraps others", _DENSE),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): ("a tensor without data (meta)", _DENSE),
    ("torch._utils", "_rebuild_device_tensor_from_numpy"): ("a tensor of a device without storages", _DENSE),
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): ("a tensor of a device", _DENSE),
    ("torch._utils", "_rebuild_xla_tensor"): ("a tensor of a device", "Save it with .cpu()."),
}
"""How torch rebuilds tensors that are no view of one storage: what they are, and the remedy."""
