#!/usr/bin/env python3
"""Makes tests/golden/*.safetensors: the contract of attention.hpp, computed by an independent implementation.

PyTorch on the CPU in float64: an explicit mask built entry by entry from the words of the contract, a plain
softmax, and autograd for the gradients. Nothing here knows of key spans, tiles or online softmax.

Inputs are multiples of 1/32 with seven significant bits at most, so the same numbers are exact in f32, f16 and
bf16 and one file tests all three. Inputs are stored in f16, results in f32. The options of a case are in the
file's metadata under the names of the command's flags.

    python3 -m venv ~/golden && ~/golden/bin/pip install torch safetensors
    ~/golden/bin/python tools/make_golden.py --out tests/golden
"""

import argparse
import math
import pathlib

import torch
from safetensors.torch import save_file

MASKING_BIAS = -1e30


def grid(generator, *shape, limit=64):
    """Random multiples of 1/32 in [-limit / 32, limit / 32]."""
    return torch.randint(-limit, limit + 1, shape, generator=generator).double() / 32


def diagonal_offset(options, seqlen_q, seqlen_k):
    diagonal = options.get("diagonal", "bottom-right")
    return {"bottom-right": seqlen_k - seqlen_q, "top-left": 0}.get(diagonal, None) if isinstance(
        diagonal, str) else diagonal


def allowed(options, seqlen_q, seqlen_k, key_start, key_end):
    """The mask of one sequence, one entry at a time."""
    offset = diagonal_offset(options, seqlen_q, seqlen_k)
    left, right = options.get("window", (-1, -1))
    mask = torch.zeros(seqlen_q, seqlen_k, dtype=torch.bool)
    for i in range(seqlen_q):
        for j in range(seqlen_k):
            ok = True
            if options.get("causal") and j > i + offset:
                ok = False
            if left != -1 and j < i + offset - left:
                ok = False
            if right != -1 and j > i + offset + right:
                ok = False
            if key_start is not None and j < key_start[i]:
                ok = False
            if key_end is not None and j >= key_end[i]:
                ok = False
            mask[i, j] = ok
    return mask


def attend(query, key, value, options, sides, batch):
    """One sequence: query [seqlen_q, heads, dim] -> out [seqlen_q, heads, dim_v], lse [heads, seqlen_q]."""
    seqlen_q, heads, head_dim = query.shape
    seqlen_k, kv_heads, _ = key.shape
    offset = diagonal_offset(options, seqlen_q, seqlen_k)
    scale = options.get("scale") or 1 / math.sqrt(head_dim)

    def of_batch(name):
        side = sides.get(name)
        return None if side is None else (side if side.dim() == 1 else side[batch])

    mask = allowed(options, seqlen_q, seqlen_k, of_batch("key_start"), of_batch("key_end"))
    distance = (torch.arange(seqlen_q)[:, None] + offset - torch.arange(seqlen_k)[None, :]).abs().double()
    outs, lses = [], []
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        logits = scale * (query[:, head] @ key[:, kv_head].T)
        if "softcap" in options:
            logits = options["softcap"] * torch.tanh(logits / options["softcap"])
        head_mask = mask
        if "bias" in sides:
            bias = sides["bias"].expand(max(batch + 1, sides["bias"].shape[0]), heads, seqlen_q, seqlen_k)[
                batch, head]
            head_mask = mask & (bias > MASKING_BIAS)
            logits = logits + torch.where(head_mask, bias, 0.0)
        if "alibi" in sides:
            logits = logits - of_batch("alibi")[head] * distance
        logits = logits.masked_fill(~head_mask, -math.inf)
        if "sinks" in sides:
            logits = torch.cat([logits, sides["sinks"][head].expand(seqlen_q, 1)], dim=1)
        empty = torch.isinf(logits).all(dim=1)  # also right for no column at all
        safe = torch.where(empty[:, None], 0.0, logits)
        if safe.shape[1] == 0:
            outs.append(torch.zeros(seqlen_q, value.shape[2], dtype=torch.float64))
            lses.append(torch.full((seqlen_q,), -math.inf, dtype=torch.float64))
            continue
        probs = torch.softmax(safe, dim=1)[:, :seqlen_k]
        outs.append(torch.where(empty[:, None], 0.0, probs @ value[:, kv_head]))
        lses.append(torch.where(empty, -math.inf, torch.logsumexp(safe, dim=1)))
    return torch.stack(outs, dim=1), torch.stack(lses)


