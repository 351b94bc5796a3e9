"""FlashAttention's functions: names, defaults, returns, and their answers against explicit masks in double."""

import inspect

import pytest
import torch

import attnspan
from conftest import allowed_keys, reference


def rand(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_signatures():
    """Names and defaults as in flash_attn 2.8."""
    start = [
        ("dropout_p", 0.0),
        ("softmax_scale", None),
        ("causal", False),
        ("window_size", (-1, -1)),
        ("softcap", 0.0),
        ("alibi_slopes", None),
        ("deterministic", False),
        ("return_attn_probs", False),
    ]
    required = inspect.Parameter.empty
    expected = {
        "flash_attn_func": [(n, required) for n in ("q", "k", "v")] + start,
        "flash_attn_varlen_func": [
            (n, required)
            for n in ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        ]
        + start
        + [("block_table", None)],
        "flash_attn_with_kvcache": [(n, required) for n in ("q", "k_cache", "v_cache")]
        + [
            (n, None)
            for n in (
                "k",
                "v",
                "rotary_cos",
                "rotary_sin",
                "cache_seqlens",
                "cache_batch_idx",
                "cache_leftpad",
                "block_table",
                "softmax_scale",
            )
        ]
        + [
            ("causal", False),
            ("window_size", (-1, -1)),
            ("softcap", 0.0),
            ("rotary_interleaved", True),
            ("alibi_slopes", None),
            ("num_splits", 0),
            ("return_softmax_lse", False),
        ],
    }
    for name, parameters in expected.items():
        signature = inspect.signature(getattr(attnspan, name))
        assert [(p.name, p.default) for p in signature.parameters.values()] == parameters


def test_flash_attn_func():
    q, k, v = rand(2, 5, 4, 16), rand(2, 9, 2, 16, seed=1), rand(2, 9, 2, 16, seed=2)
    options = dict(causal=True, window_size=(3, 0), softcap=5.0)
    out, lse, dropped = attnspan.flash_attn_func(
        q, k, v, return_attn_probs=True, deterministic=True, **options
    )
    expected = reference(q, k, v, allowed_keys(5, 9, causal=True, window_left=3), softcap=5.0)
    torch.testing.assert_close(out.double(), expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected[1], atol=1e-5, rtol=1e-5)
    assert dropped.numel() == 0 and torch.equal(out, attnspan.flash_attn_func(q, k, v, **options))
    not_dense = q.transpose(-1, -2).contiguous().transpose(-1, -2)  # head_dim has a stride
    assert torch.equal(out, attnspan.flash_attn_func(not_dense, k, v, **options))


def test_alibi():
    q, k, v = rand(1, 3, 2, 8), rand(1, 6, 2, 8, seed=1), rand(1, 6, 2, 8, seed=2)
    slopes = torch.tensor([0.5, 0.25])
    distance = (torch.arange(3)[:, None] + 3 - torch.arange(6)[None, :]).abs()
    expected, _ = reference(q, k, v, bias=-slopes[None, :, None, None] * distance)
    out = attnspan.flash_attn_func(q, k, v, alibi_slopes=slopes)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("paged", [False, True])
def test_flash_attn_varlen_func(paged):
    lengths_q, lengths_k = [3, 0, 5, 1], [7, 4, 2, 0]
    cu_q, cu_k = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k))
    q, k, v = rand(9, 4, 16), rand(13, 2, 16, seed=1), rand(13, 2, 16, seed=2)
    table = None
    k_in, v_in = k, v
    if paged:
        table = torch.tensor([[2], [0], [3], [1]], dtype=torch.int32)
        k_in, v_in = (torch.full((4, 16, 2, 16), float("nan")) for _ in range(2))
        for b, length in enumerate(lengths_k):
            k_in[table[b, 0], :length], v_in[table[b, 0], :length] = (
                k[cu_k[b] : cu_k[b + 1]],
                v[cu_k[b] : cu_k[b + 1]],
            )
    out, lse, _ = attnspan.flash_attn_varlen_func(
        q, k_in, v_in, cu_q, cu_k, 5, 7, causal=True, return_attn_probs=True, block_table=table
    )
    assert lse.shape == (4, 9)
    for b in range(4):
        rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        mask = allowed_keys(lengths_q[b], lengths_k[b], causal=True)
        expected = reference(q[None, rows], k[None, keys], v[None, keys], mask)
        torch.testing.assert_close(out[None, rows].double(), expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[None, :, rows].double(), expected[1], atol=1e-5, rtol=1e-5)


def rotated(x, cos, sin, positions, interleaved):
    """The rotary embedding as complex numbers, in double."""
    half = cos.shape[1]
    x = x.double()
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    parts = turning.unflatten(-1, (half, 2)) if interleaved else torch.stack(turning.chunk(2, -1), -1)
    turn = torch.complex(cos.double(), sin.double())[positions][:, :, None]
    result = torch.view_as_real(torch.view_as_complex(parts.contiguous()) * turn)
    result = result.flatten(-2) if interleaved else torch.cat(result.unbind(-1), -1)
    return torch.cat([result, rest], -1)


