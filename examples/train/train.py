"""A small GPT learns to write a book, with attnspan's attention and with PyTorch's, from the same seed.

    python examples/train/train.py            # both runs, the packing check, loss.png and results.json

The two runs differ in one function. Each is a process of its own, so that its peak memory is its own. PyTorch's is the
"math" attention, which keeps seqlen x seqlen probabilities for the backward pass; attnspan keeps out and lse.
The text is the book of examples/smollm2/assets.py, read as bytes.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import attnspan
from attnspan.torch import attention

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "smollm2"))
LAYERS, HEADS, KV_HEADS, HEAD_DIM, WIDTH, SEQLEN, BATCH = 4, 4, 2, 32, 128, 512, 4


def attnspan_attention(query, key, value, **spans):
    return attention(query, key, value, causal=True, **spans)[0]


def torch_attention(query, key, value):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = F.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (query, key, value)), is_causal=True, enable_gqa=True
        )
    return out.transpose(1, 2)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, HEADS * HEAD_DIM)
        self.key_value = nn.Linear(WIDTH, 2 * KV_HEADS * HEAD_DIM)
        self.project = nn.Linear(HEADS * HEAD_DIM, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x, attend, spans):
        normed = self.before_attention(x)
        query = self.query(normed).unflatten(-1, (HEADS, HEAD_DIM))
        key, value = self.key_value(normed).unflatten(-1, (2, KV_HEADS, HEAD_DIM)).unbind(-3)
        x = x + self.project(attend(query, key, value, **spans).flatten(-2))
        return x + self.mlp(self.before_mlp(x))


class Gpt(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(SEQLEN, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last_norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens, attend, positions=None, **spans):
        positions = torch.arange(tokens.shape[1]) if positions is None else positions
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x, attend, spans)
        return self.head(self.last_norm(x))


def load_bytes() -> torch.Tensor:
    import assets

    return torch.tensor(list(assets.book_text().encode()), dtype=torch.long)


def train(kind: str, steps: int) -> dict:
    """The losses of a run, its seconds and the peak memory that training added."""
    torch.manual_seed(7)
    model, text = Gpt(), load_bytes()
    attend = attnspan_attention if kind == "attnspan" else torch_attention
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    losses, start = [], time.time()
    for step in range(steps):
        starts = torch.randint(0, len(text) - SEQLEN - 1, (BATCH,), generator=generator)
        rows = torch.stack([text[s : s + SEQLEN + 1] for s in starts])
        loss = F.cross_entropy(model(rows[:, :-1], attend).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if sys.stderr.isatty():
            print(f"\r{kind}: step {step + 1}/{steps}, loss {losses[-1]:.4f}", end="", file=sys.stderr)
    added = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"losses": losses, "seconds": time.time() - start, "peak_mb": added / 1024}


def packing_check() -> dict:
    """Documents of unequal lengths, packed into one row with key_start and padded to the longest: one loss, one gradient."""
    torch.manual_seed(9)
    model, text = Gpt(), load_bytes()
    lengths = [37, 150, 5, 210, 1, 109]  # 512 together
    starts = torch.tensor([0, *lengths]).cumsum(0)
    packed, targets = text[:SEQLEN][None], text[1 : SEQLEN + 1][None]
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    key_start = starts[document]
    positions = torch.arange(SEQLEN) - key_start
    packed_loss = F.cross_entropy(
        model(packed, attnspan_attention, positions, key_start=key_start.int()).flatten(0, 1),
        targets.flatten(),
    )
    packed_loss.backward()
    packed_grads = [parameter.grad.clone() for parameter in model.parameters()]

    rows, row_targets = (
        torch.zeros(len(lengths), max(lengths), dtype=torch.long),
        torch.full((len(lengths), max(lengths)), -100),
    )
    for row, (length, start) in enumerate(zip(lengths, starts)):
        rows[row, :length], row_targets[row, :length] = (
            packed[0, start : start + length],
            targets[0, start : start + length],
        )
    model.zero_grad()
    padded_loss = F.cross_entropy(model(rows, attnspan_attention).flatten(0, 1), row_targets.flatten())
    padded_loss.backward()
    differences = [
        (p.grad - g).abs().max().item() / (g.abs().max().item() + 1e-12)
        for p, g in zip(model.parameters(), packed_grads)
    ]
    return {
        "packed_loss": packed_loss.item(),
        "padded_loss": padded_loss.item(),
        "largest_relative_gradient_difference": max(differences),
        "packed_tokens": SEQLEN,
        "padded_tokens": rows.numel(),
    }


def plot(results: dict) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ours, theirs = results["attnspan"], results["torch"]
    figure, (top, bottom) = pyplot.subplots(
        2, 1, figsize=(7, 5.5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    top.plot(
        theirs["losses"],
        color="#d98c3f",
        linewidth=4,
        alpha=0.6,
        label=f"PyTorch math, {theirs['peak_mb']:.0f} MB",
    )
    top.plot(ours["losses"], color="#1f4e79", linewidth=1.2, label=f"attnspan, {ours['peak_mb']:.0f} MB")
    top.set_ylabel("loss, nats a byte")
    top.set_title(
        f"A {LAYERS}-layer GPT from one seed, {SEQLEN} bytes x {BATCH} a step; MB: peak that training adds",
        fontsize=10,
    )
    top.legend(frameon=False)
    difference = [abs(a - b) for a, b in zip(ours["losses"], theirs["losses"])]
    bottom.plot(difference, color="#444444", linewidth=1)
    bottom.set_ylabel("|difference|")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "loss.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", choices=("attnspan", "torch", "packing"))
    options = parser.parse_args()
    if options.only:
        result = packing_check() if options.only == "packing" else train(options.only, options.steps)
        print(json.dumps(result))
        return
    results = {}
    for kind in ("attnspan", "torch", "packing"):
        command = [sys.executable, __file__, "--only", kind, "--steps", str(options.steps)]
        results[kind] = json.loads(
            subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
        )
    results["backend"] = attnspan.backends()[0]
    (HERE / "results.json").write_text(json.dumps(results) + "\n")
    plot(results)
    ours, theirs, packing = results["attnspan"], results["torch"], results["packing"]
    largest = max(abs(a - b) for a, b in zip(ours["losses"], theirs["losses"]))
    print(
        f"loss {ours['losses'][0]:.4f} -> {ours['losses'][-1]:.4f} (attnspan), {theirs['losses'][-1]:.4f} (PyTorch); "
        f"largest difference {largest:.2e}"
    )
    print(
        f"peak memory that training adds: {ours['peak_mb']:.0f} MB (attnspan), {theirs['peak_mb']:.0f} MB (PyTorch); "
        f"{ours['seconds']:.0f} s and {theirs['seconds']:.0f} s"
    )
    print(
        f"packed {packing['packed_loss']:.6f} in {packing['packed_tokens']} tokens, padded {packing['padded_loss']:.6f} in "
        f"{packing['padded_tokens']}; largest relative difference of a gradient "
        f"{packing['largest_relative_gradient_difference']:.1e}"
    )


if __name__ == "__main__":
    main()
