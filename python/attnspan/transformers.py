"""attnspan for Hugging Face Transformers.

    import attnspan.transformers
    attnspan.transformers.register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attnspan")
    cache = attnspan.transformers.AttnspanCache(k_format="q8", v_format="tbq4")
    model.generate(**inputs, past_key_values=cache)      # newer Transformers call it cache=cache

`register` enters the attention function and the mask function under one name. Plain causal attention needs no mask
tensor, padded batches become key spans; every other mask (sliding windows, packed sequences, images) is exact as a bias.
"""

from __future__ import annotations

import inspect
from typing import Any, Callable, Mapping, Optional, Sequence

from . import _core
from ._errors import InvalidArgument, Unsupported, missing

try:
    import torch
    from torch import Tensor
except ModuleNotFoundError as error:
    raise missing("attnspan.transformers", error, "torch>=2.4") from None
try:
    from transformers import AttentionInterface
    from transformers.cache_utils import Cache, CacheLayerMixin
    from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
except ImportError as error:
    raise missing("attnspan.transformers", error, "transformers>=4.56") from None
from .torch import _bias_of_mask, _dense_rows, _named, _refuse_dropout, attention

__all__ = [
    "AttnspanCache",
    "AttnspanLayer",
    "attention_forward",
    "attention_mask",
    "cache_keyword",
    "mean_keys",
    "register",
]


def cache_keyword(model: torch.nn.Module) -> str:
    """What the model's forward calls its cache: "past_key_values", or "cache" in newer Transformers."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def register(name: str = "attnspan") -> None:
    """Makes attn_implementation=name work: the attention and its masks, which go together."""
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


# ---- masks


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Optional[Tensor] = None,
    local_size: Optional[int] = None,
    allow_is_causal_skip: bool = True,
    **options: Any,
) -> Optional[Tensor]:
    """What `attention_forward` gets as its mask.

    None: causal, aligned to the bottom right. `[batch, kv_length]` boolean: the same with padding. Anything else:
    `[batch, 1, q_length, kv_length]` boolean, as Transformers makes it for PyTorch's attention.
    """
    plain = (
        mask_function is causal_mask_function
        and allow_is_causal_skip
        and local_size is None
        and isinstance(q_offset, int)
        and q_offset - kv_offset == kv_length - q_length
    )
    if plain and attention_mask is None:
        return None
    if plain and attention_mask.dim() == 2 and attention_mask.shape[1] >= kv_offset + kv_length:
        padding = attention_mask[:, kv_offset : kv_offset + kv_length].bool()
        return None if bool(padding.all()) else padding
    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        allow_is_causal_skip=allow_is_causal_skip,
        **options,
    )


def _padding_spans(padding: Tensor, seqlen_q: int) -> Optional[dict[str, Tensor]]:
    """key_start and key_end of a padding mask `[batch, seqlen_k]`; None where a row has holes."""
    count = padding.sum(-1)
    first = padding.int().argmax(-1)
    last = padding.shape[1] - padding.flip(-1).int().argmax(-1)
    last = torch.where(count == 0, first, last)
    if not bool((last - first == count).all()):
        return None

    def rows(ends: Tensor) -> Tensor:
        return ends.to(torch.int32).view(-1, 1).expand(-1, seqlen_q).contiguous()

    return {"key_start": rows(first), "key_end": rows(last)}


def _mask_options(
    mask: Optional[Tensor], is_causal: bool, seqlen_q: int, seqlen_k: int, sliding_window: Optional[int]
) -> dict[str, Any]:
    """The options of attention that a mask of `attention_mask` stands for."""
    if mask is not None and mask.dim() == 4:
        if mask.shape[-1] != seqlen_k:
            mask = mask[..., :seqlen_k]
        kept = getattr(mask, "_attnspan_bias", None)  # one mask serves all layers
        if kept is None:
            kept = _bias_of_mask(mask, ())
            mask._attnspan_bias = kept
        return {"bias": kept}
    options: dict[str, Any] = {"causal": is_causal}
    if sliding_window is not None and is_causal:
        options["window_left"] = sliding_window - 1
    if mask is not None:
        spans = None if torch.compiler.is_compiling() else _padding_spans(mask, seqlen_q)
        options.update(spans if spans is not None else {"bias": _bias_of_mask(mask[:, None, None, :], ())})
    return options


# ---- attention


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    is_causal: Optional[bool] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    s_aux: Optional[Tensor] = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: query `[batch, heads, seqlen, head_dim]`, KV heads not repeated.

    Returns out `[batch, seqlen, heads, head_dim_v]`, contiguous, and no weights. dropout > 0 and output_attentions are
    refused: attention weights exist nowhere.
    """
    _refuse_dropout(dropout)
    if kwargs.get("output_attentions"):
        raise _named(Unsupported, "output_attentions", "True", "False: attention weights are never stored")
    is_causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    score = {"softmax_scale": scaling, "softcap": softcap or 0.0}
    if s_aux is not None:
        score["sinks"] = s_aux.float()
    if kwargs.get("cu_seq_lens_q") is not None and attention_mask is None:
        return _packed_forward(query, key, value, kwargs, is_causal, sliding_window, score), None
    options = _mask_options(attention_mask, is_causal, query.shape[2], key.shape[2], sliding_window)
    if isinstance(key, _CachedRows):
        return key.layer.attend(query, **score, **options), None
    out, _ = attention(*(_dense_rows(t).transpose(1, 2) for t in (query, key, value)), **score, **options)
    return out, None


