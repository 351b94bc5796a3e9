"""python -m attnspan.plot: every layout of the JSON, and one line about a file that is none."""

import json

import pytest

from attnspan import plot

RECORDS = [
    {"section": "forward", "name": "1k causal", "tflops": 1.5, "torch_tflops": 0.9, "ms": 3.0},
    {"section": "forward", "name": "4k causal", "tflops": 1.8},
    {
        "phase": "decode",
        "context": 8192,
        "kv_heads": 1,
        "key_format": "tbq4",
        "gb_per_s": 30.0,
        "share_of_peak": 0.8,
    },
    {"phase": "decode", "context": 8192, "kv_heads": 1, "key_format": "f16", "gb_per_s": 33.0},
    {"phase": "decode", "context": 8192, "kv_heads": 1, "key_format": "f32", "ms": 1.0},
    {"phase": "append", "key": "append: 4096 tokens, f16", "gb_per_s": 1.0},
]


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(RECORDS),
        json.dumps({"machine": {"cpu": "x"}, "results": RECORDS}),
        "\n".join(map(json.dumps, RECORDS)),
    ],
)
def test_panels(text, tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(text)
    forward, decode, append = plot.panels_of(plot.read_records(path)[0])
    assert forward["unit"] == "TFLOP/s" and forward["series"] == {
        "tflops": [1.5, 1.8],
        "torch_tflops": [0.9, None],
    }
    # what all rows share is not repeated; a row without GB/s is left out
    assert decode["rows"] == ["key_format tbq4", "key_format f16"] and decode["shares"] == [0.8, None]
    assert decode["series"] == {"gb_per_s": [30.0, 33.0]} and append["rows"] == ["4096 tokens, f16"]


def test_writes_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    (tmp_path / "bench.json").write_text(json.dumps(RECORDS))
    assert plot.main([str(tmp_path / "bench.json")]) == 0
    assert (tmp_path / "bench.png").read_bytes().startswith(
        b"\x89PNG"
    ) and capsys.readouterr().out.strip().endswith("bench.png")


@pytest.mark.parametrize(
    "text, part", [("hello", "no JSON"), ("{}", "no list"), ('[{"name": "x"}]', "no measurement")]
)
def test_bad_files(text, part, tmp_path, capsys):
    (tmp_path / "bad.json").write_text(text)
    assert plot.main([str(tmp_path / "bad.json")]) == 2
    message = capsys.readouterr().err
    assert part in message and "bad.json" in message and message.count("\n") == 1
    assert plot.main([str(tmp_path / "absent.json")]) == 2
