// attnspan.KvCache: keys and values in pages, each side in a format of its own.

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <mutex>
#include <numeric>

#include "attnspan/error.hpp"
#include "attnspan/kv_cache.hpp"
#include "calls.hpp"
#include "kv/format.hpp"

namespace attnspan::python {
namespace {

// A cache serves one thread at a time, and calls release the interpreter.
struct SharedCache {
  explicit SharedCache(KvCache&& made) : cache(std::move(made)) {}
  KvCache cache;
  std::mutex mutex;
};

KvFormat to_format(const std::string& text, const char* name) {
  const std::optional<KvFormat> format = parse_kv_format(text);
  if (!format) {
    throw Error(ErrorCode::invalid_argument, name, "found '" + text + "', expected " + kKvFormatNames);
  }
  return *format;
}

EncodeMode to_encode_mode(const std::string& text) {
  if (text == "quality") return EncodeMode::quality;
  if (text == "fast") return EncodeMode::fast;
  throw Error(ErrorCode::invalid_argument, "encode_mode",
              "found '" + text + "', expected 'quality' or 'fast'");
}

void construct(SharedCache* self, int64_t kv_heads, int64_t head_dim, int64_t head_dim_v,
               const std::string& key_format, const std::string& value_format, bool value_is_key,
               const std::string& encode_mode, int64_t page_size, int64_t batch, int64_t max_pages,
               int64_t reserve_tokens, int64_t window, int64_t first_tokens,
               const std::string& first_key_format, const std::string& first_value_format, int threads) {
  KvCacheConfig config;
  config.kv_heads = kv_heads;
  config.head_dim = head_dim;
  config.head_dim_v = head_dim_v;
  config.key_format = to_format(key_format, "key_format");
  config.value_format = to_format(value_format, "value_format");
  config.value_is_key = value_is_key;
  config.encode_mode = to_encode_mode(encode_mode);
  config.page_size = page_size;
  config.batch = batch;
  config.max_pages = max_pages;
  config.reserve_tokens = reserve_tokens;
  config.window = window;
  config.first_tokens = first_tokens;
  config.first_key_format = to_format(first_key_format, "first_key_format");
  config.first_value_format = to_format(first_value_format, "first_value_format");
  config.threads = threads;
  new (self) SharedCache(KvCache(config));
}

int64_t append(SharedCache& self, nb::handle key_in, nb::handle value_in, std::optional<int64_t> sequence) {
  const TensorArgument key(key_in.ptr(), "key", Access::read);
  const MaybeTensor value(value_in, "value", Access::read, nullptr);
  const nb::gil_scoped_release release;
  const std::lock_guard lock(self.mutex);
  return sequence ? self.cache.append(*sequence, key.view(), value.view())
                  : self.cache.append(key.view(), value.view());
}

std::vector<int64_t> to_sequences(nb::handle sequences, const KvCache& cache) {
  std::vector<int64_t> result;
  if (sequences.is_none()) {
    result.resize(static_cast<size_t>(cache.batch()));
    std::iota(result.begin(), result.end(), 0);
    return result;
  }
  if (PySequence_Check(sequences.ptr()) == 0) {
    throw Error(ErrorCode::invalid_argument, "sequences",
                std::string("found a value of type ") + Py_TYPE(sequences.ptr())->tp_name +
                    ", expected a list of integers");
  }
  for (const nb::handle index : nb::borrow<nb::sequence>(sequences)) {
    result.push_back(to_int(index.ptr(), "sequences"));
  }
  return result;
}

nb::tuple attend(SharedCache& self, nb::handle query_in, nb::handle sequences_in, nb::handle out_in,
                 nb::handle lse_in, const std::string& backend, int threads, const nb::kwargs& keywords) {
  const TensorArgument query(query_in.ptr(), "query", Access::read);
  refuse_autograd(Autograd::refuse, query, "query");
  const Options options(keywords);
  const std::vector<int64_t> sequences = to_sequences(sequences_in, self.cache);
  const Output lse(lse_in, query, lse_shape(query), DType::f32, "lse", nullptr);
  const Output out(out_in, query, out_shape(query, self.cache.config().head_dim_v), query.view().dtype, "out",
                   nullptr);
  ForwardArgs args;
  args.query = query.view();
  args.out = out.view();
  args.lse = lse.view();
  args.options = options.get();
  const Execution execution = make_execution(backend, threads, nullptr, query);
  run([&] {
    const std::lock_guard lock(self.mutex);
    return forward(self.cache.select(sequences), args, execution);
  });
  return nb::make_tuple(out.object(), lse.object());
}

using ReadRow = void (KvCache::*)(int64_t, int64_t, float*) const;

void read_row(SharedCache& self, ReadRow read, int64_t dim, int64_t sequence, int64_t position,
              nb::handle out) {
  const TensorArgument row(out.ptr(), "out", Access::write);
  const Tensor& view = row.view();
  const int64_t heads = self.cache.config().kv_heads;
  if (view.dtype != DType::f32 || view.device != Device::cpu || view.rank != 2 || view.shape[0] != heads ||
      view.shape[1] != dim || view.stride[1] != 1 || (view.stride[0] != dim && heads > 1)) {
    throw Error(ErrorCode::invalid_argument, "out",
                std::string("found ") + name_of(view.dtype) + " " + view.shape_text() +
                    ", expected a dense f32 array [" + std::to_string(heads) + ", " + std::to_string(dim) +
                    "]");
  }
  const std::lock_guard lock(self.mutex);
  (self.cache.*read)(sequence, position,
                     reinterpret_cast<float*>(static_cast<char*>(view.data) + view.byte_offset));
}

nb::dict memory(const SharedCache& self) {
  const KvCacheMemory memory = self.cache.memory();
  nb::dict result;
  result["bytes_per_token"] = memory.bytes_per_token;
  result["first_bytes_per_token"] = memory.first_bytes_per_token;
  result["pages_used"] = memory.pages_used;
  result["pages_shared"] = memory.pages_shared;
  result["pages_reserved"] = memory.pages_reserved;
  result["bytes_used"] = memory.bytes_used;
  result["bytes_reserved"] = memory.bytes_reserved;
  result["tokens"] = memory.tokens;
  return result;
}

nb::dict config(const SharedCache& self) {
  const KvCacheConfig& config = self.cache.config();
  nb::dict result;
  result["kv_heads"] = config.kv_heads;
  result["head_dim"] = config.head_dim;
  result["head_dim_v"] = config.head_dim_v;
  result["key_format"] = name_of(config.key_format);
  result["value_format"] = name_of(config.value_format);
  result["value_is_key"] = config.value_is_key;
  result["encode_mode"] = config.encode_mode == EncodeMode::fast ? "fast" : "quality";
  result["page_size"] = config.page_size;
  result["window"] = config.window;
  result["first_tokens"] = config.first_tokens;
  result["first_key_format"] = name_of(config.first_key_format);
  result["first_value_format"] = name_of(config.first_value_format);
  return result;
}

// Holds the cache's mutex around a member function; nanobind holds the interpreter, so nothing waits for
// long.
template <auto member, typename... Args>
auto locked(SharedCache& self, Args... args) {
  const nb::gil_scoped_release release;
  const std::lock_guard lock(self.mutex);
  return (self.cache.*member)(args...);
}

const char* const kCacheDoc = R"(Keys and values of many sequences in pages, each side in a format of its own.