def _packed_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    kwargs: Mapping[str, Any],
    is_causal: bool,
    sliding_window: Optional[int],
    score: dict[str, Any],
) -> Tensor:
    """A batch of one that holds many sequences: `[1, heads, total, head_dim]` with their cumulative lengths."""
    if query.shape[0] != 1:
        raise _named(
            InvalidArgument, "cu_seq_lens_q", f"lengths with a batch of {query.shape[0]}", "a batch of 1"
        )
    rows = (_dense_rows(t)[0].transpose(0, 1) for t in (query, key, value))
    lengths = {
        name: kwargs[f"cu_seq_lens_{name[-1]}"].to(torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")
    }
    window = -1 if sliding_window is None or not is_causal else sliding_window - 1
    out, _ = attention(*rows, **lengths, causal=is_causal, window_left=window, **score)
    return out[None]


# ---- the cache


class _CachedRows(Tensor):
    """Keys or values that live in an AttnspanLayer: a shape for the model, without data. attention_forward reads the
    layer; any other operation is refused, since it would have to decode the whole cache."""

    layer: "AttnspanLayer"

    @staticmethod
    def __new__(cls, layer: "AttnspanLayer", like: Tensor, seqlen: int) -> "_CachedRows":
        shape = (*like.shape[:-2], seqlen, like.shape[-1])
        rows = Tensor._make_wrapper_subclass(
            cls, shape, dtype=like.dtype, device=like.device, requires_grad=False
        )
        rows.layer = layer
        return rows

    def __repr__(self) -> str:  # type: ignore[override]
        return f"_CachedRows(shape={tuple(self.shape)}, layer={self.layer!r})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _named(
            Unsupported,
            "past_key_values",
            f"the operation {function} on keys or values of an AttnspanCache",
            "attn_implementation='attnspan', which reads the cache where it is",
        )


