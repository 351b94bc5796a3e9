"""PyTorch before 2.10 has no DLPack exchange API: tensors come by __dlpack__, and outputs by new_empty."""

import subprocess
import sys
import textwrap

import pytest
import torch

import attnspan

CODE = """
import torch
if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
    del torch.Tensor.__dlpack_c_exchange_api__
import attnspan
from attnspan.torch import attention
from conftest import allowed_keys, reference

device = "{device}"
for dtype, tolerance in ((torch.float32, 2e-4), (torch.bfloat16, 5e-2)):
    leaves = [torch.randn(1, n, h, 16).to(device, dtype).requires_grad_() for n, h in ((5, 4), (9, 2), (9, 2))]
    out, lse = attention(*leaves, causal=True)
    assert type(out) is torch.Tensor and out.dtype == dtype and out.device.type == device, out
    out.float().square().sum().backward()
    exact = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    exact_out, _ = reference(*exact, allowed_keys(5, 9, causal=True))
    exact_out.square().sum().backward()
    torch.testing.assert_close(out.detach().cpu().double(), exact_out.detach(), atol=tolerance, rtol=tolerance)
    for leaf, wanted in zip(leaves, exact):
        torch.testing.assert_close(leaf.grad.cpu().double(), wanted.grad, atol=2 * tolerance, rtol=2 * tolerance)

try:
    attnspan.forward(*leaves)
except attnspan.InvalidArgument as error:
    assert error.argument == "query" and "requires a gradient" in str(error)
else:
    raise AssertionError("a leaf was taken")

if device == "cuda":  # PyTorch's current stream is asked for
    query = torch.randn(1, 5, 4, 16, device=device)
    late, side = torch.full_like(query, float("nan")), torch.cuda.Stream()
    expected, _ = attention(query, query, query)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late.copy_(query)
        out, _ = attention(late, query, query)
    side.synchronize()
    assert torch.equal(out, expected)
print("fine")
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_the_exchange_api(device):
    if device == "cuda" and not (torch.cuda.is_available() and "cuda" in attnspan.backends()):
        pytest.skip("no CUDA device here")
    code = textwrap.dedent(CODE).replace("{device}", device)
    folder = __file__.rsplit("/", 1)[0]
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert run.stdout.strip() == "fine", run.stderr
