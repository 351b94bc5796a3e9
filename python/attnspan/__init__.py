"""attnspan: exact attention in one pass over memory, on every processor.

    out, lse = attnspan.forward(query, key, value, causal=True)       # NumPy, PyTorch, anything with DLPack

`forward`, `backward`, `merge_states` and `KvCache` need no framework. `scaled_dot_product_attention`,
`flash_attn_func`, `flash_attn_varlen_func` and `flash_attn_with_kvcache` are PyTorch's and FlashAttention's
functions by their own names, with gradients; they import PyTorch when first used. `attnspan.transformers`
registers attnspan with Hugging Face Transformers.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from ._core import (
    KvCache,
    Result,
    __version__,
    backend_list,
    backward,
    forward,
    last_result,
    merge_states,
    supports,
)
from ._errors import Error, FileError, InvalidArgument, OutOfMemory, Unavailable, Unsupported

if TYPE_CHECKING:
    from .flash import flash_attn_func as flash_attn_func
    from .flash import flash_attn_varlen_func as flash_attn_varlen_func
    from .flash import flash_attn_with_kvcache as flash_attn_with_kvcache
    from .torch import scaled_dot_product_attention as scaled_dot_product_attention

# Names that live in modules which need PyTorch: imported when first asked for, shown where PyTorch is installed.
_FROM_TORCH = {
    "scaled_dot_product_attention": "torch",
    "flash_attn_func": "flash",
    "flash_attn_varlen_func": "flash",
    "flash_attn_with_kvcache": "flash",
}

__all__ = [
    "Error",
    "FileError",
    "InvalidArgument",
    "KvCache",
    "OutOfMemory",
    "Result",
    "Unavailable",
    "Unsupported",
    "__version__",
    "backends",
    "backward",
    "forward",
    "info",
    "last_result",
    "merge_states",
    "supports",
    *(_FROM_TORCH if importlib.util.find_spec("torch") else ()),
]


def backends() -> list[str]:
    """The names of the backends of this machine, in order of preference."""
    return [row["name"] for row in backend_list() if row["available"]]


def info() -> dict[str, Any]:
    """The version, and for every backend whether it is available, its device and a description or why not."""
    return {"version": __version__, "backends": backend_list()}


def __getattr__(name: str) -> Any:
    if name not in _FROM_TORCH:
        raise AttributeError(f"module 'attnspan' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"attnspan.{_FROM_TORCH[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
