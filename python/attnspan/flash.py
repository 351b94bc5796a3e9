"""FlashAttention's functions by their own names: changing the import is all a user does.

`[batch, seqlen, heads, head_dim]` tensors in float32, float16 or bfloat16, all of one dtype, on the CPU or a GPU; causal
masks aligned to the bottom right, window sizes inclusive with -1 for unlimited. The lse of a row that sees no key is -inf.
dropout_p > 0 is refused. `deterministic` may be given: the backward pass always is; so may `num_splits`: how a long
sequence is split is decided here and changes no answer. Errors are those of `attnspan.forward`: attnspan.Error, with the
argument's name there (query, key, value for q, k, v).
"""

from __future__ import annotations

from typing import Any, Optional, Union

from . import _core
from ._errors import InvalidArgument, missing

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:
    raise missing("attnspan.flash", error, "torch>=2.4") from None
from .torch import _DEVICES, _dense_rows, _lse_shape, _named, _on_device_of, _refuse_dropout, attention

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def _with_probs(out: Tensor, lse: Tensor, return_attn_probs: bool) -> Any:
    """FlashAttention returns the dropout pattern third; without dropout it is empty."""
    return (out, lse, out.new_empty(0)) if return_attn_probs else out


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of dense batches, with gradients.

    q `[batch, seqlen_q, heads, head_dim]`, k and v `[batch, seqlen_k, kv_heads, head_dim]`; heads % kv_heads == 0.
    Returns out, or (out, lse `[batch, heads, seqlen_q]`, an empty tensor) with return_attn_probs.
    """
    _refuse_dropout(dropout_p)
    out, lse = attention(
        _dense_rows(q),
        _dense_rows(k),
        _dense_rows(v),
        softmax_scale=softmax_scale,
        causal=causal,
        window_left=window_size[0],
        window_right=window_size[1],
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )
    return _with_probs(out, lse, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Optional[Tensor] = None,
) -> Any:
    """Attention of packed sequences, with gradients.

    q `[total_q, heads, head_dim]`, k and v `[total_k, kv_heads, head_dim]`, cu_seqlens int32 `[batch + 1]`. The maximum
    lengths may be given and are not needed. With block_table (int32 `[batch, pages]`) k and v are pages
    `[num_pages, page_size, kv_heads, head_dim]`, without gradients.
    Returns out, or (out, lse `[heads, total_q]`, an empty tensor) with return_attn_probs.
    """
    _refuse_dropout(dropout_p)
    options = dict(
        softmax_scale=softmax_scale,
        causal=causal,
        window_left=window_size[0],
        window_right=window_size[1],
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )
    if block_table is None:
        out, lse = attention(
            _dense_rows(q),
            _dense_rows(k),
            _dense_rows(v),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            **options,
        )
    else:
        _refuse_cache_gradient(q, k, v)
        out, lse = _forward_packed_over_pages(
            _dense_rows(q), k, v, cu_seqlens_q, cu_seqlens_k, block_table, *options.values()
        )
    return _with_probs(out, lse, return_attn_probs)


# ---- caches: operators without gradients


def _refuse_cache_gradient(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise _named(
                InvalidArgument,
                name,
                "a tensor that requires a gradient",
                "a detached one: attention over a cache has no gradient",
            )


@torch.library.custom_op("attnspan::forward_cache", mutates_args=(), device_types=_DEVICES)
def _forward_cache(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Optional[Tensor],
    key_start: Optional[Tensor],
    softmax_scale: Optional[float],
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    with _on_device_of(query):
        return _core.forward_no_autograd(
            query,
            k_cache,
            v_cache,
            cache_seqlens=cache_seqlens,
            block_table=block_table,
            key_start=key_start,
            softmax_scale=softmax_scale,
            causal=causal,
            window_left=window_left,
            window_right=window_right,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
        )


@_forward_cache.register_fake
def _(query: Tensor, k_cache: Tensor, v_cache: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:-1], v_cache.shape[-1]))
    return out, query.new_empty(_lse_shape(query), dtype=torch.float32)


@torch.library.custom_op("attnspan::forward_packed_over_pages", mutates_args=(), device_types=_DEVICES)
def _forward_packed_over_pages(
    query: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    block_table: Tensor,
    softmax_scale: Optional[float],
    causal: bool,
    window_left: int,
    window_right: int,
    softcap: float,
    alibi_slopes: Optional[Tensor],
) -> tuple[Tensor, Tensor]:
    """One call for each sequence: their queries are packed, and each sees pages of its own."""
    out = query.new_empty((*query.shape[:-1], v_pages.shape[-1]))
    lse = query.new_empty(_lse_shape(query), dtype=torch.float32)
    lengths = cu_seqlens_k.diff()
    starts = cu_seqlens_q.tolist()
    with _on_device_of(query):
        for b, (begin, end) in enumerate(zip(starts, starts[1:])):
            slopes = (
                alibi_slopes if alibi_slopes is None or alibi_slopes.dim() == 1 else alibi_slopes[b : b + 1]
            )
            _core.forward_no_autograd(
                query[None, begin:end],
                k_pages,
                v_pages,
                cache_seqlens=lengths[b : b + 1],
                block_table=block_table[b : b + 1],
                out=out[None, begin:end],
                lse=lse[None, :, begin:end],
                softmax_scale=softmax_scale,
                causal=causal,
                window_left=window_left,
                window_right=window_right,
                softcap=softcap,
                alibi_slopes=slopes,
            )
    return out, lse


@_forward_packed_over_pages.register_fake
def _(query: Tensor, k_pages: Tensor, v_pages: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    out = query.new_empty((*query.shape[:-1], v_pages.shape[-1]))
    return out, query.new_empty(_lse_shape(query), dtype=torch.float32)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """The rotary embedding of x `[batch, seqlen, heads, head_dim]` at positions `[batch, seqlen]`, in float32.

    The first 2 * cos.shape[1] channels turn in pairs: (0, 1), (2, 3), ... interleaved, else (0, r/2), (1, r/2 + 1), ...
    """
    half = cos.shape[1]
    c, s = (table[positions].float().unsqueeze(2) for table in (cos, sin))
    turning, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack([a * c - b * s, a * s + b * c], dim=-1).flatten(-2)
    else:
        a, b = turning[..., :half], turning[..., half:]
        turned = torch.cat([a * c - b * s, a * s + b * c], dim=-1)
    return torch.cat([turned.to(x.dtype), rest], dim=-1)


def _check_fits(positions: Tensor, capacity: int) -> None:
    if positions.device.type == "cpu" and not torch.compiler.is_compiling() and positions.numel():
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= capacity:
            raise _named(
                InvalidArgument,
                "cache_seqlens",
                f"new tokens at positions {low} to {high}",
                f"positions within the cache, 0 to {capacity - 1}",
            )


def _store(cache: Tensor, new: Tensor, positions: Tensor, pages: Tensor, page_size: int) -> None:
    """cache[page, row] = new for the page and row of each position."""
    page = pages.gather(1, torch.div(positions, page_size, rounding_mode="floor"))
    cache[page, positions % page_size] = new.to(cache.dtype)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Optional[Union[int, Tensor]] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Optional[Tensor] = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention over a KV cache, which is updated in place with k and v where they are given. No gradients.

    q `[batch, seqlen, heads, head_dim]`; k_cache, v_cache `[batch_cache, seqlen_cache, kv_heads, head_dim]`, or with
    block_table (int32 `[batch, pages]`) `[num_pages, page_size, kv_heads, head_dim]`; k, v
    `[batch, seqlen_new, kv_heads, head_dim]` are stored from position cache_seqlens (int or int32 `[batch]`) on.
    cache_batch_idx (int32 `[batch]`) chooses sequences of the cache; keys before cache_leftpad (int32 `[batch]`) are not
    seen. rotary_cos, rotary_sin `[positions, rotary_dim / 2]` turn k, and q at the same positions (without causal and
    window: all of q at position cache_seqlens).
    Returns out, or (out, lse `[batch, heads, seqlen]`) with return_softmax_lse.
    """
    _refuse_cache_gradient(q, k_cache, v_cache)
    batch, seqlen = q.shape[:2]
    if (k is None) != (v is None):
        raise _named(InvalidArgument, "v" if v is None else "k", "no tensor", "both of k and v, or neither")
    if k is not None and cache_seqlens is None:
        raise _named(InvalidArgument, "cache_seqlens", "no lengths", "where k and v are to be stored")
    if (rotary_cos is None) != (rotary_sin is None) or (rotary_cos is not None and k is None):
        raise _named(
            InvalidArgument, "rotary_cos", "a part", "rotary_cos and rotary_sin, together with k and v"
        )
    if cache_batch_idx is not None and block_table is not None:
        raise _named(
            InvalidArgument, "cache_batch_idx", "indices together with block_table", "one of the two"
        )
    page_size = k_cache.shape[1]
    pages = block_table
    if cache_batch_idx is not None:
        pages = cache_batch_idx.view(-1, 1)  # a sequence of a dense cache is one page
    capacity = page_size * (1 if pages is None else pages.shape[1])
    if cache_seqlens is None:
        cache_seqlens = capacity
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)

    lengths = cache_seqlens
    if k is not None:
        positions = lengths.long().view(-1, 1) + torch.arange(k.shape[1], device=q.device)
        _check_fits(positions, capacity)
        if rotary_cos is not None:
            steps = torch.arange(seqlen, device=q.device)
            follows = causal or tuple(window_size) != (-1, -1)
            q_positions = lengths.long().view(-1, 1) + (steps if follows else torch.zeros_like(steps))
            q = _rotate(q, rotary_cos, rotary_sin, q_positions, rotary_interleaved)
            k = _rotate(k, rotary_cos, rotary_sin, positions, rotary_interleaved)
        own = torch.arange(batch, device=q.device).view(-1, 1) if pages is None else pages.long()
        _store(k_cache, k, positions, own, page_size)
        _store(v_cache, v, positions, own, page_size)
        lengths = lengths + k.shape[1]
    key_start = None if cache_leftpad is None else cache_leftpad.view(-1, 1).expand(-1, seqlen).contiguous()
    out, lse = _forward_cache(
        _dense_rows(q),
        k_cache,
        v_cache,
        lengths.to(torch.int32),
        pages,
        key_start,
        softmax_scale,
        causal,
        window_size[0],
        window_size[1],
        softcap,
        alibi_slopes,
    )
    return (out, lse) if return_softmax_lse else out
