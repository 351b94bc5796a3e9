#!/usr/bin/env python3
"""Computes the golden bytes of tests/kv/formats_test.cpp from docs/kv-formats.md alone (NumPy, f32)."""

import numpy as np

F = np.float32
POSITIVE = np.array(
    [0.12839503, 0.38804830, 0.65675912, 0.94234046, 1.25623120, 1.61804639, 2.06901723, 2.73258957], F)
CENTROIDS = np.concatenate([-POSITIVE[::-1], POSITIVE])
THRESHOLDS = F(0.5) * (CENTROIDS[:-1] + CENTROIDS[1:])


def signs(block):
    mask, state, result = (1 << 64) - 1, block, []
    for _ in range(block):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        result.append((z ^ (z >> 31)) >> 63)
    return result


def rotate(x):
    block = len(x)
    y = np.where(np.array(signs(block)) == 1, -x, x).astype(F)
    h = 1
    while h < block:
        y = y.reshape(-1, 2, h)
        y = np.concatenate([y[:, :1] + y[:, 1:], y[:, :1] - y[:, 1:]], axis=1).reshape(-1)
        h *= 2
    return y * F(block**-0.5)


def tree(terms):
    while len(terms) > 1:
        terms = terms[: len(terms) // 2] + terms[len(terms) // 2:]
    return terms[0]


def round_block(y, rms, pre_scale):
    codes = np.searchsorted(THRESHOLDS, y * (F(1) / (F(pre_scale) * rms)), side="right")
    c = CENTROIDS[codes]
    return codes, tree(y * c), tree(c * c)


def encode(x, quality):
    y = rotate(x)
    energy = tree(y * y)
    rms = np.sqrt(energy / F(len(y)))
    if not quality:
        codes, _, squares = round_block(y, rms, 1)
        return codes, np.float16(np.sqrt(energy) / np.sqrt(squares))
    best = None
    for step in range(9):
        codes, dot, squares = round_block(y, rms, 0.84 + 0.04 * step)
        score = (dot * dot) / (squares * energy)
        if best is None or score > best[0]:
            best = (score, codes, np.float16(energy / dot))
    return best[1:]


def hexadecimal(codes, norm):
    data = bytes(int(codes[2 * j]) | int(codes[2 * j + 1]) << 4 for j in range(len(codes) // 2))
    return f"{norm.view(np.uint16):04x}:{data.hex()}"


state, row = 12345, []
for _ in range(128):
    state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
    high = (state - (1 << 32) if state >> 31 else state) >> 16
    row.append(high / 8192)
for block in (128, 64):
    print("signs", block, "".join(map(str, signs(block)[:32])))
for name, quality in (("fast", False), ("quality", True)):
    print(name, hexadecimal(*encode(np.array(row, F), quality)))
