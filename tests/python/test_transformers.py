"""Transformers: a small Llama with attnspan gives eager attention's answers, with and without an AttnspanCache."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

import attnspan
import attnspan.transformers
from attnspan.transformers import AttnspanCache

attnspan.transformers.register()


def with_cache(cache):
    """The keyword by which the installed Transformers takes a cache."""
    return {attnspan.transformers.cache_keyword(transformers.LlamaForCausalLM): cache}


def make_model(implementation, config_class=transformers.LlamaConfig, **options):
    torch.manual_seed(0)
    config = config_class(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        attn_implementation=implementation,
        **options,
    )
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def tokens(batch, length, seed=1):
    return torch.randint(3, 96, (batch, length), generator=torch.Generator().manual_seed(seed))


def logits(model, ids, **options):
    with torch.no_grad():
        return model(ids, **options).logits


def test_logits_and_gradients_equal_eager():
    ids, grads = tokens(2, 17), []
    for implementation in ("eager", "attnspan"):
        model = make_model(implementation)
        loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
        grads.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    for eager, ours in zip(*grads):
        torch.testing.assert_close(ours, eager, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(side):
    ids = tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, slice(0, 5) if side == "left" else slice(7, 12)] = 0
    results = [logits(make_model(i), ids, attention_mask=mask) for i in ("eager", "attnspan")]
    torch.testing.assert_close(results[1][mask.bool()], results[0][mask.bool()], atol=2e-5, rtol=1e-4)


def test_masks_with_holes_and_packed_documents():
    ids = tokens(2, 10)
    holes = torch.ones_like(ids)
    holes[0, 3:5] = 0
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]]).expand(2, -1)  # two documents in a row
    for options in (dict(attention_mask=holes), dict(position_ids=positions, use_cache=False)):
        results = [logits(make_model(i), ids, **options) for i in ("eager", "attnspan")]
        kept = holes.bool() if "attention_mask" in options else torch.ones_like(ids).bool()
        torch.testing.assert_close(results[1][kept], results[0][kept], atol=2e-5, rtol=1e-4)


def test_sliding_windows():
    ids = tokens(2, 20)
    options = dict(config_class=transformers.MistralConfig, sliding_window=6)
    results = [logits(make_model(i, **options), ids) for i in ("eager", "attnspan")]
    torch.testing.assert_close(results[1], results[0], atol=2e-5, rtol=1e-4)
    generated = [
        make_model(i, **options).generate(ids, max_new_tokens=8, do_sample=False)
        for i in ("eager", "attnspan")
    ]
    assert torch.equal(*generated)


ARCHITECTURES = {
    "Qwen3Config": {},
    "Gemma2Config": dict(attn_logit_softcapping=2.0, sliding_window=6, query_pre_attn_scalar=16),
    "Gemma3TextConfig": dict(sliding_window=6, query_pre_attn_scalar=16),
    "GptOssConfig": dict(sliding_window=6, num_local_experts=2, num_experts_per_tok=1),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_softcaps_windows_and_sinks_of_other_models(name):
    if not hasattr(transformers, name):
        pytest.skip(f"this Transformers has no {name}")
    ids, results = tokens(2, 20), []
    for implementation in ("eager", "attnspan"):
        model = make_model(implementation, getattr(transformers, name), **ARCHITECTURES[name])
        generated = model.generate(ids, max_new_tokens=6, do_sample=False)
        results.append((logits(model, ids), generated))
    torch.testing.assert_close(results[1][0], results[0][0], atol=2e-5, rtol=1e-4)
    assert torch.equal(results[1][1], results[0][1])
    ours = model.generate(ids, max_new_tokens=6, do_sample=False, **with_cache(AttnspanCache("f32", "f32")))
    assert torch.equal(ours, results[0][1])


@pytest.mark.parametrize("formats", [("f32", "f32"), ("q8", "tbq4")])
def test_greedy_generation(formats):
    ids = tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0  # padded on the left
    options = dict(max_new_tokens=12, do_sample=False, attention_mask=mask)
    eager = make_model("eager").generate(ids, **options)
    model, cache = make_model("attnspan"), AttnspanCache(*formats)
    assert torch.equal(model.generate(ids, **options), eager)
    ours = model.generate(ids, **with_cache(cache), **options)
    assert cache.get_seq_length() == 9 + 12 - 1
    if formats == ("f32", "f32"):
        assert torch.equal(ours, eager)
    else:  # one step of the quantised cache is close to the exact one
        exact = logits(model, ids[1:])
        near = logits(model, ids[1:], **with_cache(AttnspanCache(*formats)), use_cache=True)
        assert 0 < (near - exact).abs().max() < 0.2 * exact.abs().max()


def test_chunked_prefill_crop_and_reset():
    ids, model = tokens(1, 20), make_model("attnspan")
    whole = logits(model, ids)
    cache = AttnspanCache("f32", "f32", page_size=16)
    parts = [
        logits(model, ids[:, a:b], **with_cache(cache), use_cache=True) for a, b in ((0, 7), (7, 8), (8, 20))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-5, rtol=1e-4)
    cache.crop(-5)
    assert cache.get_seq_length() == 15
    again = logits(model, ids[:, 15:], **with_cache(cache), use_cache=True)
    torch.testing.assert_close(again, whole[:, 15:], atol=2e-5, rtol=1e-4)
    cache.reset()
    assert cache.get_seq_length() == 0
    torch.testing.assert_close(
        logits(model, ids, **with_cache(cache), use_cache=True), whole, atol=2e-5, rtol=1e-4
    )


def test_beam_search_forks_the_cache():
    ids, model = tokens(2, 6), make_model("attnspan")
    options = dict(max_new_tokens=6, do_sample=False, num_beams=3)
    expected = make_model("eager").generate(ids, **options)
    assert torch.equal(model.generate(ids, **with_cache(AttnspanCache("f32", "f32")), **options), expected)


def test_layer_formats_and_first_tokens():
    ids, model = tokens(1, 40), make_model("attnspan")
    exact = logits(model, ids)
    errors = []
    for options in (
        dict(),
        dict(layer_formats={0: ("f32", "f32")}),
        dict(layer_formats={0: ("f32",) * 2, 1: ("f32",) * 2}),
        dict(first_tokens=64, first_format="f32"),
    ):
        cache = AttnspanCache("tbq4", "tbq4", **options)
        errors.append((logits(model, ids, **with_cache(cache), use_cache=True) - exact).abs().mean().item())
    assert errors[0] > errors[1] > 1e-4 and errors[2] < 1e-6 and errors[3] < 1e-6
    assert cache.memory()["tokens"] == 40


def test_key_offsets_leave_the_softmax_alone():
    ids, model = tokens(1, 40), make_model("attnspan")
    offsets = attnspan.transformers.mean_keys(model, tokens(1, 60, seed=2))
    assert [tuple(offset.shape) for offset in offsets] == [(2, 16)] * 2
    exact = logits(model, ids)
    shifted = logits(
        model, ids, **with_cache(AttnspanCache("f32", "f32", key_offsets=offsets)), use_cache=True
    )
    torch.testing.assert_close(shifted, exact, atol=2e-5, rtol=1e-4)
    layer = attnspan.transformers.AttnspanLayer(offsets[0], key_format="f32", value_format="f32")
    keys, _ = layer.update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16))
    with pytest.raises(attnspan.Unsupported, match="^key_offsets"):
        attnspan.transformers.attention_forward(
            torch.nn.Module(), torch.zeros(1, 4, 3, 16), keys, keys, None, softcap=2.0
        )


def test_refusals():
    ids = tokens(1, 5)
    with pytest.raises(attnspan.Unsupported, match="attn_implementation='attnspan'"):
        logits(make_model("sdpa"), ids, **with_cache(AttnspanCache()), use_cache=True)
    with pytest.raises(attnspan.Unsupported, match="^output_attentions"):
        logits(make_model("attnspan"), ids, output_attentions=True)
    with pytest.raises(attnspan.InvalidArgument, match="^k_format"):
        AttnspanCache("q4", "f16")
    with pytest.raises(attnspan.Unsupported, match="^query"):
        make_model("attnspan")(ids, **with_cache(AttnspanCache()), use_cache=True)
    with pytest.raises(attnspan.Unsupported, match="^dropout_p"):
        make_model("attnspan", attention_dropout=0.1).train()(ids)


def test_sinks_and_softcap_reach_the_kernel():
    query, key, value = (
        torch.randn(1, h, 6, 8, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2)
    )
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.bfloat16)
    out, weights = attnspan.transformers.attention_forward(
        torch.nn.Module(), query, key, value, None, scaling=0.3, softcap=4.0, s_aux=sinks, is_causal=True
    )
    expected, _ = attnspan.torch.attention(
        *(t.transpose(1, 2) for t in (query, key, value)),
        softmax_scale=0.3,
        softcap=4.0,
        sinks=sinks.float(),
        causal=True,
    )
    assert weights is None and out.is_contiguous() and torch.equal(out, expected)


def test_packed_lengths():
    query, key, value = (
        torch.randn(1, h, 9, 8, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2)
    )
    lengths = torch.tensor([0, 4, 9], dtype=torch.int32)
    out, _ = attnspan.transformers.attention_forward(
        torch.nn.Module(),
        query,
        key,
        value,
        None,
        is_causal=True,
        cu_seq_lens_q=lengths,
        cu_seq_lens_k=lengths,
    )
    for a, b in ((0, 4), (4, 9)):
        part, _ = attnspan.transformers.attention_forward(
            torch.nn.Module(), query[:, :, a:b], key[:, :, a:b], value[:, :, a:b], None, is_causal=True
        )
        torch.testing.assert_close(out[:, a:b], part)
