"""CUDA tensors: the operators on PyTorch's current stream, in graphs and compiled; DLPack; devices that do not match.

Left out where PyTorch or attnspan finds no GPU.
"""

import pytest
import torch
import torch.nn.functional as F

import attnspan
from attnspan.torch import _backward, _forward, attention
from conftest import allowed_keys, reference
from test_core import OnlyDlpack
from test_torch import forward_arguments

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or "cuda" not in attnspan.backends(), reason="no CUDA device here"
)
# Against double: rounding of the inputs' dtype, of the probabilities to that dtype, and in f32 of tf32-free sums.
TOLERANCE = {torch.float32: 2e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
SHAPES = [
    dict(batch=2, seqlen_q=67, seqlen_k=130, heads=4, kv_heads=2, head_dim=64, head_dim_v=64),
    dict(batch=1, seqlen_q=256, seqlen_k=256, heads=2, kv_heads=2, head_dim=128, head_dim_v=128),
    dict(batch=2, seqlen_q=5, seqlen_k=9, heads=6, kv_heads=2, head_dim=40, head_dim_v=24),
    dict(batch=2, seqlen_q=1, seqlen_k=1000, heads=8, kv_heads=2, head_dim=128, head_dim_v=128),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def random_problem(
    seed,
    batch=2,
    seqlen_q=67,
    seqlen_k=130,
    heads=4,
    kv_heads=2,
    head_dim=64,
    head_dim_v=64,
    dtype=torch.float32,
):
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, seqlen_q, heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim_v),
    )
    return [torch.randn(shape, generator=generator).to("cuda", dtype) for shape in shapes]


def exact_of(tensors, mask=None, **options):
    """reference() on the CPU: out, lse and gradients of the sum of squares of out."""
    leaves = [tensor.detach().cpu().double().requires_grad_() for tensor in tensors]
    out, lse = reference(*leaves, mask, **options)
    return out.detach(), lse.detach(), torch.autograd.grad(out.square().sum(), leaves)


