"""What a KV-cache format costs a real model: one command makes the table.

    python examples/smollm2/evaluate.py                 # perplexity, KL divergence, same top token: 20,470 predictions
    python examples/smollm2/evaluate.py --decode        # tokens/s of decoding at a context of 8192
    python examples/smollm2/evaluate.py --layers        # the KL divergence when one layer alone is in tbq4/tbq4
    python examples/smollm2/evaluate.py --table         # the tables of what was measured

Windows of 2048 tokens are spread over the book; every token of a window attends to keys and values that were read back
from the cache, the last one included. Results go to bench/results/smollm2.json window by window: a run that was stopped
goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import time

import assets
import torch

import attnspan.transformers
from attnspan.transformers import AttnspanCache

RESULTS = pathlib.Path(__file__).resolve().parents[2] / "bench" / "results" / "smollm2.json"
WINDOW, WINDOWS = 2048, 10
SIDE_WINDOWS = 5  # windows on which the settings that are not offered, only tried, are measured
DECODE_CONTEXT, DECODE_STEPS = 8192, 12


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
TRIED = ("tbq4/tbq4 + key offsets", "tbq4/tbq4 + key offsets + 64 first tokens f16", "tbq4/q8")


def make_cache(name: str, offsets: list[torch.Tensor], **options):
    if "offsets" in name:
        options["key_offsets"] = offsets
    return AttnspanCache(**SETTINGS[name], **options)


def load_results() -> dict:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"windows": {}, "decode": {}, "layers": {}}


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


class ReadableCache(AttnspanCache):
    """An f16 cache that also keeps what was appended to it."""

    def __init__(self) -> None:
        super().__init__("f16", "f16")
        self.states: list[tuple[torch.Tensor, torch.Tensor]] = []

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.states.append((key_states, value_states))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def log_probs(model, window: torch.Tensor, cache) -> torch.Tensor:
    logits = model(window[None], past_key_values=cache, use_cache=True).logits[0, :-1]
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
        missing = [name for name in SETTINGS if name not in row and (name not in TRIED or index < SIDE_WINDOWS)]
        if not missing:
            continue
        exact = log_probs(model, window, make_cache("f16/f16", offsets))
        for name in missing:
            start = time.time()
            found = exact if name == "f16/f16" else log_probs(model, window, make_cache(name, offsets))
            row[name] = compare(exact, found, window)
            print(f"window {index}, {name}: nll {row[name]['nll'] / len(found):.4f}, "
                  f"kl {row[name]['kl'] / len(found):.5f}, {time.time() - start:.0f} s", flush=True)
            keep_results(results)


def evaluate_layers(model, tokens: torch.Tensor, results: dict) -> None:
    """One layer in tbq4/tbq4, the others in f16: where the error comes from. The first 1024 tokens of a window."""
    window = windows_of(tokens)[0][:1024]
    exact = log_probs(model, window, AttnspanCache("f16", "f16"))
    for layer in range(model.config.num_hidden_layers):
        if str(layer) in results["layers"]:
            continue
        found = log_probs(model, window, AttnspanCache("f16", "f16", layer_formats={layer: ("tbq4", "tbq4")}))
        row = compare(exact, found, window)
        results["layers"][str(layer)] = {"kl": row["kl"] / row["predictions"], "nll": row["nll"] / row["predictions"]}
        keep_results(results)


def decode_speed(model, tokens: torch.Tensor, results: dict) -> None:
    """Tokens/s at a context of 8192, whose keys and values are those of one window, four times over: reading them takes
    the same time as reading any others. The share of attention is timed inside the same steps."""
    window = windows_of(tokens)[0]
    source = ReadableCache()
    model(window[None], past_key_values=source, use_cache=True, logits_to_keep=1)
    attend = attnspan.transformers.AttnspanLayer.attend
    spent = [0.0]

    def timed(self, *args, **kwargs):
        start = time.perf_counter()
        out = attend(self, *args, **kwargs)
        spent[0] += time.perf_counter() - start
        return out

    attnspan.transformers.AttnspanLayer.attend = timed
    offsets = [torch.zeros(keys.shape[1], keys.shape[3]) for keys, _ in source.states]
    for name in list(SETTINGS)[:5]:
        cache = make_cache(name, offsets, reserve_tokens=DECODE_CONTEXT + DECODE_STEPS)
        for _ in range(DECODE_CONTEXT // WINDOW):
            for layer, (keys, values) in enumerate(source.states):
                cache.update(keys, values, layer)
        steps = []
        for step in range(DECODE_STEPS):
            spent[0], start = 0.0, time.perf_counter()
            position = torch.tensor([[DECODE_CONTEXT + step]])
            model(window[None, step : step + 1], past_key_values=cache, use_cache=True, position_ids=position % 8192)
            steps.append((time.perf_counter() - start, spent[0]))
        whole, attention = min(steps[2:])
        memory = cache.layers[0].cache.memory()
        results["decode"][name] = {
            "tokens_per_second": 1 / whole, "attention_ms": 1e3 * attention, "context": DECODE_CONTEXT,
            "bytes_per_token": sum(layer.cache.memory()["bytes_per_token"] for layer in cache.layers),
            "first_bytes_per_token": memory["first_bytes_per_token"] * len(cache.layers),
            "threads": torch.get_num_threads(),
        }
        print(name, results["decode"][name], flush=True)
        keep_results(results)


def table(results: dict) -> str:
    """Markdown. Each setting is compared with f16 over the windows that it was measured on."""
    lines = ["| K/V | predictions | bytes a token | perplexity | over f16 | KL, nats | same top token | decode, tokens/s | "
             "attention, ms |", "|---|---|---|---|---|---|---|---|---|"]

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
        cells = [name, str(count), str(speed["bytes_per_token"]) if speed else "", f"{perplexity:.3f}", f"{100 * over:+.2f}%",
                 f"{total(name, 'kl', rows) / count:.5f}", f"{100 * total(name, 'same_top', rows) / count:.2f}%"]
        cells += [f"{speed['tokens_per_second']:.1f}", f"{speed['attention_ms']:.1f}"] if speed else ["", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("decode", "layers", "table"):
        parser.add_argument(f"--{flag}", action="store_true")
    options = parser.parse_args()
    results = load_results()
    if not options.table:
        attnspan.transformers.register()
        model, tokenizer = assets.load_model("attnspan")
        tokens = torch.tensor(tokenizer(assets.book_text())["input_ids"])
        with torch.inference_mode():
            run = decode_speed if options.decode else evaluate_layers if options.layers else evaluate
            run(model, tokens, results)
    print(table(results))


if __name__ == "__main__":
    main()
