// forward, backward, merge_states and supports.

#include <nanobind/stl/string.h>

#include "attnspan/error.hpp"
#include "attnspan/kv_view.hpp"
#include "calls.hpp"

namespace attnspan::python {
namespace {

// Keys and values of a forward call: two tensors, or the rows of a cache that they are when cache_seqlens is
// given (with block_table: pages).
struct KeysAndValues {
  KeysAndValues(nb::handle key_in, nb::handle value_in, nb::handle cache_seqlens, nb::handle block_table_in,
                const TensorArgument& query, void* stream)
      : key(key_in.ptr(), "key", Access::read, stream),
        value(value_in.ptr(), "value", Access::read, stream),
        seqlens(cache_seqlens, "cache_seqlens", Access::read, stream),
        block_table(block_table_in, "block_table", Access::read, stream) {
    check_same_device(key, "key", query);
    check_same_device(value, "value", query);
    if (seqlens) check_same_device(seqlens.argument(), "cache_seqlens", query);
    if (block_table) check_same_device(block_table.argument(), "block_table", query);
    if (block_table && !seqlens) {
      throw Error(ErrorCode::invalid_argument, "cache_seqlens",
                  "found no tensor, expected one: a block_table needs the lengths of its sequences");
    }
    if (!seqlens) return;
    try {
      view = block_table ? paged_cache(key, value, block_table.view(), seqlens.view())
                         : dense_cache(key, value, seqlens.view());
    } catch (const Error& error) {  // C++ calls that argument seqlens
      if (error.argument() != "seqlens") throw;
      throw Error(error.code(), "cache_seqlens", error.detail());
    }
  }

  void put_into(ForwardArgs& args) const {
    if (seqlens) {
      args.cache = &view;
    } else {
      args.key = key.view();
      args.value = value.view();
    }
  }

