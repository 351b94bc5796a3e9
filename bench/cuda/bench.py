"""attnspan's CUDA kernels beside cuDNN (through PyTorch) and FlexAttention: the same inputs, the same process,
medians. usage: bench.py LIBRARY.so OUTPUT.json [section...]"""

import json
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnspan_ctypes as ac

LIB = ac.Library(sys.argv[1])
RESULTS = []


def medians(calls, budget=0.25, least=8, most=40):
    """Median seconds of each call, taken in turns so that clocks and neighbours are shared."""
    for call in calls:
        call()
        call()
    torch.cuda.synchronize()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for call in calls:
        call()
    end.record()
    torch.cuda.synchronize()
    once = start.elapsed_time(end) / 1e3
    repeats = int(min(most, max(least, budget / max(once, 1e-6))))
    times = [[] for _ in calls]
    for _ in range(repeats):
        for i, call in enumerate(calls):
            s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(20000)  # the host runs ahead: launch gaps stay out
            s.record()
            call()
            e.record()
            times[i].append((s, e))
    torch.cuda.synchronize()
    return [statistics.median(s.elapsed_time(e) for s, e in t) / 1e3 for t in times]


def record(section, name, **values):
    RESULTS.append({"section": section, "name": name, **values})
    print(f"{section:9s} {name:46s} " + "  ".join(
        f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in values.items()), flush=True)


def qkv(batch, seqlen, heads, kv_heads, dim, dtype=torch.bfloat16, seqlen_k=None):
    n = seqlen_k or seqlen
    q = torch.randn(batch, seqlen, heads, dim, device="cuda", dtype=dtype)
    k = torch.randn(batch, n, kv_heads, dim, device="cuda", dtype=dtype)
    v = torch.randn(batch, n, kv_heads, dim, device="cuda", dtype=dtype)
    return q, k, v


def cudnn(q, k, v, causal):
    args = [x.transpose(1, 2) for x in (q, k, v)]
    gqa = q.shape[2] != k.shape[2]

    def call():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*args, is_causal=causal, enable_gqa=gqa)

    return call


def forward_flops(batch, heads, seqlen, dim, causal):
    pairs = seqlen * (seqlen + 1) / 2 if causal else seqlen * seqlen
    return 4 * batch * heads * pairs * dim


def compare_forward(section, name, q, k, v, causal):
    out = torch.full_like(q, float("nan"))
    ours = LIB.forward(q, k, v, out, causal=int(causal), stream=torch.cuda.current_stream().cuda_stream)
    peer = cudnn(q, k, v, causal)
    ours()
    reference = peer().transpose(1, 2)
    difference = (out.float() - reference.float()).abs().max().item()
    ours_s, peer_s = medians([ours, peer])
    flops = forward_flops(q.shape[0], q.shape[2], q.shape[1], q.shape[3], causal)
    record(section, name, ours_tflops=flops / ours_s / 1e12, cudnn_tflops=flops / peer_s / 1e12,
           ratio=peer_s / ours_s, us=ours_s * 1e6, max_difference=difference)


