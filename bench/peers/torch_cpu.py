#!/usr/bin/env python3
"""attnspan beside PyTorch's scaled_dot_product_attention, on the CPU, on the same tensors in the same run.

    pip install torch            # from PyPI; and attnspan's own wheel: pip install .
    python bench/peers/torch_cpu.py [--threads N] [--seconds S] [--json FILE] [PHASE ...]

Every case is first checked: the two results may differ by rounding only. Then calls of the two alternate, so
that whatever else the machine does falls on both, and medians are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Callable

import attnspan
import torch
import torch.nn.functional as functional


@dataclass(frozen=True)
class Case:
    phase: str  # forward, backward or decode
    rows: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "float32"
    causal: bool = True
    batch: int = 1

    def text(self) -> str:
        mask = ", causal" if self.causal and self.rows > 1 else ""
        return (
            f"{self.batch} x {self.rows} x {self.tokens}, {self.heads}/{self.kv_heads} heads, {self.head_dim}, "
            f"{self.dtype}{mask}"
        )


CASES = [
    *(Case("forward", n, n, 8, 8, d) for d in (64, 128) for n in (1024, 4096)),
    Case("forward", 4096, 4096, 8, 8, 128, causal=False),
    Case("forward", 2048, 2048, 8, 8, 128, dtype="bfloat16"),
    Case("forward", 2048, 2048, 28, 4, 128),
    *(Case("forward", n, n, 8, 8, 128, batch=8) for n in (8, 32, 64)),
    *(Case("backward", 2048, 2048, 8, 8, d) for d in (64, 128)),
    *(Case("decode", 1, 16384, 8 * group, 8, 128, dtype) for dtype in ("float32", "bfloat16") for group in (1, 4)),
    Case("decode", 1, 16384, 32, 8, 128, "float16"),
]

# What both may be off by: a few units of rounding of values near 1.
TOLERANCE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}


def calls_of(case: Case) -> tuple[Callable[[], list[torch.Tensor]], Callable[[], list[torch.Tensor]]]:
    """attnspan's call and PyTorch's, on the same tensors; each returns what it computed."""
    generator = torch.Generator().manual_seed(1)
    dtype = getattr(torch, case.dtype)
    training = case.phase == "backward"

    def tensor(heads: int, length: int) -> torch.Tensor:
        values = torch.randn(case.batch, heads, length, case.head_dim, generator=generator)
        return values.to(dtype).requires_grad_(training)

    query = tensor(case.heads, case.rows)
    key, value = (tensor(case.kv_heads, case.tokens) for _ in range(2))
    dout = torch.randn(query.shape, generator=generator).to(dtype)
    options = {"is_causal": case.causal and case.rows > 1}
    if case.heads != case.kv_heads:
        options["enable_gqa"] = True

    def with_function(function: Callable[..., torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        if not training:
            return lambda: [function(query, key, value, **options)]

        def step() -> list[torch.Tensor]:
            out = function(query, key, value, **options)
            return [out, *torch.autograd.grad(out, (query, key, value), dout)]

        return step

    return with_function(attnspan.scaled_dot_product_attention), with_function(functional.scaled_dot_product_attention)


def difference(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest value of each tensor."""
    return max(
        ((a.float() - b.float()).abs().max() / b.float().abs().max()).item() for a, b in zip(ours, theirs)
    )


def alternate(calls: tuple[Callable[[], object], ...], seconds: float) -> list[float]:
    """Medians of the calls, taken in turn until the time is over (5 times at least)."""
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while len(times[0]) < 5 or time.perf_counter() < end:
        for call, taken in zip(calls, times):
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
    return [statistics.median(taken) for taken in times]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phases", nargs="*", metavar="PHASE", help="forward, backward or decode (default: all)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of PyTorch (default: its own choice)")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each case (default: 2)")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    if unknown := set(arguments.phases) - {"forward", "backward", "decode"}:
        parser.error(f"found '{unknown.pop()}', expected forward, backward or decode")
    torch.set_num_threads(arguments.threads)

    print(f"PyTorch {torch.__version__}, {arguments.threads} threads; attnspan {attnspan.__version__}\n")
    print(f"{'phase':9} {'problem':58} {'attnspan':>11} {'PyTorch':>11} {'faster':>8}")
    rows = []
    for case in CASES:
        if arguments.phases and case.phase not in arguments.phases:
            continue
        calls = calls_of(case)
        error = difference(calls[0](), calls[1]())
        if not error <= TOLERANCE[case.dtype]:
            print(f"{case.phase:9} {case.text():58} not timed: the results differ by {error:.1e}")
            rows.append({**asdict(case), "difference": error})
            continue
        ours, theirs = alternate(calls, arguments.seconds)
        print(f"{case.phase:9} {case.text():58} {1e3 * ours:8.2f} ms {1e3 * theirs:8.2f} ms {theirs / ours:6.2f} x")
        rows.append({**asdict(case), "difference": error, "attnspan_s": ours, "torch_s": theirs})
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"torch": torch.__version__, "threads": arguments.threads, "results": rows}, file, indent=1)
    return 1 if any("attnspan_s" not in row for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