  TensorArgument key, value;
  MaybeTensor seqlens, block_table;
  KvView view;
};

template <Autograd autograd>
nb::tuple forward_call(nb::handle query_in, nb::handle key_in, nb::handle value_in, nb::handle cache_seqlens,
                       nb::handle block_table, nb::handle out_in, nb::handle lse_in, nb::handle probs_in,
                       const std::string& backend, int threads, nb::handle stream_in,
                       const nb::kwargs& keywords) {
  void* const stream = stream_address(stream_in);
  const TensorArgument query(query_in.ptr(), "query", Access::read, stream);
  const KeysAndValues kv(key_in, value_in, cache_seqlens, block_table, query, stream);
  refuse_autograd(autograd, query, "query");
  refuse_autograd(autograd, kv.key, "key");
  refuse_autograd(autograd, kv.value, "value");
  const Options options(keywords);
  options.check_device(query);

  const Tensor& value = kv.value.view();
  const Output lse(lse_in, query, lse_shape(query.view()), DType::f32, "lse", stream);
  const Output out(out_in, query, out_shape(query.view(), value.shape[value.rank - 1]), query.view().dtype,
                   "out", stream);
  const MaybeTensor probs(probs_in, "probs", Access::write, stream);

  ForwardArgs args;
  args.query = query.view();
  kv.put_into(args);
  args.out = out.view();
  args.lse = lse.view();
  args.probs = probs.view();
  args.options = options.get();
  const Execution execution = make_execution(backend, threads, stream, query);
  run([&] { return forward(args, execution); });
  return nb::make_tuple(out.object(), lse.object());
}

nb::tuple backward_call(nb::handle dout_in, nb::handle query_in, nb::handle key_in, nb::handle value_in,
                        nb::handle out_in, nb::handle lse_in, nb::handle dlse_in, nb::handle dq_in,
                        nb::handle dk_in, nb::handle dv_in, nb::handle d_sinks_in, const std::string& backend,
                        int threads, nb::handle stream_in, const nb::kwargs& keywords) {
  void* const stream = stream_address(stream_in);
  const TensorArgument query(query_in.ptr(), "query", Access::read, stream);
  const TensorArgument key(key_in.ptr(), "key", Access::read, stream);
  const TensorArgument value(value_in.ptr(), "value", Access::read, stream);
  const TensorArgument out(out_in.ptr(), "out", Access::read, stream);
  const TensorArgument lse(lse_in.ptr(), "lse", Access::read, stream);
  const TensorArgument dout(dout_in.ptr(), "dout", Access::read, stream);
  const MaybeTensor dlse(dlse_in, "dlse", Access::read, stream);
  const Options options(keywords);
  const std::pair<const TensorArgument*, const char*> beside_query[] = {
      {&key, "key"}, {&value, "value"}, {&out, "out"}, {&lse, "lse"}, {&dout, "dout"}};
  for (const auto& [tensor, name] : beside_query) check_same_device(*tensor, name, query);
  options.check_device(query);

  const Output dq(dq_in, query, shape_of(query.view()), query.view().dtype, "dq", stream);
  const Output dk(dk_in, query, shape_of(key.view()), query.view().dtype, "dk", stream);
  const Output dv(dv_in, query, shape_of(value.view()), query.view().dtype, "dv", stream);
  std::optional<Output> d_sinks;
  if (options.get().sinks) {
    d_sinks.emplace(d_sinks_in, query, shape_of(options.get().sinks), DType::f32, "d_sinks", stream);
  } else if (!d_sinks_in.is_none()) {
    throw Error(ErrorCode::invalid_argument, "d_sinks", "found a tensor, expected none without sinks");
  }

  BackwardArgs args;
  args.query = query.view();
  args.key = key.view();
  args.value = value.view();
  args.out = out.view();
  args.lse = lse.view();
  args.dout = dout.view();
  args.dlse = dlse.view();
  args.dq = dq.view();
  args.dk = dk.view();
  args.dv = dv.view();
  if (d_sinks) args.d_sinks = d_sinks->view();
  args.options = options.get();
  const Execution execution = make_execution(backend, threads, stream, query);
  run([&] { return backward(args, execution); });
  return nb::make_tuple(dq.object(), dk.object(), dv.object(), d_sinks ? d_sinks->object() : nb::none());
}

nb::tuple merge_call(nb::handle out_a_in, nb::handle lse_a_in, nb::handle out_b_in, nb::handle lse_b_in,
                     nb::handle out_in, nb::handle lse_in, const std::string& backend, int threads,
                     nb::handle stream_in) {
  void* const stream = stream_address(stream_in);
  const TensorArgument out_a(out_a_in.ptr(), "out_a", Access::read, stream);
  const TensorArgument lse_a(lse_a_in.ptr(), "lse_a", Access::read, stream);
  const TensorArgument out_b(out_b_in.ptr(), "out_b", Access::read, stream);
  const TensorArgument lse_b(lse_b_in.ptr(), "lse_b", Access::read, stream);
  const Output out(out_in, out_a, shape_of(out_a), out_a.view().dtype, "out", stream);
  const Output lse(lse_in, out_a, shape_of(lse_a), DType::f32, "lse", stream);
  const MergeArgs args{out_a, lse_a, out_b, lse_b, out.view(), lse.view()};
  const Execution execution = make_execution(backend, threads, stream, out_a);
  run([&] { return merge_states(args, execution); });
  return nb::make_tuple(out.object(), lse.object());
}

// A dense view of that shape that nobody reads or writes: supports() asks about outputs that do not exist
// yet.
Tensor unwritten(const Tensor& like, const std::vector<int64_t>& shape, DType dtype) {
  Tensor tensor = like;
  tensor.dtype = dtype;
  tensor.byte_offset = 0;
  tensor.rank = static_cast<int>(shape.size());
  int64_t stride = 1;
  for (int i = tensor.rank - 1; i >= 0; --i) {
    tensor.shape[i] = shape[i];
    tensor.stride[i] = stride;
    stride *= shape[i];
  }
  return tensor;
}

Support forward_support(const TensorArgument& query, const KeysAndValues& kv, const Options& options,
                        const std::string& backend) {
  ForwardArgs args;
  args.query = query.view();
  kv.put_into(args);
  const Tensor& value = kv.value.view();
  args.out = unwritten(query, out_shape(query, value.shape[value.rank - 1]), query.view().dtype);
  args.lse = unwritten(query, lse_shape(query), DType::f32);
  args.options = options.get();
  return supports(args, backend);
}

Support backward_support(const TensorArgument& query, const KeysAndValues& kv, const Options& options,
                         const std::string& backend) {
  if (kv.seqlens) return Support::no("a cache has no gradient");
  const DType dtype = query.view().dtype;
  BackwardArgs args;
  args.query = query.view();
  args.key = kv.key.view();
  args.value = kv.value.view();
  args.dq = unwritten(query, shape_of(query), dtype);
  args.dk = unwritten(query, shape_of(kv.key), dtype);
  args.dv = unwritten(query, shape_of(kv.value), dtype);
  args.out = args.dout = unwritten(query, out_shape(query, args.dv.shape[args.dv.rank - 1]), dtype);
  args.lse = unwritten(query, lse_shape(query), DType::f32);
  args.options = options.get();
  if (args.options.sinks) args.d_sinks = unwritten(query, shape_of(args.options.sinks), DType::f32);
  return supports(args, backend);
}

nb::tuple supports_call(nb::handle query_in, nb::handle key_in, nb::handle value_in, nb::handle cache_seqlens,
                        nb::handle block_table, const std::string& phase, const std::string& backend,
                        const nb::kwargs& keywords) {
  const TensorArgument query(query_in.ptr(), "query", Access::read);
  const KeysAndValues kv(key_in, value_in, cache_seqlens, block_table, query, nullptr);
  const Options options(keywords);
  if (phase != "forward" && phase != "backward") {
    throw Error(ErrorCode::invalid_argument, "phase",
                "found '" + phase + "', expected 'forward' or 'backward'");
  }
  const Support support = phase == "forward" ? forward_support(query, kv, options, backend)
                                             : backward_support(query, kv, options, backend);
  return nb::make_tuple(support.ok, support.reason);
}

#define ATTNSPAN_EXECUTION_SIGNATURE "backend: str = 'auto', threads: int = 0, stream: object | None = None"
#define ATTNSPAN_FORWARD_SIGNATURE                                                                   \
  "(query: typing.Any, key: typing.Any, value: typing.Any, *, cache_seqlens: object | None = None, " \
  "block_table: object | None = None, out: object | None = None, lse: object | None = None, "        \
  "probs: object | None = None, " ATTNSPAN_EXECUTION_SIGNATURE ", " ATTNSPAN_OPTION_SIGNATURE        \
  ") -> tuple[typing.Any, typing.Any]"

const char* const kForwardDoc = R"(Exact attention: ``out, lse``.

