"""The C ABI (include/attnspan/attnspan.h) on torch tensors, for benchmarks: no build against torch is needed."""

import ctypes
from ctypes import POINTER, c_char, c_char_p, c_float, c_int32, c_int64, c_size_t, c_void_p

import torch

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int32: 3}


class Tensor(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("byte_offset", c_int64), ("dtype", c_int32), ("device", c_int32),
                ("rank", c_int32), ("reserved", c_int32), ("shape", c_int64 * 4), ("stride", c_int64 * 4)]


class Options(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("softmax_scale", c_float), ("softcap", c_float), ("causal", c_int32),
                ("nan_guard", c_int32), ("diagonal_kind", c_int32), ("reserved", c_int32),
                ("diagonal_offset", c_int64), ("window_left", c_int64), ("window_right", c_int64)] + [
                    (name, Tensor) for name in ("key_start", "key_end", "cu_seqlens_q", "cu_seqlens_k", "seqused_k",
                                                "bias", "alibi_slopes", "sinks")]


class KvRows(ctypes.Structure):
    _fields_ = [("format", c_int32), ("reserved", c_int32), ("dim", c_int64), ("codes", c_void_p)] + [
        (name, c_int64) for name in ("codes_byte_offset", "page_stride", "head_stride", "token_stride")] + [
            ("scales", c_void_p)] + [(name, c_int64) for name in ("scales_byte_offset", "scale_page_stride",
                                                                  "scale_head_stride", "scale_token_stride")]


class KvView(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("device", c_int32), ("reserved", c_int32), ("batch", c_int64),
                ("kv_heads", c_int64), ("page_size", c_int64), ("num_pages", c_int64), ("max_seqlen", c_int64),
                ("key", KvRows), ("value", KvRows), ("block_table", Tensor), ("seqlens", Tensor),
                ("first_position", Tensor)]


class ForwardArgs(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("query", Tensor), ("key", Tensor), ("value", Tensor),
                ("cache", POINTER(KvView)), ("out", Tensor), ("lse", Tensor), ("probs", Tensor),
                ("options", POINTER(Options))]


class BackwardArgs(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t)] + [
        (name, Tensor) for name in ("query", "key", "value", "out", "lse", "dout", "dlse", "dq", "dk", "dv",
                                    "d_sinks")] + [("options", POINTER(Options))]


class Execution(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("backend", c_char_p), ("threads", c_int32), ("reserved", c_int32),
                ("stream", c_void_p), ("workspace", c_void_p), ("workspace_bytes", c_size_t)]


def view(tensor):
    """A torch tensor of up to four dimensions as attnspan_tensor."""
    t = Tensor()
    if tensor is None:
        return t
    t.data = tensor.data_ptr()
    t.dtype = DTYPES[tensor.dtype]
    t.device = 1 if tensor.is_cuda else 0
    t.rank = tensor.dim()
    for i in range(tensor.dim()):
        t.shape[i], t.stride[i] = tensor.shape[i], tensor.stride(i)
    return t


class Library:
    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.lib.attnspan_last_error.restype = c_char_p
        self.keep = []

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.attnspan_last_error().decode())

    def options(self, **kw):
        o = Options(struct_size=ctypes.sizeof(Options), window_left=-1, window_right=-1)
        for name, value in kw.items():
            setattr(o, name, view(value) if isinstance(value, torch.Tensor) else value)
        return o

    def forward(self, query, key, value, out, lse=None, cache=None, stream=None, workspace=None, **options):
        """[batch, seqlen, heads, dim] views of any strides. Returns a call without arguments, to be repeated."""
        o = self.options(**options)
        args = ForwardArgs(struct_size=ctypes.sizeof(ForwardArgs), query=view(query), key=view(key),
                           value=view(value), out=view(out), lse=view(lse), options=ctypes.pointer(o))
        if cache is not None:
            args.cache = ctypes.pointer(cache)
        execution = Execution(struct_size=ctypes.sizeof(Execution), backend=b"cuda", stream=stream)
        size = c_size_t()
        self.check(self.lib.attnspan_forward_workspace_bytes(ctypes.byref(args), ctypes.byref(execution),
                                                             ctypes.byref(size)))
        scratch = torch.empty(max(size.value, 16), dtype=torch.uint8, device="cuda")
        execution.workspace, execution.workspace_bytes = scratch.data_ptr(), scratch.numel()
        references = (ctypes.byref(args), ctypes.byref(execution), None)
        held = (o, args, execution, scratch, query, key, value, out, lse, cache, options)

        def call(held=held):
            status = self.lib.attnspan_forward(*references)
            if status != 0:
                self.check(status)

        return call

    def backward(self, query, key, value, out, lse, dout, dq, dk, dv, stream=None, **options):
        o = self.options(**options)
        args = BackwardArgs(struct_size=ctypes.sizeof(BackwardArgs), query=view(query), key=view(key),
                            value=view(value), out=view(out), lse=view(lse), dout=view(dout), dq=view(dq),
                            dk=view(dk), dv=view(dv), options=ctypes.pointer(o))
        execution = Execution(struct_size=ctypes.sizeof(Execution), backend=b"cuda", stream=stream)
        size = c_size_t()
        self.check(self.lib.attnspan_backward_workspace_bytes(ctypes.byref(args), ctypes.byref(execution),
                                                              ctypes.byref(size)))
        scratch = torch.empty(max(size.value, 16), dtype=torch.uint8, device="cuda")
        execution.workspace, execution.workspace_bytes = scratch.data_ptr(), scratch.numel()
        held = (o, args, execution, scratch, query, key, value, out, lse, dout, dq, dk, dv)

        def call(held=held):
            self.check(self.lib.attnspan_backward(ctypes.byref(args), ctypes.byref(execution), None))

        return call


def rows(codes, dim, fmt, page_stride, head_stride, token_stride, scales=None, scale_strides=(0, 0, 0)):
    r = KvRows(format=fmt, dim=dim, codes=codes.data_ptr(), page_stride=page_stride, head_stride=head_stride,
               token_stride=token_stride)
    if scales is not None:
        r.scales = scales.data_ptr()
        r.scale_page_stride, r.scale_head_stride, r.scale_token_stride = scale_strides
    return r


def cache_view(key_rows, value_rows, batch, kv_heads, page_size, num_pages, max_seqlen, seqlens, block_table=None):
    v = KvView(struct_size=ctypes.sizeof(KvView), device=1, batch=batch, kv_heads=kv_heads, page_size=page_size,
               num_pages=num_pages, max_seqlen=max_seqlen, key=key_rows, value=value_rows, seqlens=view(seqlens),
               block_table=view(block_table))
    return v
