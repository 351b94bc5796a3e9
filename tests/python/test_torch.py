"""The PyTorch operators: opcheck, gradients, torch.compile, autocast, and PyTorch's own attention as the judge."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import attnspan
from attnspan.torch import _backward, _forward, attention
from conftest import allowed_keys, reference


def random_problem(
    seed, batch=2, seqlen_q=5, seqlen_k=7, heads=4, kv_heads=2, head_dim=8, head_dim_v=6, dtype=torch.float32
):
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, seqlen_q, heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim),
        (batch, seqlen_k, kv_heads, head_dim_v),
    )
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def forward_arguments(query, key, value, sinks=None, key_start=None, bias=None, **options):
    merged = dict(
        softmax_scale=None,
        softcap=0.0,
        causal=False,
        diagonal=None,
        window_left=-1,
        window_right=-1,
        nan_guard=False,
        backend="auto",
    )
    merged.update(options)
    return (query, key, value, key_start, None, None, None, None, bias, None, sinks, *merged.values())


@pytest.mark.parametrize(
    "options", [{}, dict(causal=True, softcap=2.0), dict(sinks=torch.tensor([0.1, 0.2, -1, 3]))]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(options, dtype):
    tensors = [tensor.requires_grad_() for tensor in random_problem(1, dtype=dtype)]
    arguments = forward_arguments(*tensors, **options)
    torch.library.opcheck(_forward, arguments)
    out, lse = (tensor.detach() for tensor in _forward(*arguments))
    detached = [tensor.detach() for tensor in tensors]
    backward_arguments = (torch.randn_like(out), None, *detached, out, lse, *arguments[3:])
    torch.library.opcheck(_backward, backward_arguments)


def test_gradients_against_finite_differences():
    """Differences of f32 results along random directions; autograd of a double reference is the finer judge below."""
    tensors = [tensor.requires_grad_() for tensor in random_problem(2, batch=1, seqlen_q=3, seqlen_k=4)]
    sinks = torch.tensor([0.3, -0.2, 1.0, 0.0], requires_grad=True)

    def function(*inputs):
        return attention(*inputs[:3], sinks=inputs[3], causal=True, softcap=2.0, window_left=2)

    torch.autograd.gradcheck(
        function,
        (*tensors, sinks),
        eps=3e-2,
        atol=2e-2,
        rtol=2e-2,
        fast_mode=False,
        check_batched_grad=False,
        nondet_tol=0.0,
    )


@st.composite
def problems(draw):
    heads_per_group = draw(st.integers(1, 3))
    shape = dict(
        batch=draw(st.integers(1, 2)),
        seqlen_q=draw(st.integers(0, 9)),
        seqlen_k=draw(st.integers(0, 12)),
        kv_heads=draw(st.integers(1, 2)),
        head_dim=draw(st.sampled_from([1, 3, 8, 40])),
        head_dim_v=draw(st.sampled_from([1, 5, 16])),
    )
    shape["heads"] = shape["kv_heads"] * heads_per_group
    mask = dict(
        causal=draw(st.booleans()),
        diagonal=draw(st.sampled_from(["bottom-right", "top-left", 3, -2])),
        window_left=draw(st.integers(-1, 4)),
        window_right=draw(st.integers(-1, 4)),
    )
    rest = dict(softcap=draw(st.sampled_from([0.0, 1.5])), softmax_scale=draw(st.sampled_from([None, 0.7])))
    extras = draw(st.sets(st.sampled_from(["sinks", "bias", "documents", "dlse"])))
    return shape, mask, rest, extras, draw(st.integers(0, 10**6))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(problems())
def test_random_problems_against_double(problem):
    shape, mask, rest, extras, seed = problem
    leaves = [tensor.requires_grad_() for tensor in random_problem(seed, **shape)]
    generator = torch.Generator().manual_seed(seed + 1)
    seqlen_q, seqlen_k, heads = shape["seqlen_q"], shape["seqlen_k"], shape["heads"]
    side, extra_mask = dict(), dict()
    if "sinks" in extras:
        side["sinks"] = torch.randn(heads, generator=generator).requires_grad_()
    if "bias" in extras:
        side["bias"] = torch.randn(1, heads, 1, seqlen_k, generator=generator)
    if "documents" in extras:
        ends = torch.randint(0, seqlen_k + 2, (seqlen_q,), generator=generator).sort().values.int()
        extra_mask["key_end"] = ends
        extra_mask["key_start"] = (ends - torch.randint(0, 4, (1,), generator=generator)).clamp(min=0).int()
    out, lse = attention(*leaves, **mask, **rest, **side, **extra_mask)

    allowed = allowed_keys(seqlen_q, seqlen_k, **mask, **extra_mask)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact_side = {name: t.detach().double().requires_grad_(name == "sinks") for name, t in side.items()}
    exact_out, exact_lse = reference(*exact_leaves, allowed, **rest, **exact_side)
    torch.testing.assert_close(out.double(), exact_out, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.double(), exact_lse, atol=2e-5, rtol=2e-5)

    dout = torch.randn(out.shape, generator=generator)
    dlse = torch.randn(lse.shape, generator=generator) * (lse.isfinite() if "dlse" in extras else 0.0)
    torch.autograd.backward([out, lse], [dout, dlse])
    loss = (exact_out * dout.double()).sum()
    finite = exact_lse.isfinite()
    loss = loss + (torch.where(finite, exact_lse, 0.0) * dlse.double()).sum()
    loss.backward()
    for leaf, exact in zip(
        leaves + ([side["sinks"]] if "sinks" in side else []),
        exact_leaves + ([exact_side["sinks"]] if "sinks" in side else []),
    ):
        expected = torch.nan_to_num(exact.grad) if exact.grad is not None else torch.zeros_like(exact)
        torch.testing.assert_close(leaf.grad.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("fullgraph_backward", [False, True])
def test_compile_without_graph_breaks(fullgraph_backward):
    query, key, value = [tensor.requires_grad_(fullgraph_backward) for tensor in random_problem(3)]

    def function(query, key, value):
        out, lse = attention(query * 1.0, key, value, causal=True)
        sdpa = attnspan.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (query, key, value)), enable_gqa=True
        )
        flash = attnspan.flash_attn_func(query, key, value, causal=True)
        return out.sum() + lse.sum() + (sdpa * sdpa).sum() + flash.mean()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    eager = function(query, key, value)
    result = compiled(query, key, value)
    torch.testing.assert_close(result, eager)
    if fullgraph_backward:
        expected = torch.autograd.grad(eager, (query, key, value))
        for found, wanted in zip(torch.autograd.grad(result, (query, key, value)), expected):
            torch.testing.assert_close(found, wanted)


def test_autocast_and_its_gradient():
    query, key, value = [tensor.requires_grad_() for tensor in random_problem(4)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = attention(query, key, value, causal=True)
        sdpa = attnspan.scaled_dot_product_attention(
            *(t.transpose(1, 2) for t in (query, key, value)), enable_gqa=True
        )
    assert out.dtype == sdpa.dtype == torch.bfloat16 and lse.dtype == torch.float32
    out.float().sum().backward()
    assert query.grad.dtype == torch.float32 and query.grad.abs().sum() > 0


def test_backward_repeats_bit_for_bit_and_takes_any_strides():
    query, key, value = random_problem(5, batch=1, seqlen_q=70, seqlen_k=70, heads=6, kv_heads=2)
    swapped = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value)]  # BHSD memory
    results = []
    for tensors in ((query, key, value), (query, key, value), swapped):
        leaves = [tensor.clone(memory_format=torch.preserve_format).requires_grad_() for tensor in tensors]
        attention(*leaves, causal=True)[0].sum().backward()  # an expanded gradient
        results.append([leaf.grad for leaf in leaves])
    for first, second, third in zip(*results):
        assert torch.equal(first, second) and torch.equal(first, third)


def test_expanded_inputs_have_gradients():
    query, key, value = random_problem(6, kv_heads=1, head_dim_v=8)
    shared = key.clone().requires_grad_()
    out, _ = attention(query, shared.expand(-1, -1, 2, -1), shared.expand(-1, -1, 2, -1))
    out.sum().backward()
    exact = key.double().requires_grad_()
    reference(query, exact, exact)[0].sum().backward()
    torch.testing.assert_close(shared.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)


SDPA_CASES = [
    dict(q=(2, 4, 5, 8), k=(2, 4, 7, 8), v=(2, 4, 7, 6)),
    dict(q=(2, 4, 5, 8), k=(2, 2, 7, 8), v=(2, 2, 7, 8), enable_gqa=True, is_causal=True),
    dict(q=(2, 4, 5, 8), k=(2, 4, 7, 8), v=(2, 4, 7, 8), is_causal=True, scale=0.3),
    dict(q=(2, 4, 7, 8), k=(2, 4, 5, 8), v=(2, 4, 5, 8), is_causal=True),
    dict(q=(2, 4, 5, 8), k=(2, 4, 7, 8), v=(2, 4, 7, 8), mask=(5, 7), bool_mask=True),
    dict(q=(2, 4, 5, 8), k=(2, 4, 7, 8), v=(2, 4, 7, 8), mask=(2, 1, 5, 7)),
    dict(q=(2, 4, 5, 8), k=(2, 4, 7, 8), v=(2, 4, 7, 8), mask=(2, 4, 1, 7), bool_mask=True),
    dict(q=(3, 5, 8), k=(3, 7, 8), v=(3, 7, 8), mask=(3, 5, 7)),
    dict(q=(5, 8), k=(7, 8), v=(7, 8), is_causal=True),
    dict(q=(2, 3, 4, 5, 8), k=(2, 3, 4, 7, 8), v=(2, 3, 4, 7, 8), mask=(3, 1, 5, 7)),
    dict(q=(2, 4, 5, 8), k=(1, 4, 7, 8), v=(1, 4, 7, 8)),
    dict(q=(2, 4, 0, 8), k=(2, 4, 7, 8), v=(2, 4, 7, 8)),
]


@pytest.mark.parametrize("case", SDPA_CASES)
def test_scaled_dot_product_attention(case):
    case = dict(case)
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(case.pop(name), generator=generator, requires_grad=True) for name in "qkv")
    mask_shape, boolean = case.pop("mask", None), case.pop("bool_mask", False)
    if mask_shape is not None:
        mask = torch.randn(mask_shape, generator=generator)
        case["attn_mask"] = (mask > -0.5) if boolean else mask
    out = attnspan.scaled_dot_product_attention(q, k, v, **case)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected = F.scaled_dot_product_attention(q, k, v, **case)
    assert out.shape == expected.shape
    torch.testing.assert_close(out, expected, atol=2e-5, rtol=2e-5)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


def test_masked_row_is_zero():
    q = torch.randn(1, 1, 2, 4, requires_grad=True)
    mask = torch.tensor([[True, True, False], [False, False, False]])
    out = attnspan.scaled_dot_product_attention(
        q, torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4), attn_mask=mask
    )
    out.sum().backward()
    assert torch.equal(out[0, 0, 1], torch.zeros(4)) and torch.equal(q.grad[0, 0, 1], torch.zeros(4))


def test_refusals_name_the_argument():
    query, key, value = random_problem(8)
    as_sdpa = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    cases = [
        (
            lambda: attnspan.scaled_dot_product_attention(*as_sdpa, dropout_p=0.1, enable_gqa=True),
            "dropout_p",
        ),
        (lambda: attnspan.flash_attn_func(query, key, value, dropout_p=0.5), "dropout_p"),
        (lambda: attnspan.scaled_dot_product_attention(*as_sdpa), "key"),
        (
            lambda: attnspan.scaled_dot_product_attention(
                *as_sdpa, torch.ones(5, 7, dtype=torch.bool), is_causal=True, enable_gqa=True
            ),
            "attn_mask",
        ),
        (lambda: attention(query, key, value, bias=torch.zeros(1, 1, 5, 7, requires_grad=True)), "bias"),
        (lambda: attention(query.double(), key, value), "query"),
        (lambda: attention(query, key.half(), value), "key"),
        (lambda: attention(query, key, value, diagonal="center"), "diagonal"),
        (lambda: attention(query, key, value, key_start=torch.zeros(5, dtype=torch.int64)), "key_start"),
        (lambda: attention(query, key, value, sinks=torch.zeros(4, dtype=torch.float16)), "sinks"),
        (lambda: attention(query, key.mT, value), "key"),
    ]
    for call, argument in cases:
        with pytest.raises(attnspan.Error) as caught:
            call()
        assert caught.value.argument == argument and str(caught.value).startswith(argument + ": "), str(
            caught.value
        )


def test_second_gradient_is_refused():
    query, key, value = [tensor.requires_grad_() for tensor in random_problem(9)]
    out, _ = attention(query, key, value)
    (dq,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(attnspan.Unsupported, match="gradient of a gradient"):
        dq.sum().backward()


def test_lse_alone_has_a_gradient():
    query, key, value = [tensor.requires_grad_() for tensor in random_problem(10)]
    attention(query, key, value)[1].sum().backward()
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    reference(*exact)[1].sum().backward()
    torch.testing.assert_close(query.grad.double(), exact[0].grad, atol=1e-5, rtol=1e-5)
    assert torch.equal(value.grad, torch.zeros_like(value))
    assert math.isfinite(float(key.grad.sum()))
