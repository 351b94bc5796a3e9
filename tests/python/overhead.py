"""Microseconds of a call for a 1 x 1 x 1 x 64 problem, the least of five runs: python tests/python/overhead.py

With --device cuda: of the host alone, which launches and does not wait.
"""

import argparse
import timeit

import numpy as np
import torch

import attnspan
from attnspan.torch import attention


def microseconds(call, number):
    call()
    return 1e6 * min(timeit.repeat(call, number=number, repeat=5)) / number


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    array = np.random.default_rng(0).standard_normal((1, 1, 1, 64)).astype(np.float32)
    out, lse = attnspan.forward(array, array, array)
    tensor = torch.from_numpy(array).to(device)
    leaf = tensor.clone().requires_grad_()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    rows = {
        "attnspan.forward, NumPy": lambda: attnspan.forward(array, array, array),
        "attnspan.forward, NumPy, out and lse given": lambda: attnspan.forward(
            array, array, array, out=out, lse=lse
        ),
        "attnspan.forward, PyTorch tensors": lambda: attnspan.forward(tensor, tensor, tensor),
        "attnspan.torch.attention (the custom operator)": lambda: attention(tensor, tensor, tensor),
        "attnspan.scaled_dot_product_attention": lambda: attnspan.scaled_dot_product_attention(
            tensor, tensor, tensor
        ),
        "torch scaled_dot_product_attention": lambda: sdpa(tensor, tensor, tensor),
        "attnspan.torch.attention, recording a gradient": lambda: attention(leaf, leaf, leaf),
        "torch scaled_dot_product_attention, recording a gradient": lambda: sdpa(leaf, leaf, leaf),
    }
    if device == "cuda":
        rows = {name: call for name, call in rows.items() if "NumPy" not in name}
    print("| call | us |\n|---|---|")
    for name, call in rows.items():
        print(f"| {name} | {microseconds(call, 2000):.1f} |")


if __name__ == "__main__":
    main()
