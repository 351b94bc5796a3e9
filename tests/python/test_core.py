"""The module without a framework: NumPy arrays and DLPack tensors in place, errors by argument, no imports."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import attnspan
from conftest import reference


def random_arrays(*shapes, dtype=np.float32, seed=1):
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape).astype(dtype) for shape in shapes]


def test_import_needs_no_framework():
    code = "import sys, attnspan; print([m for m in ('numpy', 'torch', 'transformers') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-5), (np.float16, 4e-3)])
def test_forward_of_numpy_arrays(dtype, tolerance):
    query, key, value = random_arrays((2, 5, 6, 40), (2, 9, 2, 40), (2, 9, 2, 24), dtype=dtype)
    out, lse = attnspan.forward(query, key, value, causal=True)
    assert isinstance(out, np.ndarray) and out.dtype == dtype and lse.dtype == np.float32
    mask = torch.ones(5, 9, dtype=torch.bool).tril(4)
    expected_out, expected_lse = reference(*map(torch.from_numpy, (query, key, value)), mask)
    np.testing.assert_allclose(out, expected_out, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, atol=tolerance)


def test_outputs_are_written_where_asked():
    query, key, value = random_arrays((1, 4, 2, 8), (1, 7, 2, 8), (1, 7, 2, 8))
    storage = np.full((1, 2, 4, 8), np.nan, np.float32)  # heads before rows
    lse = np.full((1, 2, 4), np.nan, np.float32)
    out, lse_back = attnspan.forward(query, key, value, out=storage.transpose(0, 2, 1, 3), lse=lse)
    assert lse_back is lse and np.shares_memory(out, storage)
    np.testing.assert_array_equal(storage.transpose(0, 2, 1, 3), attnspan.forward(query, key, value)[0])


def test_strides_are_honoured():
    query, key, value = random_arrays((2, 4, 6, 16), (2, 4, 9, 16), (2, 4, 9, 16))
    views = [array.transpose(0, 2, 1, 3)[:, ::2] for array in (query, key, value)]
    one_head = key[:, :1].transpose(0, 2, 1, 3)
    broadcast = np.broadcast_to(one_head, (2, 9, 4, 16))
    for q, k, v in [views, [views[0], broadcast, broadcast]]:
        dense = attnspan.forward(*(np.ascontiguousarray(array) for array in (q, k, v)))
        strided = attnspan.forward(q, k, v)
        np.testing.assert_array_equal(dense[0], strided[0])
        np.testing.assert_array_equal(dense[1], strided[1])


class OnlyDlpack:
    """A tensor of a library that speaks DLPack and nothing else."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class OldDlpack(OnlyDlpack):
    """The same before DLPack 1.0, without max_version."""

    def __dlpack__(self, stream=None):
        return self.tensor.__dlpack__()


