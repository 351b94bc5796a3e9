"""The demo of examples/python runs: each of its lines checks a result against a plain computation."""

import pathlib
import runpy

DEMO = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python" / "demo.py"


def test_demo(capsys):
    assert runpy.run_path(str(DEMO))["main"]() == 0
    output = capsys.readouterr().out
    assert output.count("attnspan.forward") == 3 and output.count("attnspan.flash_attn_func") == 3
