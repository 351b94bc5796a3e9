"""What a KV-cache format costs a real model: one command makes the table.

    python examples/smollm2/evaluate.py                 # perplexity, KL divergence, same top token: 20,470 predictions each
    python examples/smollm2/evaluate.py --decode        # tokens/s of decoding at a context of 8192
    python examples/smollm2/evaluate.py --layers        # the error that tbq4 makes in each layer's attention
    python examples/smollm2/evaluate.py --table         # the tables of what was measured

Windows of 2048 tokens are spread over the book; every token of a window attends to keys and values that were read back
from the cache, the last one included. Results go to bench/results/smollm2.json window by window: a run that was stopped
goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import platform
import statistics
import time

import assets
import torch

import attnspan.transformers
from attnspan.transformers import AttnspanCache, AttnspanLayer, cache_keyword

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "bench" / "results" / "smollm2.json"
WINDOW, WINDOWS = 2048, 10
DECODE_CONTEXT, DECODE_STEPS = 8192, 22  # of the steps the first two warm up


SETTINGS = {
    "f16/f16": dict(k_format="f16", v_format="f16"),
    "q8/q8": dict(k_format="q8", v_format="q8"),
    "q8/tbq4": dict(k_format="q8", v_format="tbq4"),
    "tbq4/tbq4": dict(k_format="tbq4", v_format="tbq4"),
    "tbq4/tbq4 + 64 first tokens f16": dict(k_format="tbq4", v_format="tbq4", first_tokens=64),
    "tbq4/tbq4 + key offsets": dict(k_format="tbq4", v_format="tbq4"),
    "tbq4/tbq4 + key offsets + 64 first tokens f16": dict(k_format="tbq4", v_format="tbq4", first_tokens=64),
    "tbq4/q8": dict(k_format="tbq4", v_format="q8"),
}


def make_cache(name: str, offsets: list[torch.Tensor], **options):
    if "offsets" in name:
        options["key_offsets"] = offsets
    return AttnspanCache(**SETTINGS[name], **options)


def with_cache(model, cache) -> dict:
    return {cache_keyword(model): cache}


def load_results() -> dict:
    return (
        json.loads(RESULTS.read_text()) if RESULTS.exists() else {"windows": {}, "decode": {}, "layers": {}}
    )


def keep_results(results: dict) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def windows_of(tokens: torch.Tensor) -> list[torch.Tensor]:
    """WINDOWS windows spread evenly over the book; the last tokens of the book are left for calibration."""
    stride = (len(tokens) - 2 * WINDOW) // WINDOWS
    return [tokens[i * stride : i * stride + WINDOW] for i in range(WINDOWS)]


def key_offsets(model, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The mean key of each layer and KV head, over the last window of the book, which is not evaluated."""
    kept = assets.FOLDER / "key_offsets.pt"
    if not kept.exists():
        torch.save(attnspan.transformers.mean_keys(model, tokens[None, -WINDOW:]), kept)
    return torch.load(kept, weights_only=True)


def log_probs(model, window: torch.Tensor, cache) -> torch.Tensor:
    logits = model(window[None], **with_cache(model, cache), use_cache=True).logits[0, :-1]
    return torch.log_softmax(logits.float(), dim=-1)


def compare(exact: torch.Tensor, found: torch.Tensor, window: torch.Tensor) -> dict[str, float]:
    """Sums over the predictions of a window: negative log likelihood, KL(exact || found), equal top tokens."""
    nll = -found.gather(1, window[1:, None]).sum().item()
    kl = sum((p.exp() * (p - q)).sum().item() for p, q in zip(exact.split(256), found.split(256)))
    same = (exact.argmax(-1) == found.argmax(-1)).sum().item()
    return {"predictions": len(window) - 1, "nll": nll, "kl": kl, "same_top": same}


def evaluate(model, tokens: torch.Tensor, results: dict) -> None:
    offsets = key_offsets(model, tokens)
    for index, window in enumerate(windows_of(tokens)):
        row = results["windows"].setdefault(str(index), {})
        missing = [name for name in SETTINGS if name not in row]
        if not missing:
            continue
        exact = log_probs(model, window, make_cache("f16/f16", offsets))
        for name in missing:
            start = time.time()
            found = exact if name == "f16/f16" else log_probs(model, window, make_cache(name, offsets))
            row[name] = compare(exact, found, window)
            print(
                f"window {index}, {name}: nll {row[name]['nll'] / len(found):.4f}, "
                f"kl {row[name]['kl'] / len(found):.5f}, {time.time() - start:.0f} s",
                flush=True,
            )
            keep_results(results)


class CapturingCache(AttnspanCache):
    """An f32 cache that keeps what each layer appended and asked."""

    def __init__(self) -> None:
        super().__init__("f32", "f32")
        self.states: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.queries: list[tuple[torch.Tensor, dict]] = []

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.states.append((key_states, value_states))
        rows = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        layer, attend = self.layers[layer_idx], self.layers[layer_idx].attend

        def captured(query, **options):
            self.queries.append((query, options))
            return attend(query, **options)

        layer.attend = captured
        return rows