    s[i,j] = softcap(softmax_scale * query[i] . key[j]) + bias[i,j] - slope * |i + diagonal - j|
    lse[i] = log(sum_j exp(s[i,j]) + exp(sink)),  out[i] = sum_j exp(s[i,j] - lse[i]) value[j]

Tensors are NumPy arrays or anything with ``__dlpack__``, on the CPU or a GPU, read and written in place: any
strides, the last dimension contiguous. query, key, value and out share one dtype: float32, float16 or bfloat16.

query          ``[batch, seqlen_q, heads, head_dim]``; with cu_seqlens ``[total_q, heads, head_dim]``
key, value     ``[batch, seqlen_k, kv_heads, head_dim or head_dim_v]``; packed likewise; heads % kv_heads == 0
cache_seqlens  int32 ``[batch]``: key and value are a cache, of which so many tokens are filled
block_table    int32 ``[batch, pages]``: key and value are pages ``[num_pages, page_size, kv_heads, dim]``
out, lse       where to write; new tensors of query's library if not given. lse is float32
               ``[batch, heads, seqlen_q]`` (packed ``[heads, total_q]``), natural logarithm
probs          float32 ``[batch, heads, seqlen_q, seqlen_k]``, written where the backend keeps N x N
softmax_scale  default 1 / sqrt(head_dim)
softcap        0 = off
causal         key j is seen iff j <= i + diagonal
diagonal       'bottom-right' (seqlen_k - seqlen_q), 'top-left' (0) or any integer
window_left, window_right
               keys from i + diagonal - left to i + diagonal + right, inclusive; -1 = unlimited
key_start, key_end
               int32 ``[seqlen_q]`` or ``[batch, seqlen_q]``, non-decreasing: row i sees [key_start, key_end)
cu_seqlens_q, cu_seqlens_k
               int32 ``[batch + 1]``: packed sequences
seqused_k      int32 ``[batch]``: only so many keys of each sequence exist
bias           float32, broadcastable to ``[batch, heads, seqlen_q, seqlen_k]``; <= -1e30 masks. Its result has
               no gradient
alibi_slopes   float32 ``[heads]`` or ``[batch, heads]``
sinks          float32 ``[heads]``: one extra logit in the denominator
nan_guard      replace non-finite results by 0; last_result() counts them
backend        'auto' or a name of backends(); last_result() tells which one ran
threads        CPU threads; 0 = all
stream         cudaStream_t or a stream object; default: the current one of query's library

A row that sees no key has out = 0 and lse = -inf (with a sink: the sink).
Raises attnspan.Error, which names the argument, what was found and what was expected.)";

const char* const kBackwardDoc =
    R"(The gradients of forward: ``dq, dk, dv, d_sinks`` (d_sinks is None without sinks).

dout, out      like forward's out; lse like forward's lse
dlse           optional, float32 like lse: the gradient of lse, where lse was used
dq, dk, dv, d_sinks
               like query, key and value, and float32 ``[heads]``: where to write (overwritten, not added to); new
               dense tensors if not given
The options are forward's and must be the same. Bitwise the same result from run to run, at any thread count. bias and
alibi_slopes have no gradient. Raises attnspan.Error, which names the argument.)";

