"""Attention of a real model from Python: NumPy, and PyTorch and Transformers where they are there.

    ./dev python                       # builds the package into .venv, then runs this
    python examples/python/demo.py     # where attnspan is installed

Three layers of SmolLM2-135M (examples/data), 401 tokens each, causal. Every line says what was called, how long the call
took and how far its result is from a plain computation.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib
import sys
import time

import numpy as np

import attnspan

DATA = pathlib.Path(__file__).resolve().parents[1] / "data"
LAYERS = ("layer00_early", "layer14_middle", "layer29_late")
failed = False


def read_safetensors(path: pathlib.Path) -> dict[str, np.ndarray]:
    """f16 tensors of a safetensors file: eight bytes of length, a JSON header, the data. No copies."""
    data = np.memmap(path, np.uint8, "r")
    start = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8:start]))
    return {
        name: data[start:][slice(*entry["data_offsets"])].view("<f2").reshape(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def plain_attention(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Causal attention in double, with the whole matrix of probabilities."""
    query, key, value = (t.astype(np.float64).transpose(0, 2, 1, 3) for t in (query, key, value))
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat(group, 1), value.repeat(group, 1)
    scores = query @ key.transpose(0, 1, 3, 2) / np.sqrt(query.shape[-1])
    scores[..., np.triu(np.ones(scores.shape[-2:], bool), 1)] = -np.inf
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    return (probs / probs.sum(-1, keepdims=True) @ value).transpose(0, 2, 1, 3)


def relative_error(found, exact) -> float:
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def report(layer: str, what: str, call, exact, limit: float):
    """Runs a call, prints its line and returns its result."""
    call()  # the first call makes threads and buffers
    start = time.perf_counter()
    out = call()
    milliseconds = 1e3 * (time.perf_counter() - start)
    error = relative_error(out, exact)
    good = error < limit  # false for NaN
    print(f"  {layer:<15} {what:<58} {milliseconds:8.2f} ms   {error:.1e}{'' if good else '  WRONG'}")
    global failed
    failed |= not good
    return out


def with_numpy(layer: str, tensors: dict[str, np.ndarray], exact: np.ndarray) -> None:
    query, key, value = tensors["query"], tensors["key"], tensors["value"]
    report(
        layer, "attnspan.forward", lambda: attnspan.forward(query, key, value, causal=True)[0], exact, 1e-3
    )
    for formats, limit in ((("q8", "q8"), 0.03), (("q8", "tbq4"), 0.12)):
        cache = attnspan.KvCache(kv_heads=3, head_dim=64, key_format=formats[0], value_format=formats[1])
        cache.append(key, value)
        name = f"KvCache {formats[0]}/{formats[1]}, {cache.memory()['bytes_per_token']} bytes a token"
        report(layer, name, lambda c=cache: c.forward(query, causal=True)[0], exact, limit)


def with_torch(layer: str, tensors: dict[str, np.ndarray], exact: np.ndarray) -> None:
    import torch
    import torch.nn.functional as F

    leaves = [torch.from_numpy(tensors[name].astype(np.float32)) for name in ("query", "key", "value")]
    as_sdpa = [leaf.transpose(1, 2) for leaf in leaves]
    options = dict(is_causal=True, enable_gqa=True)
    ours, theirs = attnspan.scaled_dot_product_attention, F.scaled_dot_product_attention
    expected = theirs(*as_sdpa, **options)
    report(layer, "attnspan.scaled_dot_product_attention", lambda: ours(*as_sdpa, **options), expected, 1e-5)
    report(
        layer, "attnspan.flash_attn_func", lambda: attnspan.flash_attn_func(*leaves, causal=True), exact, 1e-5
    )

    def gradient(function):
        inputs = [tensor.detach().requires_grad_() for tensor in as_sdpa]
        return torch.autograd.grad(function(*inputs, **options).square().sum(), inputs)[1]

    report(layer, "its gradient, against PyTorch's (of key)", lambda: gradient(ours), gradient(theirs), 1e-4)


def with_transformers(layer: str, tensors: dict[str, np.ndarray], exact: np.ndarray) -> None:
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from attnspan.transformers import AttnspanCache, register

    register()
    query, key, value = (
        torch.from_numpy(tensors[name].copy()).transpose(1, 2) for name in ("query", "key", "value")
    )
    attend, module = ALL_ATTENTION_FUNCTIONS["attnspan"], torch.nn.Module()

    def step():
        cache = AttnspanCache(k_format="q8", v_format="tbq4")
        rows = cache.update(key, value, layer_idx=0)
        return attend(module, query, *rows, None, is_causal=True)[0]

    report(layer, "attn_implementation='attnspan', AttnspanCache q8/tbq4", step, exact, 0.12)


def main() -> int:
    parts = [with_numpy]
    for package, part in (("torch", with_torch), ("transformers", with_transformers)):
        if importlib.util.find_spec("torch") and importlib.util.find_spec(package):
            parts.append(part)
    found = [name for name in ("torch", "transformers") if importlib.util.find_spec(name)]
    print(
        f"attnspan {attnspan.__version__} in Python {sys.version.split()[0]} with numpy"
        + "".join(f", {n}" for n in found)
    )
    print(f"  {'layer':<15} {'call':<58} {'time':>11}   relative error")
    for layer in LAYERS:
        tensors = read_safetensors(DATA / f"smollm2_{layer}.safetensors")
        exact = plain_attention(tensors["query"], tensors["key"], tensors["value"])
        for part in parts:
            part(layer, tensors, exact)
    if len(parts) < 3:
        print(
            "  (PyTorch and Transformers get lines of their own where they are: pip install '.[transformers]')"
        )
    print(
        "Next: docs/python.md; python examples/smollm2/generate.py has the whole model talk (fetches 90 MB)"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