def assert_near(found, exact, dtype, scale=1.0):
    torch.testing.assert_close(
        found.detach().cpu().double(),
        exact,
        atol=scale * TOLERANCE[dtype] * max(1.0, exact.abs().max().item() if exact.numel() else 0.0),
        rtol=0,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_gradients(shape, dtype):
    tensors = [tensor.requires_grad_() for tensor in random_problem(1, dtype=dtype, **shape)]
    out, lse = attention(*tensors, causal=True)
    assert attnspan.last_result().backend == "cuda"
    assert out.is_cuda and out.dtype == dtype and lse.is_cuda and lse.dtype == torch.float32
    mask = allowed_keys(shape["seqlen_q"], shape["seqlen_k"], causal=True)
    exact_out, exact_lse, exact_grads = exact_of(tensors, mask)
    assert_near(out, exact_out, dtype)
    assert_near(lse, exact_lse, dtype)
    for found, exact in zip(torch.autograd.grad(out.square().sum(), tensors), exact_grads):
        assert found.is_cuda and found.dtype == dtype
        assert_near(found, exact, dtype, scale=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_option(dtype):
    shape = dict(batch=2, seqlen_q=33, seqlen_k=70, heads=4, kv_heads=2, head_dim=64, head_dim_v=64)
    tensors = random_problem(2, dtype=dtype, **shape)
    generator = torch.Generator().manual_seed(3)
    starts = torch.randint(0, 30, (33,), generator=generator).sort().values.int()
    sinks, bias = torch.randn(4, generator=generator), torch.randn(1, 4, 1, 70, generator=generator)
    mask = allowed_keys(33, 70, causal=True, window_left=20, key_start=starts)
    out, lse = attention(
        *tensors,
        causal=True,
        window_left=20,
        key_start=starts.cuda(),
        softcap=3.0,
        sinks=sinks.cuda(),
        bias=bias.cuda(),
    )
    exact_out, exact_lse, _ = exact_of(tensors, mask, softcap=3.0, sinks=sinks, bias=bias)
    assert_near(out, exact_out, dtype)
    assert_near(lse, exact_lse, dtype)


def test_packed_sequences():
    query, key, value = (torch.randn(90, heads, 64, device="cuda") for heads in (4, 2, 2))
    lengths = torch.tensor([0, 30, 30, 90], dtype=torch.int32, device="cuda")
    out = attnspan.flash_attn_varlen_func(query, key, value, lengths, lengths, 60, 60, causal=True)
    for a, b in ((0, 30), (30, 90)):
        part = attnspan.flash_attn_func(query[None, a:b], key[None, a:b], value[None, a:b], causal=True)
        torch.testing.assert_close(out[a:b], part[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("mask", [None, "boolean", "additive"])
def test_scaled_dot_product_attention(mask):
    q, k, v = (t.transpose(1, 2).requires_grad_() for t in random_problem(4, dtype=torch.float16, kv_heads=4))
    options = dict(is_causal=mask is None)
    if mask is not None:
        scores = torch.randn(67, 130, device="cuda", dtype=torch.float16)
        options["attn_mask"] = scores > -0.5 if mask == "boolean" else scores
    out, expected = (
        function(q, k, v, **options)
        for function in (attnspan.scaled_dot_product_attention, F.scaled_dot_product_attention)
    )
    torch.testing.assert_close(out, expected, atol=4e-3, rtol=1e-2)
    found, wanted = (torch.autograd.grad(x.float().square().sum(), (q, k, v)) for x in (out, expected))
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, atol=4e-2, rtol=4e-2)


def test_opcheck():
    tensors = [t.requires_grad_() for t in random_problem(5, dtype=torch.bfloat16, seqlen_q=9, seqlen_k=17)]
    arguments = forward_arguments(*tensors, causal=True)
    torch.library.opcheck(_forward, arguments)
    out, lse = (tensor.detach() for tensor in _forward(*arguments))
    backward = (torch.randn_like(out), None, *(t.detach() for t in tensors), out, lse, *arguments[3:])
    torch.library.opcheck(_backward, backward)


def test_compile_without_graph_breaks():
    tensors = [tensor.requires_grad_() for tensor in random_problem(6, dtype=torch.bfloat16)]

    def function(query, key, value):
        out, lse = attention(query * 1.0, key, value, causal=True)
        return out.float().square().sum() + lse.sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    eager, result = function(*tensors), compiled(*tensors)
    torch.testing.assert_close(result, eager)
    for found, wanted in zip(torch.autograd.grad(result, tensors), torch.autograd.grad(eager, tensors)):
        torch.testing.assert_close(found, wanted)


def test_autocast():
    tensors = [tensor.requires_grad_() for tensor in random_problem(7)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out, lse = attention(*tensors, causal=True)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    out.float().sum().backward()
    assert all(tensor.grad.dtype == torch.float32 for tensor in tensors)


def test_current_stream():
    """Work of a side stream: what it still has to write is read only then, and the host does not wait."""
    query, key, value = random_problem(8, dtype=torch.bfloat16)
    expected, _ = attention(query, key, value)
    late = torch.full_like(query, float("nan"))
    torch.cuda.synchronize()
    side, done = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        late.copy_(query)
        out, _ = attention(late, key, value)
        raw, _ = attnspan.forward(late, key, value)  # the module's own function
        done.record()
    assert not done.query()
    side.synchronize()
    assert torch.equal(out, expected) and torch.equal(raw, expected)


def test_gradients_on_a_side_stream():
    tensors = [tensor.requires_grad_() for tensor in random_problem(9)]
    expected = torch.autograd.grad(attention(*tensors, causal=True)[0].square().sum(), tensors)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        found = torch.autograd.grad(attention(*tensors, causal=True)[0].square().sum(), tensors)
    side.synchronize()
    for a, b in zip(found, expected):
        assert torch.equal(a, b)


def test_backward_repeats_bit_for_bit():
    tensors = [
        t.requires_grad_() for t in random_problem(10, dtype=torch.bfloat16, seqlen_q=300, seqlen_k=300)
    ]
    runs = [torch.autograd.grad(attention(*tensors, causal=True)[0].float().sum(), tensors) for _ in range(3)]
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other))


def captured(function):
    """Warms a function up on a side stream, then captures it: the graph and what it returns."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graph_of_forward_and_backward(dtype):
    tensors = random_problem(11, dtype=dtype, seqlen_q=200, seqlen_k=200)

    def step():
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out, _ = attention(*leaves, causal=True)
        return (out, *torch.autograd.grad(out.float().square().sum(), leaves))

    graph, results = captured(step)
    for seed in (12, 13):  # replays read the tensors as they are then
        for tensor, new in zip(tensors, random_problem(seed, dtype=dtype, seqlen_q=200, seqlen_k=200)):
            tensor.copy_(new)
        graph.replay()
        for found, wanted in zip(results, step()):
            torch.testing.assert_close(found, wanted, atol=0, rtol=0)


@pytest.mark.parametrize("paged", [False, True])
def test_graph_of_a_growing_cache(paged):
    """Decode steps that store a token and attend, captured once, replayed while the cache grows."""
    batch, tokens, heads, dim = 2, 128, 2, 64
    options = dict(dtype=torch.bfloat16, device="cuda")
    pages = (8, 32) if paged else (batch, tokens)
    k_cache, v_cache = (torch.full((*pages, heads, dim), float("nan"), **options) for _ in range(2))
    table = torch.tensor([[5, 0, 3, 7], [2, 6, 1, 4]], dtype=torch.int32, device="cuda") if paged else None
    q = torch.randn(batch, 1, 8, dim, **options)
    k, v = (torch.randn(batch, 1, heads, dim, **options) for _ in range(2))
    lengths = torch.zeros(batch, dtype=torch.int32, device="cuda")

    def step():
        return attnspan.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, causal=True
        )

    graph, out = captured(step)
    history = []
    for length in range(40):
        for tensor in (q, k, v):
            tensor.normal_()
        history.append((k.clone(), v.clone()))
        lengths.fill_(length)
        graph.replay()
        keys, values = (torch.cat(parts, 1) for parts in zip(*history))
        exact, _ = reference(q.cpu(), keys.cpu(), values.cpu())
        assert_near(out, exact, torch.bfloat16)


def test_kvcache_arguments():
    """cache_batch_idx, cache_leftpad, rotary: the answers of the CPU."""
    generator = torch.Generator().manual_seed(14)
    q, k, v = (torch.randn(2, 3, heads, 32, generator=generator) for heads in (4, 2, 2))
    k_cache, v_cache = (torch.randn(4, 64, 2, 32, generator=generator) for _ in range(2))
    cos, sin = (torch.randn(64, 16, generator=generator) for _ in range(2))
    options = dict(
        cache_seqlens=torch.tensor([10, 30], dtype=torch.int32),
        cache_batch_idx=torch.tensor([2, 0], dtype=torch.int32),
        cache_leftpad=torch.tensor([3, 0], dtype=torch.int32),
        rotary_cos=cos,
        rotary_sin=sin,
    )
    results = []
    for device in ("cpu", "cuda"):
        tensors = [t.clone().to(device) for t in (q, k_cache, v_cache, k, v)]
        moved = {name: t.to(device) for name, t in options.items()}
        out = attnspan.flash_attn_with_kvcache(*tensors, causal=True, **moved)
        results.append([t.cpu() for t in (out, *tensors[1:3])])
    for found, wanted in zip(*results):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_strided_views():
    tensors = random_problem(15, dtype=torch.bfloat16)
    swapped = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    out, lse = attention(*tensors, causal=True)
    other, other_lse = attention(*swapped, causal=True)
    assert torch.equal(out, other) and torch.equal(lse, other_lse)


def test_dlpack_tensors_of_a_device():
    tensors = random_problem(16, dtype=torch.float16)
    expected, expected_lse = attnspan.forward(*tensors, causal=True)
    out, lse = torch.empty_like(expected), torch.empty_like(expected_lse)
    wrapped = [OnlyDlpack(tensor) for tensor in (*tensors, out, lse)]
    attnspan.forward(*wrapped[:3], out=wrapped[3], lse=wrapped[4], causal=True)
    torch.cuda.synchronize()
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    with pytest.raises(attnspan.InvalidArgument, match="^lse: .*OnlyDlpack"):
        attnspan.forward(*wrapped[:3])


def test_cupy_arrays():
    cupy = pytest.importorskip("cupy")
    tensors = random_problem(17)
    expected, _ = attnspan.forward(*tensors, causal=True)
    arrays = [cupy.asarray(tensor) for tensor in tensors]
    out, lse = cupy.empty(expected.shape, "f4"), cupy.empty((2, 4, 67), "f4")
    attnspan.forward(*arrays, out=out, lse=lse, causal=True, stream=cupy.cuda.get_current_stream())
    torch.testing.assert_close(torch.as_tensor(out, device="cuda"), expected)


def test_host_tensors_on_the_device_by_name():
    tensors = [tensor.cpu() for tensor in random_problem(18)]
    out, _ = attnspan.forward(*tensors, causal=True, backend="cuda")
    assert not out.is_cuda and attnspan.last_result().backend == "cuda"
    assert_near(out, exact_of(tensors, allowed_keys(67, 130, causal=True))[0], torch.float32)


def test_merge_states():
    query, key, value = random_problem(19)
    whole = attnspan.forward(query, key, value)
    halves = [
        attnspan.forward(query, key[:, part], value[:, part]) for part in (slice(0, 50), slice(50, 130))
    ]
    for found, wanted in zip(attnspan.merge_states(*halves[0], *halves[1]), whole):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_devices_that_do_not_match():
    query, key, value = random_problem(20, seqlen_q=5, seqlen_k=7)
    int32 = dict(dtype=torch.int32)
    side_inputs = dict(
        key_start=torch.zeros(5, **int32),
        key_end=torch.zeros(5, **int32),
        bias=torch.zeros(1, 1, 5, 7),
        alibi_slopes=torch.zeros(4),
        sinks=torch.zeros(4),
        seqused_k=torch.ones(2, **int32),
    )
    cases = [
        (lambda: attention(query, key.cpu(), value), "key"),
        (lambda: attention(query, key, value.cpu()), "value"),
        (lambda: attention(query.cpu(), key, value), "key"),
        (lambda: attnspan.forward(query, key, value.cpu().numpy()), "value"),
        (lambda: attnspan.forward(query, key, value, out=torch.empty(2, 5, 4, 64)), "out"),
        (lambda: attnspan.forward(query, key, value, lse=torch.empty(2, 4, 5)), "lse"),
        (lambda: attnspan.flash_attn_func(query, key.cpu(), value), "key"),
        (lambda: attnspan.scaled_dot_product_attention(query, key, value.cpu(), enable_gqa=True), "value"),
        (lambda: attnspan.forward(query, key, value, cache_seqlens=torch.ones(2, **int32)), "cache_seqlens"),
        (
            lambda: attnspan.forward(
                query,
                key,
                value,
                cache_seqlens=torch.ones(2, **int32, device="cuda"),
                block_table=torch.zeros(2, 1, **int32),
            ),
            "block_table",
        ),
        (lambda: attnspan.forward(query, key, value, backend="cpu"), "backend"),
    ]
    cases += [
        (lambda o={name: t}: attention(query, key, value, **o), name) for name, t in side_inputs.items()
    ]
    for call, argument in cases:
        with pytest.raises(attnspan.Error) as caught:
            call()
        assert caught.value.argument == argument, str(caught.value)
        assert str(caught.value).startswith(argument + ": ") and "\n" not in str(caught.value)


def test_training_on_the_device_equals_the_host():
    """Three steps of a two-layer attention model, in float32, on both."""
    losses = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(21)
        layers = torch.nn.ModuleList(torch.nn.Linear(64, 3 * 64) for _ in range(2)).to(device)
        data = torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(22)).to(device)
        optimizer, row = torch.optim.SGD(layers.parameters(), lr=0.05), []
        for _ in range(3):
            x = data
            for layer in layers:
                query, key, value = layer(x).view(2, 50, 3, 4, 16).unbind(2)
                x = x + attention(query, key, value, causal=True)[0].flatten(2)
            loss = (x - data.roll(1, 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            row.append(loss.item())
        losses.append(row)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_transformers_on_the_device():
    transformers = pytest.importorskip("transformers")
    import attnspan.transformers

    attnspan.transformers.register()
    options = dict(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1)).cuda()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    results, generated = [], []
    for implementation in ("eager", "attnspan"):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(attn_implementation=implementation, eos_token_id=None, **options)
        model = transformers.LlamaForCausalLM(config).cuda().eval()
        with torch.no_grad():
            results.append(model(ids, attention_mask=mask).logits[mask.bool()])
            generated.append(
                model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
            )
    torch.testing.assert_close(results[1], results[0], atol=1e-4, rtol=1e-3)
    assert torch.equal(*generated)
    with pytest.raises(attnspan.Unsupported, match="^past_key_values: .*cuda"), torch.no_grad():
        keyword = attnspan.transformers.cache_keyword(model)
        model(ids, use_cache=True, **{keyword: attnspan.transformers.AttnspanCache()})
