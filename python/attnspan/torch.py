"""attnspan for PyTorch: custom operators with fake kernels and gradients.

`attention` is the whole contract; `scaled_dot_product_attention` is PyTorch's function by its own name. Tensors live
on the CPU or on a GPU and are used where they are, on PyTorch's current stream. torch.compile traces through without
graph breaks. Under autocast, query, key and value are cast to autocast's dtype.
"""

from __future__ import annotations

import contextlib
from typing import Any, Optional

from . import _core
from ._errors import InvalidArgument, Unsupported, missing

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:
    raise missing("attnspan.torch", error, "torch>=2.4") from None

__all__ = ["attention", "scaled_dot_product_attention"]

_DEVICES = ("cpu", "cuda")


def _on_device_of(tensor: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Kernels are launched on the current device: makes it the tensor's where it is another one."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return contextlib.nullcontext()


def _lse_shape(query: Tensor) -> tuple[int, ...]:
    if query.dim() == 3:
        return (query.shape[1], query.shape[0])
    return (query.shape[0], query.shape[2], query.shape[1])


# ---- the operators. `diagonal` None is bottom-right; top-left is 0.


@torch.library.custom_op("attnspan::forward", mutates_args=(), device_types=_DEVICES)
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_start: Optional[Tensor],
    key_end: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    seqused_k: Optional[Tensor],
    bias: Optional[Tensor],
    alibi_slopes: Optional[Tensor],
    sinks: Optional[Tensor],
    softmax_scale: Optional[float],
    softcap: float,
    causal: bool,
    diagonal: Optional[int],
    window_left: int,
    window_right: int,
    nan_guard: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    with _on_device_of(query):
        return _core.forward_no_autograd(
            query,
            key,
            value,
            backend=backend,
            key_start=key_start,
            key_end=key_end,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_k=seqused_k,
            bias=bias,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            softmax_scale=softmax_scale,
            softcap=softcap,
            causal=causal,
            diagonal=diagonal,
            window_left=window_left,
            window_right=window_right,
            nan_guard=nan_guard,
        )


@_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    return out, query.new_empty(_lse_shape(query), dtype=torch.float32)


@torch.library.custom_op("attnspan::backward", mutates_args=(), device_types=_DEVICES)
def _backward(
    dout: Tensor,
    dlse: Optional[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    key_start: Optional[Tensor],
    key_end: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_k: Optional[Tensor],
    seqused_k: Optional[Tensor],
    bias: Optional[Tensor],
    alibi_slopes: Optional[Tensor],
    sinks: Optional[Tensor],
    softmax_scale: Optional[float],
    softcap: float,
    causal: bool,
    diagonal: Optional[int],
    window_left: int,
    window_right: int,
    nan_guard: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and d_sinks (empty without sinks)."""
    with _on_device_of(query):
        dq, dk, dv, d_sinks = _core.backward(
            dout,
            query,
            key,
            value,
            out,
            lse,
            dlse=dlse,
            backend=backend,
            key_start=key_start,
            key_end=key_end,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            seqused_k=seqused_k,
            bias=bias,
            alibi_slopes=alibi_slopes,
            sinks=sinks,
            softmax_scale=softmax_scale,
            softcap=softcap,
            causal=causal,
            diagonal=diagonal,
            window_left=window_left,
            window_right=window_right,
            nan_guard=nan_guard,
        )
    return dq, dk, dv, lse.new_empty(0) if d_sinks is None else d_sinks


@_backward.register_fake
def _(
    dout: Tensor,
    dlse: Optional[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sinks = options[_SINKS - 3]
    d_sinks = lse.new_empty(0 if sinks is None else sinks.shape)
    return query.new_empty(query.shape), query.new_empty(key.shape), query.new_empty(value.shape), d_sinks


_SIDE_INPUTS = slice(3, 11)  # of _forward's arguments
_SINKS = 10
_OPTIONS = slice(11, 19)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output, *inputs[_SIDE_INPUTS])
    ctx.options = inputs[_OPTIONS]


def _gradients(ctx: Any, dout: Optional[Tensor], dlse: Optional[Tensor]) -> tuple[Optional[Tensor], ...]:
    query, key, value, out, lse, *side_inputs = ctx.saved_tensors
    if dout is None:
        if dlse is None:
            return (None,) * 19
        dout = torch.zeros_like(out)
    elif dout.stride(-1) != 1:  # an expanded gradient, as of sum()
        dout = dout.contiguous()
    dq, dk, dv, d_sinks = _backward(dout, dlse, query, key, value, out, lse, *side_inputs, *ctx.options)
    gradients: list[Optional[Tensor]] = [None] * 19
    gradients[:3] = dq, dk, dv
    if side_inputs[-1] is not None:
        gradients[_SINKS] = d_sinks
    return tuple(gradients)


_forward.register_autograd(_gradients, setup_context=_setup_context)


def _refuse_second_gradient(ctx: Any, *gradients: Any) -> None:
    raise Unsupported(
        "backward: found a gradient of a gradient, expected at most one: it has no formula here"
    )


_backward.register_autograd(_refuse_second_gradient)


# ---- the functions


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return query.to(dtype), key.to(dtype), value.to(dtype)
    return query, key, value


def _refuse_gradient_of(tensor: Optional[Tensor], name: str) -> None:
    if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
        raise _named(
            Unsupported,
            name,
            "a tensor that requires a gradient",
            "a detached one: this input has no gradient here",
        )


def _named(error: type, argument: str, found: str, expected: str) -> Exception:
    exception = error(f"{argument}: found {found}, expected {expected}")
    exception.argument = argument
    return exception


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    softmax_scale: Optional[float] = None,
    softcap: float = 0.0,
    causal: bool = False,
    diagonal: str | int = "bottom-right",
    window_left: int = -1,
    window_right: int = -1,
    key_start: Optional[Tensor] = None,
    key_end: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    alibi_slopes: Optional[Tensor] = None,
    sinks: Optional[Tensor] = None,
    nan_guard: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """`attnspan.forward` with gradients of query, key, value and sinks: out and lse.

    query `[batch, seqlen_q, heads, head_dim]`, key and value `[batch, seqlen_k, kv_heads, head_dim or head_dim_v]`
    (with cu_seqlens `[total, heads, dim]`) in float32, float16 or bfloat16; out like query, lse float32
    `[batch, heads, seqlen_q]`. lse is differentiable too. `attnspan.forward` describes the other arguments.
    Raises attnspan.Error naming the argument; a gradient of bias or alibi_slopes is refused.
    """
    if isinstance(diagonal, str):
        if diagonal not in ("bottom-right", "top-left"):
            raise _named(
                InvalidArgument, "diagonal", repr(diagonal), "'bottom-right', 'top-left' or an integer"
            )
        diagonal = 0 if diagonal == "top-left" else None
    _refuse_gradient_of(bias, "bias")
    _refuse_gradient_of(alibi_slopes, "alibi_slopes")
    query, key, value = _autocast(query, key, value)
    return _forward(
        query,
        key,
        value,
        key_start,
        key_end,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        bias,
        alibi_slopes,
        sinks,
        softmax_scale,
        softcap,
        causal,
        diagonal,
        window_left,
        window_right,
        nan_guard,
        backend,
    )


def _dense_rows(tensor: Tensor) -> Tensor:
    """The tensor with a contiguous last dimension: the drop-in functions take any strides, as their models do."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p != 0:
        raise _named(
            Unsupported, "dropout_p", str(dropout_p), "0: dropout of attention weights is not computed here"
        )


def _bias_of_mask(attn_mask: Tensor, batch_shape: tuple[int, ...]) -> Tensor:
    """A mask of scaled_dot_product_attention as an additive float32 bias of rank 4."""
    _refuse_gradient_of(attn_mask, "attn_mask")
    if attn_mask.dtype == torch.bool:
        bias = torch.zeros(attn_mask.shape, dtype=torch.float32, device=attn_mask.device)
        bias = bias.masked_fill(~attn_mask, -torch.inf)
    else:
        bias = attn_mask.to(torch.float32)
    return _one_batch_dimension(bias, batch_shape if len(batch_shape) > 1 else ())


def _one_batch_dimension(tensor: Tensor, batch_shape: tuple[int, ...]) -> Tensor:
    """`[..., heads, rows, columns]`, broadcast to batch_shape, as rank 4."""
    while tensor.dim() < 4:
        tensor = tensor.unsqueeze(0)
    if batch_shape and tensor.shape[:-3] != batch_shape:
        tensor = tensor.expand(*batch_shape, *tensor.shape[-3:])
    return tensor.flatten(0, -4) if tensor.dim() > 4 else tensor


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention: `[..., heads, seqlen, head_dim]` in and out.

    attn_mask is boolean (True takes part) or additive, broadcastable to `[..., heads, seqlen_q, seqlen_k]`; is_causal
    is aligned to the top left. A row that sees no key gives 0. dropout_p > 0 and a gradient of attn_mask are refused.
    """
    _refuse_dropout(dropout_p)
    if attn_mask is not None and is_causal:
        raise _named(InvalidArgument, "attn_mask", "a mask together with is_causal", "one of the two")
    if query.dim() < 2 or key.dim() != query.dim() or value.dim() != query.dim():
        ranks = f"ranks {query.dim()}, {key.dim()} and {value.dim()} of query, key and value"
        raise _named(InvalidArgument, "query", ranks, "one rank of 2 or more")
    batch_shape, rows_shape = query.shape[:-3], query.shape[:-1]
    query, key, value = (_one_batch_dimension(t, batch_shape) for t in (query, key, value))
    if not enable_gqa and key.shape[1] not in (1, query.shape[1]):
        raise _named(
            InvalidArgument, "key", f"{key.shape[1]} heads", f"{query.shape[1]} (query's), or enable_gqa=True"
        )
    bias = None if attn_mask is None else _bias_of_mask(attn_mask, batch_shape)
    query, key, value = (_dense_rows(t).transpose(1, 2) for t in (query, key, value))
    out, _ = attention(
        query, key, value, softmax_scale=scale, causal=is_causal, diagonal="top-left", bias=bias
    )
    out = out.transpose(1, 2)
    return out if len(batch_shape) == 1 else out.reshape(*rows_shape, value.shape[-1])
