"""attnspan.KvCache from Python."""

import numpy as np
import pytest
import torch

import attnspan
from conftest import reference


def rand(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    "key_format, value_format, tolerance",
    [
        ("f32", "f32", 1e-5),
        ("f16", "bf16", 1e-2),
        ("q8", "q8", 2e-2),
        ("q8", "tbq4", 0.25),
        ("tbq4", "tbq4", 0.35),
    ],
)
def test_append_and_forward(key_format, value_format, tolerance):
    key, value, query = rand(2, 50, 2, 64), rand(2, 50, 2, 64, seed=1), rand(2, 3, 4, 64, seed=2)
    cache = attnspan.KvCache(
        kv_heads=2, head_dim=64, batch=2, key_format=key_format, value_format=value_format
    )
    cache.append(key[:, :40], value[:, :40])
    for token in range(40, 50):
        for sequence in range(2):
            cache.append(
                key[sequence, token : token + 1], value[sequence, token : token + 1], sequence=sequence
            )
    out, lse = cache.forward(query, causal=True)
    mask = torch.ones(3, 50, dtype=torch.bool).tril(47)
    expected, expected_lse = reference(*(torch.from_numpy(a) for a in (query, key, value)), mask)
    np.testing.assert_allclose(out, expected, atol=tolerance)
    np.testing.assert_allclose(lse, expected_lse, atol=tolerance)
    swapped, _ = cache.forward(query[::-1].copy(), sequences=[1, 0], causal=True)
    np.testing.assert_array_equal(swapped[::-1], out)
    assert cache.memory()["tokens"] == 100 and cache.seqlen(0) == 50 and cache.saturated_scales == 0


def test_stored_rows_are_attended_to_exactly():
    """The error of a format is the error of its stored rows: attention over the decoded rows is the same."""
    key, value, query = rand(1, 30, 1, 64), rand(1, 30, 1, 64, seed=1), rand(1, 1, 2, 64, seed=2)
    cache = attnspan.KvCache(kv_heads=1, head_dim=64, key_format="tbq4", value_format="tbq4")
    cache.append(key, value)
    stored = [np.empty((1, 30, 1, 64), np.float32) for _ in range(2)]
    for position in range(30):
        cache.read_key(0, position, stored[0][0, position])
        cache.read_value(0, position, stored[1][0, position])
    out, _ = cache.forward(query)
    expected, _ = attnspan.forward(query, *stored)
    np.testing.assert_allclose(out, expected, atol=2e-2)
    assert np.square(stored[0] - key).mean() < 0.02


def test_first_tokens_trim_fork_release(tmp_path):
    key, value, query = rand(1, 80, 2, 64), rand(1, 80, 2, 64, seed=1), rand(1, 1, 2, 64, seed=2)
    cache = attnspan.KvCache(
        kv_heads=2,
        head_dim=64,
        key_format="tbq4",
        value_format="tbq4",
        page_size=16,
        first_tokens=20,
        first_key_format="f32",
        first_value_format="f32",
    )
    assert cache.config["first_tokens"] == 32
    cache.append(key, value)
    row = np.empty((2, 64), np.float32)
    cache.read_key(0, 31, row)
    np.testing.assert_array_equal(row, key[0, 31])
    other = cache.fork(0)
    assert cache.memory()["pages_shared"] > 0
    cache.trim(other, 20)
    assert (cache.seqlen(0), cache.seqlen(other)) == (80, 20)
    short, _ = cache.forward(query, sequences=[other])
    expected, _ = attnspan.forward(query, key[:, :20], value[:, :20])
    np.testing.assert_allclose(short, expected, atol=1e-5)
    before, _ = cache.forward(query, sequences=[0])
    cache.release(other)
    cache.save(str(tmp_path / "cache"))
    after, _ = attnspan.KvCache.load(str(tmp_path / "cache")).forward(query, sequences=[0])
    np.testing.assert_array_equal(before, after)


def test_torch_tensors_and_strides():
    key, value = (
        torch.from_numpy(rand(1, 2, 20, 16, seed=s)).bfloat16().transpose(1, 2) for s in (0, 1)
    )  # BHSD memory
    cache = attnspan.KvCache(kv_heads=2, head_dim=16, key_format="bf16", value_format="bf16")
    cache.append(key, value)
    query = torch.from_numpy(rand(1, 1, 2, 16, seed=2)).bfloat16()
    out, _ = cache.forward(query)
    expected, _ = attnspan.forward(query, key.contiguous(), value.contiguous())
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)


def test_errors_name_the_argument(tmp_path):
    cache = attnspan.KvCache(kv_heads=2, head_dim=16)
    good = rand(1, 4, 2, 16)
    (tmp_path / "foreign").write_bytes(b"not a cache" * 100)
    cases = [
        (lambda: attnspan.KvCache(kv_heads=2, head_dim=16, key_format="q4"), "key_format"),
        (lambda: attnspan.KvCache(kv_heads=2, head_dim=16, encode_mode="best"), "encode_mode"),
        (lambda: attnspan.KvCache(kv_heads=2, head_dim=16, page_size=20), "page_size"),
        (lambda: attnspan.KvCache(kv_heads=2, head_dim=600), "head_dim"),
        (lambda: cache.append(rand(1, 4, 2, 8), good), "key"),
        (lambda: cache.append(good, rand(1, 3, 2, 16)), "value"),
        (lambda: cache.append(good), "value"),
        (lambda: cache.append(good[0], good[0], sequence=7), "sequence"),
        (lambda: cache.forward(rand(1, 1, 3, 16)), "query"),
        (lambda: cache.forward(rand(1, 1, 2, 16), sequences=3), "sequences"),
        (lambda: cache.forward(torch.zeros(1, 1, 2, 16, requires_grad=True)), "query"),
        (lambda: cache.trim(0, 9), "length"),
        (lambda: cache.read_key(0, 0, np.empty(3, np.float32)), "out"),
    ]
    for call, argument in cases:
        with pytest.raises(attnspan.Error) as caught:
            call()
        assert caught.value.argument == argument, str(caught.value)
    with pytest.raises(attnspan.FileError, match="foreign"):
        attnspan.KvCache.load(str(tmp_path / "foreign"))
    with pytest.raises(OSError):
        attnspan.KvCache.load(str(tmp_path / "absent"))
    assert cache.memory()["tokens"] == 0