@pytest.mark.parametrize("layout", ["dense", "batch_idx", "paged"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal, seqlen, leftpad", [(True, 3, True), (False, 2, False), (True, 1, False)])
def test_flash_attn_with_kvcache(layout, interleaved, causal, seqlen, leftpad):
    batch, heads, kv_heads, dim, page = 2, 4, 2, 24, 16
    lengths = torch.tensor([18, 5], dtype=torch.int32)
    q, k_new, v_new = (
        rand(batch, seqlen, heads, dim),
        rand(batch, seqlen, kv_heads, dim, seed=1),
        rand(batch, seqlen, kv_heads, dim, seed=2),
    )
    angles = torch.rand(40, 8, generator=torch.Generator().manual_seed(3)) * 6.28
    cos, sin = angles.cos(), angles.sin()
    k_full, v_full = rand(batch, 32, kv_heads, dim, seed=4), rand(batch, 32, kv_heads, dim, seed=5)
    options = dict(batch_idx={}, dense={}, paged={})[layout]
    if layout == "paged":
        table = torch.tensor([[3, 0], [1, 4]], dtype=torch.int32)
        k_cache, v_cache = (torch.full((5, page, kv_heads, dim), float("nan")) for _ in range(2))
        for b in range(batch):
            for i in range(2):
                part = slice(page * i, page * i + page)
                k_cache[table[b, i]], v_cache[table[b, i]] = k_full[b, part], v_full[b, part]
        options = dict(block_table=table)
    else:
        index = (
            torch.tensor([2, 0], dtype=torch.int32)
            if layout == "batch_idx"
            else torch.arange(2, dtype=torch.int32)
        )
        k_cache, v_cache = (
            torch.full((3 if layout == "batch_idx" else 2, 32, kv_heads, dim), float("nan")) for _ in range(2)
        )
        k_cache[index.long()], v_cache[index.long()] = k_full, v_full
        options = dict(cache_batch_idx=index) if layout == "batch_idx" else {}
    pad = torch.tensor([2, 0], dtype=torch.int32) if leftpad else None
    out, lse = attnspan.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        k_new,
        v_new,
        cos,
        sin,
        cache_seqlens=lengths,
        cache_leftpad=pad,
        causal=causal,
        rotary_interleaved=interleaved,
        return_softmax_lse=True,
        **options,
    )

    for b in range(batch):
        start = int(lengths[b])
        steps = start + torch.arange(seqlen)[None]
        k_row, v_row = (
            k_full[b : b + 1, : start + seqlen].double(),
            v_full[b : b + 1, : start + seqlen].double(),
        )
        k_row[:, start:] = rotated(k_new[b : b + 1], cos, sin, steps, interleaved)
        v_row[:, start:] = v_new[b : b + 1]
        q_row = rotated(
            q[b : b + 1], cos, sin, steps if causal else torch.full_like(steps, start), interleaved
        )
        first = torch.full((seqlen,), int(pad[b])) if leftpad else None
        mask = allowed_keys(seqlen, start + seqlen, causal=causal, key_start=first)
        expected = reference(q_row, k_row, v_row, mask)
        torch.testing.assert_close(out[b : b + 1].double(), expected[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[b : b + 1].double(), expected[1], atol=1e-5, rtol=1e-5)
        if layout == "dense":
            torch.testing.assert_close(
                k_cache[b, start : start + seqlen].double(), k_row[0, start:], atol=1e-6, rtol=1e-6
            )


def test_kvcache_lengths_and_errors():
    q, cache = rand(2, 1, 2, 8), rand(2, 16, 2, 8, seed=1)
    whole = attnspan.flash_attn_with_kvcache(q, cache, cache)
    assert torch.equal(whole, attnspan.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=16))
    expected, _ = reference(q, cache[:, :4], cache[:, :4])
    torch.testing.assert_close(
        attnspan.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=4).double(),
        expected,
        atol=1e-5,
        rtol=1e-5,
    )
    new = rand(2, 1, 2, 8)
    cases = [
        (dict(k=new), "v"),
        (dict(k=new, v=new), "cache_seqlens"),
        (dict(k=new, v=new, cache_seqlens=16), "cache_seqlens"),
        (dict(rotary_cos=rand(4, 2), rotary_sin=rand(4, 2), cache_seqlens=2), "rotary_cos"),
    ]
    for wrong, argument in cases:
        with pytest.raises(attnspan.Error) as caught:
            attnspan.flash_attn_with_kvcache(q, cache.clone(), cache.clone(), **wrong)
        assert caught.value.argument == argument
    with pytest.raises(attnspan.Error, match="no gradient"):
        attnspan.flash_attn_with_kvcache(q.requires_grad_(), cache, cache)