def run(query, key, value, options, sides):
    """The whole batch, dense or packed."""
    if "cu_seqlens_q" not in sides:
        parts = [attend(query[b], key[b], value[b], options, sides, b) for b in range(query.shape[0])]
        return torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts])
    starts_q, starts_k = sides["cu_seqlens_q"].tolist(), sides["cu_seqlens_k"].tolist()
    parts = []
    for b in range(len(starts_q) - 1):
        rows, keys = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        if rows.start < rows.stop:
            parts.append(attend(query[rows], key[keys], value[keys], options, sides, b))
    return torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts], dim=1)


def make_case(name, shape, options, side_maker, want):
    generator = torch.Generator().manual_seed(sum(name.encode()) * 7919)
    batch, seqlen_q, seqlen_k, heads, kv_heads, dim, dim_v = shape
    lead_q, lead_k = ((batch, seqlen_q), (batch, seqlen_k)) if batch else ((seqlen_q,), (seqlen_k,))
    if options.pop("integers", False):  # exact products: huge logits without rounding
        query, key = (32 * grid(generator, *lead, h, dim, limit=8)
                      for lead, h in ((lead_q, heads), (lead_k, kv_heads)))
    else:
        query, key = grid(generator, *lead_q, heads, dim), grid(generator, *lead_k, kv_heads, dim)
    value = grid(generator, *lead_k, kv_heads, dim_v)
    sides = side_maker(generator) if side_maker else {}

    inputs = [query, key, value] + ([sides["sinks"]] if "sinks" in sides else [])
    for tensor in inputs:
        tensor.requires_grad_(True)
    out, lse = run(query, key, value, options, sides)
    kept = {"query": query.half(), "key": key.half(), "value": value.half(), "out": out.float(), "lse": lse.float()}
    for side, tensor in sides.items():
        kept[side] = tensor.float() if tensor.dtype == torch.float64 else tensor
    if "backward" in want:
        dout = grid(generator, *out.shape)
        kept["dout"] = dout.half()
        loss = (out * dout).sum()
        if "dlse" in want:
            dlse = grid(generator, *lse.shape)
            kept["dlse"] = dlse.float()
            loss = loss + torch.where(torch.isinf(lse), 0.0, lse * dlse).sum()
        grads = torch.autograd.grad(loss, inputs, allow_unused=True) if loss.requires_grad else [None] * 4
        for grad_name, tensor, grad in zip(("dq", "dk", "dv", "d_sinks"), inputs, grads):
            kept[grad_name] = (torch.zeros_like(tensor) if grad is None else grad).float()
    for tensor_name, tensor in kept.items():
        assert not torch.isnan(tensor.float()).any(), (name, tensor_name)
    metadata = {}
    for option, setting in options.items():
        metadata[option] = ",".join(map(str, setting)) if isinstance(setting, tuple) else str(setting).lower()
    return {k: t.detach().contiguous() for k, t in kept.items()}, metadata


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def documents(*lengths):
    """key_start and key_end of packed documents."""
    starts, ends, position = [], [], 0
    for length in lengths:
        starts += [position] * length
        ends += [position + length] * length
        position += length
    return {"key_start": int32(*starts), "key_end": int32(*ends)}


