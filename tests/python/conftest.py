"""What the tests share: attention by explicit masks in double precision, and random tensors."""

import math
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "2")

torch = pytest.importorskip("torch")


def allowed_keys(
    seqlen_q,
    seqlen_k,
    *,
    causal=False,
    diagonal="bottom-right",
    window_left=-1,
    window_right=-1,
    key_start=None,
    key_end=None,
    key_limit=None,
):
    """The mask [seqlen_q, seqlen_k] of one sequence, from the contract's definitions, key by key."""
    limit = seqlen_k if key_limit is None else key_limit
    offset = {"bottom-right": limit - seqlen_q, "top-left": 0}.get(diagonal, diagonal)
    row = torch.arange(seqlen_q)[:, None] + offset
    key = torch.arange(seqlen_k)[None, :]
    mask = (key < limit).expand(seqlen_q, seqlen_k).clone()
    if causal:
        mask &= key <= row
    if window_left >= 0:
        mask &= key >= row - window_left
    if window_right >= 0:
        mask &= key <= row + window_right
    if key_start is not None:
        mask &= key >= torch.as_tensor(key_start)[:, None]
    if key_end is not None:
        mask &= key < torch.as_tensor(key_end)[:, None]
    return mask


def reference(query, key, value, mask=None, *, softmax_scale=None, softcap=0.0, bias=None, sinks=None):
    """out and lse of [batch, seqlen, heads, dim] tensors in double, by a softmax over the whole matrix.

    mask is [..., seqlen_q, seqlen_k]; rows that see no key give 0 and -inf (with a sink: the sink).
    """
    query, key, value = (tensor.double().transpose(1, 2) for tensor in (query, key, value))
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * (softmax_scale or 1 / math.sqrt(query.shape[-1]))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.double()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        sink = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    lse = (
        torch.logsumexp(scores, dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)
    )
    shift = torch.where(torch.isinf(lse), torch.zeros_like(lse), lse)
    probs = torch.exp(scores - shift[..., None])
    if sinks is not None:
        probs = probs[..., :-1]
    return (probs @ value).transpose(1, 2), lse


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(20)