class AttnspanLayer(CacheLayerMixin):
    """The cache of one layer: an attnspan.KvCache, and which of its sequences make up the batch."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, key_offset: Optional[Tensor] = None, **cache_options: Any) -> None:
        super().__init__()
        self.key_offset = key_offset
        self.cache_options = cache_options
        self.cache: Optional[_core.KvCache] = None
        self.sequences: list[int] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, kv_heads, _, head_dim = key_states.shape
        if key_states.device.type != "cpu":
            raise _named(
                Unsupported,
                "past_key_values",
                f"keys on {key_states.device}",
                "keys on the CPU, where an AttnspanCache lives",
            )
        self.cache = _core.KvCache(
            kv_heads=kv_heads,
            head_dim=head_dim,
            head_dim_v=value_states.shape[-1],
            batch=batch,
            **self.cache_options,
        )
        self.sequences = list(range(batch))
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Appends `[batch, kv_heads, tokens, dim]` to every sequence."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = (_dense_rows(t.detach()).transpose(1, 2) for t in (key_states, value_states))
        if self.key_offset is not None:
            keys = keys - self.key_offset.to(keys.dtype)
        if self.sequences == list(range(self.cache.batch)):
            self.cache.append(keys, values)
        else:
            for row, sequence in enumerate(self.sequences):
                self.cache.append(keys[row], values[row], sequence=sequence)
        seqlen = self.get_seq_length()
        return _CachedRows(self, key_states, seqlen), _CachedRows(self, value_states, seqlen)

    def attend(self, query: Tensor, **options: Any) -> Tensor:
        """query `[batch, heads, seqlen_q, head_dim]` over the cache: `[batch, seqlen_q, heads, head_dim_v]`."""
        if torch.is_grad_enabled() and query.requires_grad:
            raise _named(
                Unsupported,
                "query",
                "a tensor that requires a gradient",
                "a detached one, or torch.no_grad(): attention over a cache has no gradient",
            )
        if self.key_offset is not None and (options.get("softcap") or options.get("sinks") is not None):
            # The offset adds query . offset to every logit of a row, which only a plain softmax does not see.
            raise _named(Unsupported, "key_offsets", "offsets in a model with softcap or sinks", "none")
        rows = _dense_rows(query.detach()).transpose(1, 2)
        return self.cache.forward(rows, sequences=self.sequences, **options)[0]

    def get_seq_length(self) -> int:
        return self.cache.seqlen(self.sequences[0]) if self.sequences else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before Transformers 5

    def reset(self) -> None:
        self.cache, self.sequences, self.is_initialized = None, [], False

    def crop(self, tokens_to_remove: int) -> None:
        """Negative: so many tokens fewer. Positive: so many tokens are left (Transformers 4)."""
        for sequence in self.sequences:
            seqlen = self.cache.seqlen(sequence)
            length = seqlen + tokens_to_remove if tokens_to_remove <= 0 else min(tokens_to_remove, seqlen)
            self.cache.trim(sequence, max(length, 0))

    def _choose(self, rows: list[int]) -> None:
        """The batch becomes copies of these rows of it. Copies share their pages until one of them grows."""
        chosen = [self.cache.fork(self.sequences[row]) for row in rows]
        for sequence in self.sequences:
            self.cache.release(sequence)
        self.sequences = chosen

    def reorder_cache(self, beam_idx: Tensor) -> None:
        if self.sequences:
            self._choose(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._choose([row for row in range(len(self.sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = torch.arange(len(self.sequences))[indices.cpu()]
        self._choose(rows.tolist())

    def offload(self) -> None:
        raise _named(Unsupported, "offloading", "True", "False: an AttnspanCache is in host memory already")

    prefetch = offload


class AttnspanCache(Cache):
    """A Transformers cache in attnspan's pages and formats, on the CPU; needs attn_implementation="attnspan".

    k_format, v_format   'f32', 'f16', 'bf16', 'q8' or 'tbq4'
    first_tokens         so many first tokens of every sequence (rounded up to whole pages) stay in first_format
    layer_formats        {layer: (k_format, v_format)}: layers with formats of their own
    key_offsets          for each layer a vector [kv_heads, head_dim] that is taken off every key before it is stored,
                         as `mean_keys` finds it: 4-bit keys lose less, and the softmax stays the same
    page_size, encode_mode, reserve_tokens
                         as in attnspan.KvCache
    """

    def __init__(
        self,
        k_format: str = "f16",
        v_format: str = "f16",
        *,
        first_tokens: int = 0,
        first_format: str = "f16",
        layer_formats: Optional[Mapping[int, tuple[str, str]]] = None,
        key_offsets: Optional[Sequence[Tensor]] = None,
        page_size: int = 64,
        encode_mode: str = "quality",
        reserve_tokens: int = 0,
    ) -> None:
        super().__init__(layers=[])
        self._layer_formats = dict(layer_formats or {})
        self._key_offsets = key_offsets
        self._formats = (k_format, v_format)
        self._options = dict(
            first_tokens=first_tokens,
            first_key_format=first_format,
            first_value_format=first_format,
            page_size=page_size,
            encode_mode=encode_mode,
            reserve_tokens=reserve_tokens,
        )
        for name, formats in [
            ("k_format, v_format", self._formats),
            *((f"layer_formats[{i}]", f) for i, f in self._layer_formats.items()),
        ]:
            for found in formats:
                if found not in _FORMATS:
                    raise _named(InvalidArgument, name, repr(found), ", ".join(_FORMATS))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        while len(self.layers) <= layer_idx:
            index = len(self.layers)
            k_format, v_format = self._layer_formats.get(index, self._formats)
            offset = None if self._key_offsets is None else self._key_offsets[index]
            self.layers.append(
                AttnspanLayer(offset, key_format=k_format, value_format=v_format, **self._options)
            )
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    def memory(self) -> dict[str, int]:
        """attnspan.KvCache.memory, bytes and pages added up over the layers."""
        total: dict[str, int] = {}
        for layer in self.layers:
            for name, value in (layer.cache.memory() if layer.cache is not None else {}).items():
                total[name] = value if name == "tokens" else total.get(name, 0) + value
        return total


_FORMATS = ("f32", "f16", "bf16", "q8", "tbq4")


class _SummingCache(AttnspanCache):
    """An f32 cache that also adds up its keys."""

    def __init__(self) -> None:
        super().__init__("f32", "f32")
        self.sums: list[Tensor] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.sums.append(key_states.float().sum(dim=(0, 2)))
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


@torch.no_grad()
def mean_keys(model: torch.nn.Module, input_ids: Tensor) -> list[Tensor]:
    """The mean key of every layer and KV head over a text, `[kv_heads, head_dim]` each: AttnspanCache's key_offsets.

    model has attn_implementation="attnspan"; input_ids `[batch, seqlen]`, some thousand tokens of ordinary text.
    """
    cache = _SummingCache()
    model(input_ids, **{cache_keyword(model): cache}, use_cache=True, logits_to_keep=1)
    return [total / input_ids.numel() for total in cache.sums]