def padded_batch(_):
    """Keys of sequence 0 padded on the left by 5, of sequence 1 on the right by 7."""
    start = torch.stack([int32(*[5] * 17), int32(*[0] * 17)])
    end = torch.stack([int32(*[17] * 17), int32(*[10] * 17)])
    return {"key_start": start, "key_end": end}


def tree_bias(generator):
    """A random mask, as speculative decoding's token trees make, in -inf and in -1e30; row 3 sees nothing."""
    bias = grid(generator, 1, 1, 11, 19)
    bias[torch.rand(bias.shape, generator=generator) < 0.3] = -math.inf
    bias[torch.rand(bias.shape, generator=generator) < 0.2] = MASKING_BIAS
    bias[0, 0, 3] = -math.inf
    return {"bias": bias}


# name: (batch (0 = packed), seqlen_q, seqlen_k, heads, kv_heads, head_dim, head_dim_v), options, sides, results
BOTH = ("backward",)
CASES = {
    "full_mha": ((2, 19, 23, 3, 3, 16, 16), {}, None, BOTH),
    "causal_gqa3": ((1, 29, 29, 9, 3, 8, 8), {"causal": True}, None, BOTH),
    "causal_mqa": ((2, 17, 17, 5, 1, 12, 12), {"causal": True}, None, BOTH),
    "causal_bottom_right_long_k": ((1, 13, 31, 2, 2, 16, 16), {"causal": True}, None, BOTH),
    "causal_bottom_right_empty_rows": ((1, 31, 13, 2, 1, 16, 16), {"causal": True}, None, BOTH),
    "causal_top_left": ((1, 13, 31, 2, 2, 16, 16), {"causal": True, "diagonal": "top-left"}, None, BOTH),
    "causal_diagonal_7": ((1, 17, 31, 2, 1, 16, 16), {"causal": True, "diagonal": 7}, None, BOTH),
    "causal_diagonal_minus_5": ((1, 17, 31, 2, 1, 16, 16), {"causal": True, "diagonal": -5}, None, BOTH),
    "window_causal": ((1, 41, 41, 2, 1, 16, 16), {"causal": True, "window": (5, -1)}, None, BOTH),
    "window_two_sided": ((1, 41, 37, 2, 1, 16, 16), {"window": (4, 3)}, None, BOTH),
    "window_right_only": ((1, 23, 29, 2, 1, 16, 16), {"window": (-1, 2)}, None, BOTH),
    "window_self_only": ((1, 23, 23, 2, 1, 16, 16), {"window": (0, 0)}, None, BOTH),
    "window_past_the_keys": ((1, 37, 13, 2, 1, 16, 16), {"window": (4, 4), "diagonal": "top-left"}, None, BOTH),
    "documents": ((1, 37, 37, 4, 2, 16, 16), {"causal": True}, lambda g: documents(3, 1, 20, 13), BOTH),
    "documents_both_ways": ((2, 24, 24, 2, 1, 16, 16), {}, lambda g: documents(7, 17), BOTH),
    "padded_batch": ((2, 17, 17, 2, 1, 16, 16), {"causal": True}, padded_batch, BOTH),
    "prefix_lm": ((1, 21, 21, 2, 1, 16, 16), {}, lambda g: {"key_end": int32(*[max(9, i + 1) for i in range(21)])},
                  BOTH),
    "softcap": ((1, 23, 23, 2, 1, 16, 16), {"causal": True, "softcap": 1.5}, None, BOTH),
    "softcap_window_documents_gqa": ((2, 37, 37, 6, 2, 8, 8), {"causal": True, "softcap": 2.0, "window": (6, -1)},
                                     lambda g: documents(11, 26), BOTH),
    "alibi": ((2, 19, 23, 4, 2, 16, 16), {"causal": True},
              lambda g: {"alibi": torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)}, BOTH),
    "alibi_per_batch": ((2, 19, 23, 2, 1, 16, 16), {},
                        lambda g: {"alibi": torch.tensor([[0.5, 0.25], [0.0, 0.75]], dtype=torch.float64)}, BOTH),
    "bias_full": ((2, 11, 19, 2, 1, 16, 16), {}, lambda g: {"bias": grid(g, 2, 2, 11, 19)}, BOTH),
    "bias_per_key": ((2, 11, 19, 2, 2, 16, 16), {"softcap": 3.0}, lambda g: {"bias": grid(g, 1, 2, 1, 19)}, BOTH),
    "bias_tree": ((2, 11, 19, 4, 1, 16, 16), {}, tree_bias, BOTH),
    "sinks": ((2, 19, 19, 4, 2, 16, 16), {"causal": True}, lambda g: {"sinks": grid(g, 4)}, BOTH),
    "sinks_empty_rows": ((1, 19, 7, 4, 2, 16, 16), {"causal": True}, lambda g: {"sinks": grid(g, 4)}, BOTH),
    "packed": ((0, 41, 37, 4, 2, 16, 16), {"causal": True},
               lambda g: {"cu_seqlens_q": int32(0, 5, 5, 24, 25, 25, 41), "cu_seqlens_k": int32(0, 9, 9, 20, 20, 28, 37)},
               BOTH),
    "packed_window_softcap_sinks": ((0, 37, 37, 4, 2, 16, 16), {"window": (3, 2), "softcap": 2.0},
                                    lambda g: {"cu_seqlens_q": int32(0, 1, 20, 37), "cu_seqlens_k": int32(0, 1, 20, 37),
                                               "sinks": grid(g, 4)}, BOTH),
    "dims_24_40": ((1, 17, 19, 2, 1, 24, 40), {"causal": True}, None, BOTH),
    "dims_3_1": ((1, 17, 19, 2, 1, 3, 1), {"causal": True}, None, BOTH),
    "dims_192_128": ((1, 5, 9, 2, 1, 192, 128), {"causal": True}, None, BOTH),
    "dims_576_512": ((1, 3, 7, 4, 1, 576, 512), {"causal": True, "scale": 0.0625}, None, ()),
    "decode": ((3, 1, 61, 8, 2, 16, 16), {"causal": True}, None, ()),
    "decode_4_rows": ((1, 4, 61, 4, 1, 16, 16), {"causal": True, "window": (31, -1)}, None, ()),
    "no_keys": ((2, 7, 0, 2, 1, 16, 16), {}, None, BOTH),
    "one_key": ((2, 1, 1, 2, 1, 16, 16), {"causal": True}, None, BOTH),
    "scale": ((1, 17, 19, 2, 1, 16, 16), {"scale": 0.0625}, None, BOTH),
    "dlse": ((1, 23, 19, 2, 1, 16, 16), {"causal": True}, None, ("backward", "dlse")),
    # integers up to 8 times scale 4096: logits up to 1e6, exact in f32; every row is one-hot or an exact tie
    "huge_logits": ((1, 17, 19, 2, 1, 4, 8), {"scale": 4096.0, "integers": True}, None, ()),
    "everything": ((2, 23, 29, 4, 2, 16, 24),
                   {"causal": True, "window": (9, -1), "softcap": 2.5, "scale": 0.375, "diagonal": 4},
                   lambda g: {"key_start": int32(*[0] * 6 + [2] * 8 + [11] * 9), "sinks": grid(g, 4),
                              "alibi": torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64),
                              "bias": grid(g, 2, 1, 23, 29)}, ("backward", "dlse")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()
    total = 0
    for name, (shape, options, side_maker, want) in CASES.items():
        tensors, metadata = make_case(name, shape, dict(options), side_maker, want)
        path = args.out / f"{name}.safetensors"
        save_file(tensors, path, metadata)
        path.chmod(0o644)
        total += path.stat().st_size
    print(f"{len(CASES)} cases, {total} bytes")


if __name__ == "__main__":
    main()