def evaluate_layers(model, tokens: torch.Tensor, results: dict) -> None:
    """Where the error comes from: the relative error of each layer's attention output, with exact inputs, when its keys,
    its values or both are in tbq4, and when key offsets help the keys. The first 512 tokens of a window."""
    offsets, source = key_offsets(model, tokens), CapturingCache()
    window = windows_of(tokens)[0][None, :512]
    model(window, **with_cache(model, source), use_cache=True, logits_to_keep=1)
    settings = {
        "keys": ("tbq4", "f32", False),
        "values": ("f32", "tbq4", False),
        "both": ("tbq4", "tbq4", False),
        "keys with offsets": ("tbq4", "f32", True),
    }
    for index, ((keys, values), (query, options)) in enumerate(zip(source.states, source.queries)):
        exact, row = source.layers[index].cache.forward(query.transpose(1, 2), **options)[0], {}
        for name, (k_format, v_format, shifted) in settings.items():
            layer = AttnspanLayer(
                offsets[index] if shifted else None, key_format=k_format, value_format=v_format
            )
            layer.update(keys, values)
            row[name] = ((layer.attend(query, **options) - exact).norm() / exact.norm()).item()
        results["layers"][str(index)] = row
    keep_results(results)


def layer_table(results: dict) -> str:
    """Markdown: per cent, for every layer."""
    names = ("keys", "values", "both", "keys with offsets")
    lines = ["| layer | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    lines += [
        f"| {index} | " + " | ".join(f"{100 * row[name]:.1f}%" for name in names) + " |"
        for index, row in results["layers"].items()
    ]
    return "\n".join(lines)


def machine() -> str:
    """The processor's name, and how many cores of it there are."""
    text = pathlib.Path("/proc/cpuinfo").read_text() if pathlib.Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def decode_speed(model, results: dict) -> None:
    """Tokens/s at a context of 8192 random keys and values: reading them takes as long as reading any others. The share of
    attention is timed inside the same steps; medians."""
    config, generator = model.config, torch.Generator().manual_seed(1)
    shape = (1, config.num_key_value_heads, DECODE_CONTEXT, config.head_dim)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    attend, spent = attnspan.transformers.AttnspanLayer.attend, [0.0]

    def timed(self, *args, **kwargs):
        start = time.perf_counter()
        out = attend(self, *args, **kwargs)
        spent[0] += time.perf_counter() - start
        return out

    attnspan.transformers.AttnspanLayer.attend = timed
    for name in list(SETTINGS)[:5]:
        cache = make_cache(name, [], reserve_tokens=DECODE_CONTEXT + DECODE_STEPS, encode_mode="fast")
        for layer in range(config.num_hidden_layers):
            cache.update(keys, values, layer)
        steps = []
        for step in range(DECODE_STEPS):
            spent[0], start = 0.0, time.perf_counter()
            model(torch.tensor([[step + 5]]), **with_cache(model, cache), use_cache=True)
            steps.append((time.perf_counter() - start, spent[0]))
        whole, attention = (statistics.median(column) for column in zip(*steps[2:]))
        memory = [layer.cache.memory() for layer in cache.layers]
        results["decode"][name] = {
            "tokens_per_second": 1 / whole,
            "attention_ms": 1e3 * attention,
            "context": DECODE_CONTEXT,
            "bytes_per_token": sum(m["bytes_per_token"] for m in memory),
            "first_bytes_per_token": sum(m["first_bytes_per_token"] for m in memory),
            "threads": torch.get_num_threads(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": machine(),
        }
        print(name, results["decode"][name], flush=True)
        kept = load_results()
        kept["decode"] = results["decode"]
        keep_results(kept)


def bytes_per_token(name: str) -> int:
    """Of all layers, behind the first tokens. SmolLM2-135M: 30 layers, 3 KV heads, head_dim 64."""
    formats = {"key_format": SETTINGS[name]["k_format"], "value_format": SETTINGS[name]["v_format"]}
    return 30 * attnspan.KvCache(kv_heads=3, head_dim=64, **formats).memory()["bytes_per_token"]


def table(results: dict) -> str:
    """Markdown. Each setting is compared with f16 over the windows that it was measured on."""
    lines = [
        "| K/V | predictions | bytes a token | perplexity | over f16 | KL, nats | same top token | decode, tokens/s | "
        "attention, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]

    def total(name: str, key: str, rows: list[dict]) -> float:
        return sum(row[name][key] for row in rows)

    for name in SETTINGS:
        rows = [row for row in results["windows"].values() if name in row and "f16/f16" in row]
        if not rows:
            continue
        count = total(name, "predictions", rows)
        perplexity = math.exp(total(name, "nll", rows) / count)
        over = math.exp((total(name, "nll", rows) - total("f16/f16", "nll", rows)) / count) - 1
        speed = results["decode"].get(name)
        cells = [
            name,
            str(count),
            str(bytes_per_token(name)),
            f"{perplexity:.3f}",
            f"{100 * over:+.2f}%",
            f"{total(name, 'kl', rows) / count:.5f}",
            f"{100 * total(name, 'same_top', rows) / count:.2f}%",
        ]
        cells += [f"{speed['tokens_per_second']:.1f}", f"{speed['attention_ms']:.1f}"] if speed else ["", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for flag in ("decode", "layers", "table"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args()
    results = load_results()
    if not options.table:
        attnspan.transformers.register()
        model, tokenizer = assets.load_model("attnspan")
        with torch.inference_mode():
            if options.decode:
                decode_speed(model, results)
            else:
                tokens = torch.tensor(tokenizer(assets.book_text())["input_ids"])
                (evaluate_layers if options.layers else evaluate)(model, tokens, results)
    print(layer_table(results) if options.layers else table(results))


if __name__ == "__main__":
    main()