def section_forward():
    for dim in (64, 128, 256):
        for seqlen in (1024, 4096, 16384):
            for causal in (False, True):
                q, k, v = qkv(16384 // seqlen, seqlen, 2048 // dim, 2048 // dim, dim)
                compare_forward("forward", f"D={dim} S={seqlen} {'causal' if causal else 'full'}", q, k, v, causal)
    q, k, v = qkv(1, 8192, 32, 8, 128)
    compare_forward("forward", "GQA 32/8 D=128 S=8192 causal", q, k, v, True)
    q, k, v = qkv(2, 8192, 16, 16, 96)
    compare_forward("forward", "D=96 S=8192 causal", q, k, v, True)
    q, k, v = qkv(2, 4096, 16, 16, 128, torch.float16)
    compare_forward("forward", "f16 D=128 S=4096 causal", q, k, v, True)


def section_backward():
    stream = torch.cuda.current_stream().cuda_stream
    for dim in (64, 128):
        for seqlen in (1024, 2048, 4096, 8192):
            for causal in (False, True):
                q, k, v = qkv(8192 // seqlen, seqlen, 2048 // dim, 2048 // dim, dim)
                dout = torch.randn_like(q)
                out, lse = torch.empty_like(q), torch.empty(q.shape[0], q.shape[2], seqlen, device="cuda")
                LIB.forward(q, k, v, out, lse, causal=int(causal), stream=stream)()
                grads = [torch.full_like(x, float("nan")) for x in (q, k, v)]
                ours = LIB.backward(q, k, v, out, lse, dout, *grads, causal=int(causal), stream=stream)
                leaves = [x.detach().requires_grad_() for x in (q, k, v)]
                peer_out = cudnn(*leaves, causal)()
                peer = lambda: torch.autograd.grad(peer_out, leaves, dout.transpose(1, 2), retain_graph=True)
                ours()
                difference = max((a.float() - b.float()).abs().max().item() for a, b in zip(grads, peer()))
                ours_s, peer_s = medians([ours, peer])
                flops = 2.5 * forward_flops(q.shape[0], q.shape[2], seqlen, dim, causal)
                record("backward", f"D={dim} S={seqlen} {'causal' if causal else 'full'}",
                       ours_tflops=flops / ours_s / 1e12, cudnn_tflops=flops / peer_s / 1e12, ratio=peer_s / ours_s,
                       us=ours_s * 1e6, max_difference=difference)


def section_small():
    for batch in (1, 16):
        q, k, v = qkv(batch, 512, 12, 4, 64)
        compare_forward("small", f"12/4 heads S=512 D=64 causal batch {batch}", q, k, v, True)
        # Launch gaps matter at this size: the same through graph replay.
        out = torch.empty_like(q)
        stream = torch.cuda.Stream()
        times = []
        for make in (lambda s: LIB.forward(q, k, v, out, causal=1, stream=s.cuda_stream), lambda s: cudnn(q, k, v, True)):
            with torch.cuda.stream(stream):
                call = make(stream)
                for _ in range(3):
                    call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                for _ in range(20):
                    call()
            times.append(graph)
        ours_s, peer_s = (t / 20 for t in medians([times[0].replay, times[1].replay]))
        record("small", f"graph: 12/4 heads S=512 D=64 batch {batch}", ours_us=ours_s * 1e6, cudnn_us=peer_s * 1e6,
               ratio=peer_s / ours_s)


def section_flex():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = qkv(1, 8192, 32, 8, 128)
    args = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    flex = torch.compile(flex_attention)
    n = 8192
    causal = lambda b, h, i, j: i >= j
    window = lambda b, h, i, j: (i >= j) & (i - j <= 1024)
    documents = lambda b, h, i, j: (i >= j) & (i // 1024 == j // 1024)
    cap = lambda s, b, h, i, j: 50 * torch.tanh(s / 50)
    starts = (torch.arange(n, device="cuda") // 1024 * 1024).int()
    cases = [("causal", causal, None, {}), ("softcap 50", causal, cap, {"softcap": 50.0}),
             ("window 1024", window, None, {"window_left": 1024}), ("documents of 1024", documents, None, {"key_start": starts})]
    for name, mask, score, options in cases:
        block_mask = create_block_mask(mask, None, None, n, n, device="cuda")
        peer = lambda: flex(*args, score_mod=score, block_mask=block_mask, enable_gqa=True)
        out = torch.full_like(q, float("nan"))
        ours = LIB.forward(q, k, v, out, causal=1, stream=torch.cuda.current_stream().cuda_stream, **options)
        ours()
        difference = (out.float() - peer().transpose(1, 2).float()).abs().max().item()
        ours_s, peer_s = medians([ours, peer])
        record("flex", name, ours_us=ours_s * 1e6, flex_us=peer_s * 1e6, ratio=peer_s / ours_s,
               max_difference=difference)


def section_accuracy():
    for dim in (64, 128, 256):
        for dtype in (torch.bfloat16, torch.float16):
            q, k, v = qkv(1, 2048, 4, 4, dim, dtype)
            out = torch.full_like(q, float("nan"))
            LIB.forward(q, k, v, out, causal=1, stream=torch.cuda.current_stream().cuda_stream)()
            peer = cudnn(q, k, v, True)().transpose(1, 2)
            dq, dk, dv = (x.transpose(1, 2).double() for x in (q, k, v))
            s = dq @ dk.transpose(2, 3) / dim**0.5
            s.masked_fill_(torch.ones(2048, 2048, device="cuda", dtype=torch.bool).triu(1), float("-inf"))
            exact = (s.softmax(-1) @ dv).transpose(1, 2)
            norm = exact.norm()
            record("accuracy", f"D={dim} {str(dtype)[6:]}", ours=((out.double() - exact).norm() / norm).item(),
                   cudnn=((peer.double() - exact).norm() / norm).item(),
                   ours_max=(out.double() - exact).abs().max().item(),
                   cudnn_max=(peer.double() - exact).abs().max().item())


def read_bandwidth():
    x = torch.randn(1 << 29, device="cuda")  # 2 GiB
    seconds = medians([lambda: x.sum()])[0]
    y = torch.empty_like(x)
    copy = medians([lambda: y.copy_(x)])[0]
    record("ceiling", "read (sum of 2 GiB) and copy, TB/s", read=x.numel() * 4 / seconds / 1e12,
           copy=2 * x.numel() * 4 / copy / 1e12)
    return x.numel() * 4 / seconds


def section_matmul():
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    seconds = medians([lambda: a @ b])[0]
    record("ceiling", "8192^3 bf16 product", tflops=2 * 8192**3 / seconds / 1e12)


def decode_pair(batch, tokens, heads, kv_heads, dim, sets, with_peer=True):
    """Calls that rotate over `sets` inputs, so that the L2 is cold."""
    ours, peers, difference = [], [], 0.0
    stream = torch.cuda.current_stream().cuda_stream
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
    for _ in range(sets):
        q, k, v = qkv(batch, 1, heads, kv_heads, dim, seqlen_k=tokens)
        out = torch.full_like(q, float("nan"))
        row = kv_heads * dim * 2
        plane = lambda t: ac.rows(t, dim, 2, tokens * row, dim * 2, row)
        cache = ac.cache_view(plane(k), plane(v), batch, kv_heads, tokens, batch, tokens, lengths)
        ours.append(LIB.forward(q, None, None, out, cache=cache, stream=stream))
        LIB.keep.append((k, v, lengths))
        peers.append(cudnn(q, k, v, False))
        if with_peer:
            ours[-1]()
            difference = max(difference, (out.float() - peers[-1]().transpose(1, 2).float()).abs().max().item())
    return ours, peers, difference


def rotating(calls):
    state = {"i": 0}

    def call():
        calls[state["i"] % len(calls)]()
        state["i"] += 1

    return call


def section_decode():
    bandwidth = read_bandwidth()
    for batch, tokens, sets in ((1, 4096, 12), (1, 32768, 3), (1, 262144, 1), (16, 8192, 1), (64, 4096, 1)):
        ours, peers, difference = decode_pair(batch, tokens, 32, 8, 128, sets)
        ours_s, peer_s = medians([rotating(ours), rotating(peers)])
        total = batch * tokens * 8 * 128 * 2 * 2
        record("decode", f"bf16 32/8 batch {batch} x {tokens}", ours_us=ours_s * 1e6, cudnn_us=peer_s * 1e6,
               ratio=peer_s / ours_s, share_of_read=total / ours_s / bandwidth, max_difference=difference)
        LIB.keep.clear()
        torch.cuda.empty_cache()
    for ratio in (1, 2, 4, 7, 8, 16):
        ours, peers, difference = decode_pair(8, 16384, 8 * ratio, 8, 128, 1, with_peer=False)
        seconds = medians([rotating(ours)])[0]
        record("decode", f"GQA ratio {ratio}, batch 8 x 16384", us=seconds * 1e6,
               share_of_read=8 * 16384 * 8 * 128 * 4 / seconds / bandwidth)
        LIB.keep.clear()


def quantised_cache(fmt_k, fmt_v, batch, tokens, kv_heads, dim):
    """Random codes in the layout of KvCache: [sequence][head][token][row], scales in a plane of their own."""

    def plane(fmt):
        row = {3: dim, 4: dim // 2}[fmt]
        blocks = {3: dim // 32, 4: max(1, dim // 128)}[fmt]
        codes = torch.randint(0, 256, (batch, kv_heads, tokens, row), dtype=torch.uint8, device="cuda")
        scales = (0.01 if fmt == 3 else 1.0) * (0.5 + torch.rand(batch, kv_heads, tokens, blocks, device="cuda"))
        scales = scales.half()
        LIB.keep.append((codes, scales))
        return ac.rows(codes, dim, fmt, kv_heads * tokens * row, tokens * row, row, scales,
                       (kv_heads * tokens * blocks, tokens * blocks, blocks)), batch * kv_heads * tokens * (row + 2 * blocks)

    key, key_bytes = plane(fmt_k)
    value, value_bytes = plane(fmt_v)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
    LIB.keep.append(lengths)
    return ac.cache_view(key, value, batch, kv_heads, tokens, batch, tokens, lengths), key_bytes + value_bytes


def section_decode_quantised():
    bandwidth = read_bandwidth()
    heads, kv_heads, dim = 32, 8, 128
    for batch, tokens, formats in ((1, 262144, (("tbq4", 4, 4), ("q8 K, tbq4 V", 3, 4), ("tbq4 K, q8 V", 4, 3), ("q8", 3, 3))),
                                   (16, 8192, (("tbq4", 4, 4), ("q8", 3, 3))), (64, 4096, (("tbq4", 4, 4),))):
        q, k, v = qkv(batch, 1, heads, kv_heads, dim, seqlen_k=tokens)
        peer = cudnn(q, k, v, False)
        for name, fmt_k, fmt_v in formats:
            cache, total = quantised_cache(fmt_k, fmt_v, batch, tokens, kv_heads, dim)
            out = torch.full_like(q, float("nan"))
            ours = LIB.forward(q, None, None, out, cache=cache, stream=torch.cuda.current_stream().cuda_stream)
            ours()
            finite = bool(out.isfinite().all().item())
            ours_s, peer_s = medians([ours, peer])
            record("decode", f"{name} 32/8 batch {batch} x {tokens}", ours_us=ours_s * 1e6, cudnn_bf16_us=peer_s * 1e6,
                   ratio=peer_s / ours_s, share_of_read=total / ours_s / bandwidth, finite=finite)
            LIB.keep.clear()
        del q, k, v, peer
        torch.cuda.empty_cache()


def section_mla():
    """One KV head whose values are the first 512 columns of its 576 of keys."""
    bandwidth = read_bandwidth()
    for batch, heads, tokens in ((1, 16, 32768), (16, 16, 8192), (16, 128, 8192)):
        q = torch.randn(batch, 1, heads, 576, device="cuda", dtype=torch.bfloat16)
        rows = torch.randn(batch, tokens, 1, 576, device="cuda", dtype=torch.bfloat16)
        out = torch.full((batch, 1, heads, 512), float("nan"), device="cuda", dtype=torch.bfloat16)
        lengths = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
        plane = lambda dim: ac.rows(rows, dim, 2, tokens * 1152, 1152, 1152)
        cache = ac.cache_view(plane(576), plane(512), batch, 1, tokens, batch, tokens, lengths)
        ours = LIB.forward(q, None, None, out, cache=cache, stream=torch.cuda.current_stream().cuda_stream)
        ours()
        exact = torch.softmax(q[:, 0].double() @ rows[:, :, 0].double().transpose(1, 2) / 24, -1) @ rows[:, :, 0, :512].double()
        error = ((out[:, 0].double() - exact).norm() / exact.norm()).item()
        seconds = medians([ours])[0]
        record("decode", f"MLA {heads} heads, 576/512, batch {batch} x {tokens}", us=seconds * 1e6,
               share_of_read=batch * tokens * 1152 / seconds / bandwidth, error=error)


def section_decode_graph():
    """Batch 1 through graph replay, as an engine runs it: the L2 is kept cold by rotating buffers."""
    for tokens, sets in ((4096, 12), (32768, 3)):
        stream = torch.cuda.Stream()
        graphs = []
        with torch.cuda.stream(stream):
            ours, peers, _ = decode_pair(1, tokens, 32, 8, 128, sets)
            for calls in (ours, peers):
                for call in calls:
                    call()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, stream=stream):
                    for call in calls:
                        call()
                graphs.append(graph)
        ours_s, peer_s = (t / sets for t in medians([graphs[0].replay, graphs[1].replay]))
        record("decode", f"graph: bf16 32/8 batch 1 x {tokens}", ours_us=ours_s * 1e6, cudnn_us=peer_s * 1e6,
               ratio=peer_s / ours_s)
        LIB.keep.clear()
        torch.cuda.empty_cache()


def main():
    sections = sys.argv[3:] or ["matmul", "forward", "small", "backward", "accuracy", "decode", "decode_quantised", "decode_graph", "mla", "flex"]
    torch.manual_seed(int(time.time()))
    driver = subprocess.run(["nvidia-smi", "--query-gpu=driver_version,name", "--format=csv,noheader"],
                            capture_output=True, text=True).stdout.strip()
    machine = {"card": torch.cuda.get_device_name(), "driver": driver, "torch": torch.__version__,
               "cudnn": torch.backends.cudnn.version(), "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())}
    print(machine, flush=True)
    for section in sections:
        try:
            globals()[f"section_{section}"]()
        except Exception as error:  # one failing section must not lose the others' results
            record(section, "failed", error=str(error)[:300])
        torch.cuda.empty_cache()
        with open(sys.argv[2], "w") as f:
            json.dump({"machine": machine, "results": RESULTS}, f, indent=1)


if __name__ == "__main__":
    main()