@pytest.mark.parametrize("wrapper", [OnlyDlpack, OldDlpack])
def test_any_dlpack_tensor(wrapper):
    arrays = random_arrays((1, 3, 2, 8), (1, 5, 2, 8), (1, 5, 2, 8))
    expected = attnspan.forward(*arrays)
    out, lse = attnspan.forward(*(wrapper(torch.from_numpy(array)) for array in arrays))
    np.testing.assert_array_equal(out, expected[0])
    np.testing.assert_array_equal(lse, expected[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_torch_tensors_in_and_out(dtype):
    tensors = [
        torch.from_numpy(array).to(dtype) for array in random_arrays((1, 3, 4, 8), (1, 5, 2, 8), (1, 5, 2, 8))
    ]
    out, lse = attnspan.forward(*tensors)
    assert out.dtype == dtype and lse.dtype == torch.float32
    expected = reference(*tensors)
    torch.testing.assert_close(
        out.double(), expected[0], atol=2e-2 if dtype != torch.float32 else 1e-5, rtol=0
    )
    torch.testing.assert_close(lse.double(), expected[1], atol=1e-5, rtol=0)


def test_memory_is_released():
    array = random_arrays((1, 3, 2, 8))[0]
    before = sys.getrefcount(array)
    for _ in range(5):
        attnspan.forward(array, array, array)
        with pytest.raises(attnspan.Error):
            attnspan.forward(array, array, array, window_left=-7)
        attnspan.forward(OnlyDlpack(array), array, array)
    assert sys.getrefcount(array) == before


def test_packed_sequences_and_empty_rows():
    query, key, value = random_arrays((7, 2, 8), (5, 2, 8), (5, 2, 8))
    cu_q, cu_k = np.array([0, 3, 3, 7], np.int32), np.array([0, 0, 2, 5], np.int32)
    out, lse = attnspan.forward(query, key, value, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
    assert out.shape == (7, 2, 8) and lse.shape == (2, 7)
    assert np.all(out[:4] == 0) and np.all(np.isneginf(lse[:, :4]))  # 3 rows without keys; 4 rows over 3 keys
    alone, _ = attnspan.forward(query[None, 3:], key[None, 2:], value[None, 2:], causal=True)
    np.testing.assert_array_equal(alone[0], out[3:])


def test_merge_states_joins_halves():
    query, key, value = random_arrays((1, 3, 2, 8), (1, 10, 2, 8), (1, 10, 2, 8))
    whole = attnspan.forward(query, key, value)
    halves = [attnspan.forward(query, key[:, part], value[:, part]) for part in (slice(0, 4), slice(4, 10))]
    out, lse = attnspan.merge_states(*halves[0], *halves[1])
    np.testing.assert_allclose(out, whole[0], atol=1e-6)
    np.testing.assert_allclose(lse, whole[1], atol=1e-6)


def test_probs_come_from_the_reference():
    query, key, value = random_arrays((1, 3, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8))
    probs = np.full((1, 2, 3, 4), np.nan, np.float32)
    attnspan.forward(query, key, value, probs=probs)
    assert attnspan.last_result().backend == "reference"
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-6)


def test_nan_guard_counts():
    query, key, value = random_arrays((1, 2, 1, 4), (1, 3, 1, 4), (1, 3, 1, 4))
    value[0, 0, 0, 1] = np.inf
    out, _ = attnspan.forward(query, key, value, nan_guard=True)
    assert np.isfinite(out).all() and attnspan.last_result().nonfinite_replaced == 2


def test_dense_cache_and_pages():
    query, key, value = random_arrays((2, 1, 4, 16), (2, 32, 2, 16), (2, 32, 2, 16))
    lengths = np.array([20, 7], np.int32)
    out, _ = attnspan.forward(query, key, value, cache_seqlens=lengths)
    for b, length in enumerate(lengths):
        alone, _ = attnspan.forward(query[b : b + 1], key[b : b + 1, :length], value[b : b + 1, :length])
        np.testing.assert_allclose(out[b : b + 1], alone, atol=1e-6)
    table = np.array([[3, 1], [0, 2]], np.int32)
    pages_k, pages_v = (np.full((4, 16, 2, 16), np.nan, np.float32) for _ in range(2))
    for b in range(2):
        for i in range(2):
            pages_k[table[b, i]], pages_v[table[b, i]] = (t[b, 16 * i : 16 * i + 16] for t in (key, value))
    paged, _ = attnspan.forward(query, pages_k, pages_v, cache_seqlens=lengths, block_table=table)
    np.testing.assert_allclose(paged, out, atol=1e-6)


def error_cases():
    good = dict(zip(("query", "key", "value"), random_arrays((1, 3, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8))))
    array = good["key"]
    tensor = torch.from_numpy(array)
    read_only = np.zeros((1, 3, 2, 8), np.float32)
    read_only.flags.writeable = False
    odd = np.zeros(3 * 2 * 8 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(1, 3, 2, 8)
    return good, [
        (dict(query=[1.0]), "query", "list"),
        (dict(query=odd), "query", "aligned"),
        (dict(query=good["query"][0]), "query", "rank"),
        (dict(key=array.astype(np.float64)), "key", "float64"),
        (dict(key=tensor.long()), "key", "int64"),
        (dict(key=tensor.to(torch.complex64)), "key", "complex64"),
        (dict(key=tensor.to("meta")), "key", ""),
        (dict(key=array[..., ::2]), "key", "last dimension"),
        (dict(key=array[:, ::-1]), "key", "strides of 0 or more"),
        (dict(key=tensor.clone().requires_grad_()), "key", "requires a gradient"),
        (dict(value=array.astype(np.float16)), "value", "f16"),
        (dict(value=array[:, :3]), "value", "like key"),
        (dict(causal=1), "causal", "int"),
        (dict(diagonal="left"), "diagonal", "'left'"),
        (dict(softcap="x"), "softcap", "a number"),
        (dict(softmax_scale=float("nan")), "softmax_scale", "finite"),
        (dict(window_left=1.5), "window_left", "an integer"),
        (dict(window_right=-2), "window_right", "-1 for unlimited"),
        (dict(key_start=np.array([1, 0, 0], np.int32)), "key_start", "never decrease"),
        (dict(key_end=np.array([1, 2, 3], np.int64)), "key_end", "int64"),
        (dict(query=good["query"][0], cu_seqlens_q=np.array([0, 3], np.int32)), "cu_seqlens_k", "both"),
        (dict(bias=np.zeros((1, 1, 3, 5), np.float32)), "bias", "4 or 1"),
        (dict(sinks=np.zeros(3, np.float32)), "sinks", "heads"),
        (dict(alibi_slopes=np.zeros(2, np.float16)), "alibi_slopes", "f32"),
        (dict(out=read_only), "out", "writable"),
        (dict(out=np.zeros((1, 3, 2, 7), np.float32)), "out", "[1, 3, 2, 8]"),
        (dict(lse=np.zeros((1, 3, 2), np.float32)), "lse", "heads"),
        (dict(backend="gpu"), "backend", "'gpu'"),
        (dict(stream="main"), "stream", "str"),
        (dict(block_table=np.zeros((1, 1), np.int32)), "cache_seqlens", ""),
    ]


@pytest.mark.parametrize("index", range(30))
def test_errors_name_the_argument(index):
    good, cases = error_cases()
    assert len(cases) == 30
    wrong, argument, part = cases[index]
    with pytest.raises(attnspan.Error) as caught:
        attnspan.forward(**{**good, **wrong})
    assert caught.value.argument == argument
    message = str(caught.value)
    assert message.startswith(argument + ": ") and part in message and "\n" not in message


def test_unknown_keyword_and_unavailable_backend():
    array = random_arrays((1, 2, 1, 4))[0]
    with pytest.raises(TypeError, match="is_causal"):
        attnspan.forward(array, array, array, is_causal=True)
    absent = [row["name"] for row in attnspan.backend_list() if not row["available"]]
    assert "cpu" in attnspan.backends() and "reference" in attnspan.backends()
    for name in absent:
        with pytest.raises(attnspan.Unavailable, match=name):
            attnspan.forward(array, array, array, backend=name)


def test_supports_gives_the_reason():
    array = random_arrays((1, 2, 1, 4))[0]
    assert attnspan.supports(array, array, array, backend="reference") == (True, "")
    ok, reason = attnspan.supports(array, array, array, phase="backward", backend="reference", causal=True)
    assert ok and reason == ""
    for row in attnspan.backend_list():
        if not row["available"]:
            ok, reason = attnspan.supports(array, array, array, backend=row["name"])
            assert not ok and reason


def test_backward_overwrites_and_matches_autograd():
    shapes = (1, 5, 4, 8), (1, 7, 2, 8), (1, 7, 2, 6), (1, 5, 4, 6)
    query, key, value, dout = (torch.from_numpy(array) for array in random_arrays(*shapes))
    sinks, dlse = torch.tensor([0.5, -1.0, 0.0, 2.0]), torch.randn(1, 4, 5, generator=torch.manual_seed(3))
    leaves = [t.double().requires_grad_() for t in (query, key, value, sinks)]
    mask = torch.ones(5, 7, dtype=torch.bool).tril(2)
    out64, lse64 = reference(*leaves[:3], mask, sinks=leaves[3], softcap=3.0)
    torch.autograd.backward([out64, lse64], [dout.double(), dlse.double()])
    out, lse = attnspan.forward(query, key, value, causal=True, softcap=3.0, sinks=sinks)
    poisoned = torch.full_like(query, float("nan"))
    grads = attnspan.backward(
        dout, query, key, value, out, lse, dlse=dlse, dq=poisoned, causal=True, softcap=3.0, sinks=sinks
    )
    assert grads[0] is poisoned
    for found, leaf in zip(grads, leaves):
        torch.testing.assert_close(found.double(), leaf.grad, atol=2e-5, rtol=1e-5)
    assert attnspan.backward(dout, query, key, value, out, lse)[3] is None


def test_without_a_framework(tmp_path):
    """PyTorch and Transformers made invisible: the package works, and says what its other modules need."""
    code = """
import importlib.abc, sys
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "matplotlib"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else found(name, *rest)
import pydoc
import numpy, attnspan
attnspan.forward(*[numpy.ones((1, 2, 1, 4), "f4")] * 3)
assert "flash_attn_func" not in dir(attnspan) and "KvCache" in pydoc.render_doc(attnspan)
for name in ("torch", "flash", "transformers"):
    try:
        __import__("attnspan." + name)
    except ModuleNotFoundError as error:
        assert error.name == "torch" and f"attnspan.{name} needs torch" in str(error), error
    else:
        raise AssertionError(name)
try:
    from attnspan import flash_attn_func
except ModuleNotFoundError as error:
    assert "pip install 'torch" in str(error)
from attnspan import plot
import json, pathlib
pathlib.Path("bench.json").write_text(json.dumps([{"name": "x", "ms": 1.0}]))
assert plot.main(["bench.json"]) == 2
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("\n") == 1 and "needs matplotlib" in run.stderr