    cache = attnspan.KvCache(kv_heads=8, head_dim=128, key_format="q8", value_format="tbq4")
    cache.append(key, value)                    # [batch, tokens, kv_heads, dim]
    out, lse = cache.forward(query, causal=True)

kv_heads, head_dim   of the keys; values have head_dim_v (0: the same)
key_format, value_format
                     'f32', 'f16', 'bf16', 'q8' (8.5 bits a value) or 'tbq4' (4.125 or 4.25)
value_is_key         MLA: a value is the first head_dim_v of its key; only keys are appended
encode_mode          of tbq4: 'quality' or 'fast'
page_size            tokens in a page, a power of two >= 16
batch                sequences at the start, all empty
max_pages            limit of the pool; 0 = none. reserve_tokens: memory taken at once
window               keys that the newest token sees, itself included; older pages are recycled; -1 = all
first_tokens         so many first tokens of every sequence are kept in first_key_format and first_value_format,
                     and never recycled
threads              of append; 0 = all

Position p of a sequence is the p-th token appended to it. Memory of the host. Calls from several threads wait for
each other. Raises attnspan.Error, which names the argument or file.)";

}  // namespace

void bind_kv_cache(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<SharedCache>(module, "KvCache", kCacheDoc)
      .def("__init__", construct, nb::kw_only(), "kv_heads"_a, "head_dim"_a, "head_dim_v"_a = 0,
           "key_format"_a = "f16", "value_format"_a = "f16", "value_is_key"_a = false,
           "encode_mode"_a = "quality", "page_size"_a = 64, "batch"_a = 1, "max_pages"_a = 0,
           "reserve_tokens"_a = 0, "window"_a = -1, "first_tokens"_a = 0, "first_key_format"_a = "f16",
           "first_value_format"_a = "f16", "threads"_a = 0)
      .def("append", append, "key"_a, "value"_a = nb::none(), nb::kw_only(), "sequence"_a = nb::none(),
           nb::sig("def append(self, key: typing.Any, value: object | None = None, *, sequence: int | None = "
                   "None) "
                   "-> int"),
           "Appends key ``[batch, tokens, kv_heads, head_dim]`` and value to every sequence, or ``[tokens, "
           "kv_heads, "
           "head_dim]`` to one; float32, float16 or bfloat16, any strides. Returns how many scales were "
           "beyond float16 "
           "and saturated. On an error nothing was appended.")
      .def("forward", attend, "query"_a, nb::kw_only(), "sequences"_a = nb::none(), "out"_a = nb::none(),
           "lse"_a = nb::none(), "backend"_a = "auto", "threads"_a = 0, "options"_a,
           nb::sig("def forward(self, query: typing.Any, *, sequences: list[int] | None = None, "
                   "out: object | None = None, lse: object | None = None, backend: str = 'auto', threads: "
                   "int = 0, " ATTNSPAN_OPTION_SIGNATURE ") -> tuple[typing.Any, typing.Any]"),
           "Attention of query ``[batch, seqlen_q, heads, head_dim]``, float32, float16 or bfloat16 on the "
           "CPU, over "
           "the given sequences (default: all): ``out, lse``. Key positions count from the start of a "
           "sequence; "
           "the options are attnspan.forward's. No gradients.")
      .def("trim", locked<&KvCache::trim, int64_t, int64_t>, "sequence"_a, "length"_a,
           "Keeps the first `length` tokens of a sequence.")
      .def("add_sequence", locked<&KvCache::add_sequence>, "A new empty sequence, and its index.")
      .def("fork", locked<&KvCache::fork, int64_t>, "source"_a,
           "A new sequence with the tokens of `source`, sharing its pages until either writes to them.")
      .def("release", locked<&KvCache::release, int64_t>, "sequence"_a,
           "Gives the pages of a sequence back; its index may be handed out again.")
      .def("seqlen", locked<&KvCache::seqlen, int64_t>, "sequence"_a, "Tokens of a sequence.")
      .def("first_position", locked<&KvCache::first_position, int64_t>, "sequence"_a,
           "The first position still stored behind first_tokens; 0 without a window.")
      .def_prop_ro("batch", locked<&KvCache::batch>, "Sequences, released ones included.")
      .def_prop_ro("config", config, "What the cache was made with, first_tokens rounded up to whole pages.")
      .def_prop_ro("saturated_scales", locked<&KvCache::saturated_scales>,
                   "Scales beyond float16 that were stored as 65504.")
      .def("memory", memory, "Bytes and pages over all sequences; a shared page counts once.")
      .def(
          "read_key",
          [](SharedCache& self, int64_t sequence, int64_t position, nb::handle out) {
            read_row(self, &KvCache::read_key, self.cache.config().head_dim, sequence, position, out);
          },
          "sequence"_a, "position"_a, "out"_a,
          "Decodes the keys of one position into out, float32 [kv_heads, head_dim].")
      .def(
          "read_value",
          [](SharedCache& self, int64_t sequence, int64_t position, nb::handle out) {
            read_row(self, &KvCache::read_value, self.cache.config().head_dim_v, sequence, position, out);
          },
          "sequence"_a, "position"_a, "out"_a,
          "Decodes the values of one position into out, float32 [kv_heads, head_dim_v].")
      .def(
          "save",
          [](SharedCache& self, const std::string& path) {
            const nb::gil_scoped_release release;
            const std::lock_guard lock(self.mutex);
            self.cache.save(path);
          },
          "path"_a,
          "Writes the cache to a file; the name holds the old file or the new one, whole, at any moment.")
      .def_static(
          "load", [](const std::string& path) { return new SharedCache(KvCache::load(path)); }, "path"_a,
          "Maps a saved cache. Every page is checked; a torn or foreign file is refused by name.")
      .def("__repr__", [](const SharedCache& self) {
        const KvCacheConfig& config = self.cache.config();
        return std::string("KvCache(key_format='") + name_of(config.key_format) + "', value_format='" +
               name_of(config.value_format) + "', batch=" + std::to_string(self.cache.batch()) +
               ", tokens=" + std::to_string(self.cache.memory().tokens) + ")";
      });
}

}  // namespace attnspan::python