const char* const kMergeDoc = R"(Joins two results over disjoint keys of the same queries: ``out, lse``.

    lse = log(exp(lse_a) + exp(lse_b)),  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

out_a, out_b ``[batch, seqlen_q, heads, head_dim_v]`` with lse ``[batch, heads, seqlen_q]`` float32, or packed
``[total_q, heads, head_dim_v]`` with ``[heads, total_q]``. out and lse may be a's or b's. Make partial states without
sinks. Two empty states make an empty one.)";

}  // namespace

void bind_attention(nb::module_& module) {
  using namespace nb::literals;
  const auto bind_forward = [&](const char* name, auto* function, const char* signature) {
    module.def(name, function, "query"_a, "key"_a, "value"_a, nb::kw_only(), "cache_seqlens"_a = nb::none(),
               "block_table"_a = nb::none(), "out"_a = nb::none(), "lse"_a = nb::none(),
               "probs"_a = nb::none(), "backend"_a = "auto", "threads"_a = 0, "stream"_a = nb::none(),
               "options"_a, nb::sig(signature), kForwardDoc);
  };
  bind_forward("forward", forward_call<Autograd::refuse>, "def forward" ATTNSPAN_FORWARD_SIGNATURE);
  bind_forward("forward_no_autograd", forward_call<Autograd::ignore>,
               "def forward_no_autograd" ATTNSPAN_FORWARD_SIGNATURE);
  module.def(
      "backward", backward_call, "dout"_a, "query"_a, "key"_a, "value"_a, "out"_a, "lse"_a, nb::kw_only(),
      "dlse"_a = nb::none(), "dq"_a = nb::none(), "dk"_a = nb::none(), "dv"_a = nb::none(),
      "d_sinks"_a = nb::none(), "backend"_a = "auto", "threads"_a = 0, "stream"_a = nb::none(), "options"_a,
      nb::sig("def backward(dout: typing.Any, query: typing.Any, key: typing.Any, value: typing.Any, "
              "out: typing.Any, lse: typing.Any, *, dlse: object | None = None, dq: object | None = None, "
              "dk: object | None = None, dv: object | None = None, d_sinks: object | None = "
              "None, " ATTNSPAN_EXECUTION_SIGNATURE ", " ATTNSPAN_OPTION_SIGNATURE
              ") -> tuple[typing.Any, typing.Any, typing.Any, typing.Any | None]"),
      kBackwardDoc);
  module.def(
      "merge_states", merge_call, "out_a"_a, "lse_a"_a, "out_b"_a, "lse_b"_a, nb::kw_only(),
      "out"_a = nb::none(), "lse"_a = nb::none(), "backend"_a = "auto", "threads"_a = 0,
      "stream"_a = nb::none(),
      nb::sig("def merge_states(out_a: typing.Any, lse_a: typing.Any, out_b: typing.Any, lse_b: typing.Any, "
              "*, out: object | None = None, lse: object | None = None, " ATTNSPAN_EXECUTION_SIGNATURE
              ") -> tuple[typing.Any, typing.Any]"),
      kMergeDoc);
  module.def(
      "supports", supports_call, "query"_a, "key"_a, "value"_a, nb::kw_only(), "cache_seqlens"_a = nb::none(),
      "block_table"_a = nb::none(), "phase"_a = "forward", "backend"_a = "cpu", "options"_a,
      nb::sig("def supports(query: typing.Any, key: typing.Any, value: typing.Any, *, "
              "cache_seqlens: object | None = None, block_table: object | None = None, "
              "phase: typing.Literal['forward', 'backward'] = 'forward', backend: str = "
              "'cpu', " ATTNSPAN_OPTION_SIGNATURE ") -> tuple[bool, str]"),
      "Whether the named backend runs exactly this problem, ``(True, '')``, or ``(False, reason in words)``. "
      "Arguments are forward's; nothing is computed. Raises attnspan.Error where the contract itself "
      "refuses.");
}

}  // namespace attnspan::python
