// attnspan cache build, inspect, verify, convert: saved KV caches.

#include "cache.hpp"

#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "arguments.hpp"
#include "attnspan/kv_cache.hpp"
#include "core/validation.hpp"
#include "io/mapped_file.hpp"
#include "kv/cache_file.hpp"
#include "kv/format.hpp"
#include "print.hpp"

namespace attnspan::cli {

KvFormat format_named(const std::string& name) { return *parse_kv_format(name); }

std::string text_of(const io::TensorAddress& address) {
  return address.path + (address.tensor.empty() ? "" : ":" + address.tensor);
}

io::TensorBuffer read_rows(const std::string& flag, const io::TensorAddress& address) {
  try {
    io::TensorBuffer buffer = io::read_tensor(address);
    require(buffer.rank() == 4, "",
            "rank " + std::to_string(buffer.rank()) + " " + io::shape_text(buffer.shape()),
            "rank 4 [batch, seqlen, heads, dim]");
    require(buffer.dtype() != DType::i32, "", "int32", "f32, f16 or bf16");
    return buffer;
  } catch (const Error& error) {
    throw Error(error.code(), flag + " " + text_of(address), error.detail());
  }
}

Tensor as_bshd(const io::TensorBuffer& buffer, const std::string& layout) {
  return layout == "bhsd" ? transposed(buffer.view(), 1, 2) : buffer.view();
}

namespace {

std::string dump(const nlohmann::json& report) {
  return report.dump(2, ' ', false, nlohmann::json::error_handler_t::replace);
}

// ---- what a saved cache is

nlohmann::json json_of(const std::string& path, const CacheFile& file) {
  const KvCacheConfig& c = file.config;
  nlohmann::json sequences = nlohmann::json::array();
  for (size_t i = 0; i < file.rest.size(); ++i) {
    const SequencePages& rest = file.rest[i];
    sequences.push_back({{"live", static_cast<bool>(file.live[i])},
                         {"tokens", rest.length > c.first_tokens ? rest.length : file.first[i].length},
                         {"first_position", rest.first == c.first_tokens ? 0 : rest.first},
                         {"pages", rest.pages.size() + file.first[i].pages.size()}});
  }
  const auto shared = [](const std::vector<int32_t>& references) {
    return std::count_if(references.begin(), references.end(), [](int32_t count) { return count > 1; });
  };
  const size_t first_pages = file.first_pool ? file.first_pool->references.size() : 0;
  nlohmann::json report = {{"file", path},
                           {"bytes", file.file_bytes},
                           {"kv_heads", c.kv_heads},
                           {"head_dim", c.head_dim},
                           {"head_dim_v", c.head_dim_v},
                           {"value_is_key", c.value_is_key},
                           {"key_format", name_of(c.key_format)},
                           {"value_format", name_of(c.value_format)},
                           {"encode_mode", c.encode_mode == EncodeMode::fast ? "fast" : "quality"},
                           {"page_size", c.page_size},
                           {"bytes_per_token", page_bytes(file.rest_pool.shape) / c.page_size},
                           {"window", c.window},
                           {"first_tokens", c.first_tokens},
                           {"pages", file.rest_pool.references.size() + first_pages},
                           {"shared_pages", shared(file.rest_pool.references) +
                                                (file.first_pool ? shared(file.first_pool->references) : 0)},
                           {"saturated_scales", file.saturated_scales},
                           {"sequences", sequences}};
  if (c.first_tokens > 0) {
    report["first_key_format"] = name_of(c.first_key_format);
    report["first_value_format"] = name_of(c.first_value_format);
  }
  return report;
}

void print_cache(const nlohmann::json& r) {
  std::printf("%s  %s\n", one_line(r["file"]).c_str(), text_of_bytes(r["bytes"]).c_str());
  Table shape("ll", {"KV heads", r["kv_heads"].dump()});
  std::string dims = r["head_dim"].dump();
  if (r["value_is_key"]) {
    dims += ", values are the first " + r["head_dim_v"].dump() + " of the keys";
  } else if (r["head_dim_v"] != r["head_dim"]) {
    dims += ", of values " + r["head_dim_v"].dump();
  }
  shape.add({"head_dim", dims});
  const auto formats = [](const nlohmann::json& key, const nlohmann::json& value) {
    return "K " + key.get<std::string>() + ", V " + value.get<std::string>();
  };
  shape.add({"formats", formats(r["key_format"], r["value_format"])});
  if (r["first_tokens"] != 0) {
    shape.add({"first tokens",
               r["first_tokens"].dump() + " as " + formats(r["first_key_format"], r["first_value_format"])});
  }
  if (r["window"] != -1) shape.add({"window", r["window"].dump() + " keys"});
  shape.add({"bytes per token", r["bytes_per_token"].dump()});
  shape.add({"pages", r["pages"].dump() + " of " + r["page_size"].dump() + " tokens, " +
                          r["shared_pages"].dump() + " shared"});
  shape.add({"saturated scales", r["saturated_scales"].dump()});
  shape.print();
  std::printf("\n");
  Table sequences("rrrr", {"sequence", "tokens", "from position", "pages"});
  for (size_t i = 0; i < r["sequences"].size(); ++i) {
    const nlohmann::json& s = r["sequences"][i];
    sequences.add({std::to_string(i), s["live"] ? s["tokens"].dump() : "released", s["first_position"].dump(),
                   s["pages"].dump()});
  }
  sequences.print();
}

int inspect(const std::string& path, bool json, bool verify) {
  const io::MappedFile mapped(path);
  const CacheFile file = parse_cache_file(mapped.bytes(), path);
  if (verify) verify_pages(file, mapped.bytes(), path, 0);
  nlohmann::json report = json_of(path, file);
  if (verify) report["verified"] = true;
  if (json) {
    std::printf("%s\n", dump(report).c_str());
  } else if (verify) {
    std::printf("%s  %s: the header and %s pages have their checksums\n", one_line(path).c_str(),
                text_of_bytes(report["bytes"]).c_str(), report["pages"].dump().c_str());
  } else {
    print_cache(report);
  }
  return 0;
}

Command add_inspect(CLI::App& cache, bool verify) {
  CLI::App* app = verify ? cache.add_subcommand("verify", "check every page of a saved cache")
                         : cache.add_subcommand("inspect", "shapes, formats and sequences of a saved cache");
  struct Arguments {
    std::string path;
    bool json = false;
  };
  const auto a = std::make_shared<Arguments>();
  app->add_option("file", a->path, "a saved cache")->required();
  app->add_flag("--json", a->json, "report as JSON");
  return {app, [a, verify] { return inspect(a->path, a->json, verify); }};
}

// ---- build

struct FormatFlags {
  std::string key, value, first_key, first_value, encode = "quality";

  void declare(CLI::App& app, const std::string& otherwise) {
    add_choice(app, "--k-format", key, kFormatNames, "format of keys" + otherwise);
    add_choice(app, "--v-format", value, kFormatNames, "format of values" + otherwise);
    add_choice(app, "--first-k-format", first_key, kFormatNames, "of the first tokens" + otherwise);
    add_choice(app, "--first-v-format", first_value, kFormatNames, "of the first tokens" + otherwise);
    add_choice(app, "--encode", encode, {"quality", "fast"}, "how tbq4 chooses its codes (default quality)");
  }
  static void set(KvFormat& format, const std::string& name) {
    if (!name.empty()) format = format_named(name);
  }
  EncodeMode mode() const { return encode == "fast" ? EncodeMode::fast : EncodeMode::quality; }
};

struct BuildArguments {
  std::optional<io::TensorAddress> key, value, seqlens;
  std::string out, layout = "bshd";
  FormatFlags formats;
  KvCacheConfig config;
  int64_t head_dim_v = 0, threads = 0;
  bool json = false;
};

// How many tokens of each sequence there are.
std::vector<int64_t> lengths_of(const BuildArguments& a, int64_t batch, int64_t longest) {
  std::vector<int64_t> lengths(static_cast<size_t>(batch), longest);
  if (!a.seqlens) return lengths;
  const std::string where = "--seqlens " + text_of(*a.seqlens);
  const io::TensorBuffer buffer = io::read_tensor(*a.seqlens);
  require(buffer.dtype() == DType::i32 && buffer.shape() == std::vector<int64_t>{batch}, where,
          std::string(name_of(buffer.dtype())) + " " + io::shape_text(buffer.shape()),
          "int32 [" + std::to_string(batch) + "]");
  for (int64_t b = 0; b < batch; ++b) {
    lengths[b] = static_cast<const int32_t*>(buffer.data())[b];
    require(lengths[b] >= 0 && lengths[b] <= longest, where, std::to_string(lengths[b]),
            "0 to " + std::to_string(longest) + ", the tokens of --k");
  }
  return lengths;
}

// Tokens [0, length) of one sequence: [length, kv_heads, dim]
Tensor sequence_of(const Tensor& tensor, int64_t batch, int64_t length) {
  Tensor rows = tensor;
  rows.rank = 3;
  rows.byte_offset += batch * tensor.stride[0] * size_of(tensor.dtype);
  for (int i = 0; i < 3; ++i) {
    rows.shape[i] = tensor.shape[i + 1];
    rows.stride[i] = tensor.stride[i + 1];
  }
  rows.shape[0] = length;
  return rows;
}

int build(BuildArguments& a) {
  const io::TensorBuffer key_buffer = read_rows("--k", *a.key);
  const Tensor key = as_bshd(key_buffer, a.layout);
  io::TensorBuffer value_buffer;
  Tensor value;
  KvCacheConfig& config = a.config;
  require(a.value.has_value() != (a.head_dim_v > 0), "--v", a.value ? "it and --value-is-key" : "nothing",
          "it, or --value-is-key N");
  if (a.value) {
    value_buffer = read_rows("--v", *a.value);
    value = as_bshd(value_buffer, a.layout);
  }
  config.kv_heads = key.shape[2];
  config.head_dim = key.shape[3];
  config.head_dim_v = a.value ? value.shape[3] : a.head_dim_v;
  config.value_is_key = !a.value;
  config.batch = key.shape[0];
  config.threads = static_cast<int>(a.threads);
  config.encode_mode = a.formats.mode();
  FormatFlags::set(config.key_format, a.formats.key);
  FormatFlags::set(config.value_format, a.formats.value);
  FormatFlags::set(config.first_key_format, a.formats.first_key);
  FormatFlags::set(config.first_value_format, a.formats.first_value);
  for (int i = 0; a.value && i < 3; ++i) {
    require(value.shape[i] == key.shape[i], "--v " + text_of(*a.value), value.shape_text(),
            "the shape of --k, " + key.shape_text() + ", but for the last dimension");
  }
  const std::vector<int64_t> lengths = lengths_of(a, key.shape[0], key.shape[1]);
  KvCache cache(config);
  Progress progress;
  for (int64_t b = 0; b < config.batch; ++b) {
    progress.show("sequence " + std::to_string(b) + " of " + std::to_string(config.batch));
    cache.append(b, sequence_of(key, b, lengths[b]), a.value ? sequence_of(value, b, lengths[b]) : Tensor{});
  }
  progress.show("writing " + one_line(a.out));
  cache.save(a.out);
  return inspect(a.out, a.json, false);
}

Command add_build(CLI::App& cache) {
  CLI::App* app = cache.add_subcommand("build", "a saved cache from keys and values");
  const auto a = std::make_shared<BuildArguments>();
  constexpr int64_t kMost = 1 << 30;
  add_tensor(*app, "--k", a->key, "key [batch, seqlen, kv_heads, head_dim]");
  add_tensor(*app, "--v", a->value, "value [batch, seqlen, kv_heads, head_dim_v]");
  app->get_option("--k")->required();
  add_integer(*app, "--value-is-key", a->head_dim_v, 1, "instead of --v: values are the first N of each key",
              576);
  add_tensor(*app, "--seqlens", a->seqlens, "int32 [batch]: only so many tokens of each sequence");
  add_choice(*app, "--layout", a->layout, {"bshd", "bhsd"}, "of --k and --v (default bshd)");
  app->add_option("--out", a->out, "the file to write")->required();
  a->formats.declare(*app, " (default f16)");
  add_integer(*app, "--page-size", a->config.page_size, 16, "tokens in a page, a power of two (default 64)",
              1 << 20);
  add_integer(*app, "--window", a->config.window, 1, "keys that a token sees, itself included (default all)",
              kMost);
  add_integer(*app, "--first-tokens", a->config.first_tokens, 0,
              "tokens with formats of their own (default 0)", kMost);
  add_integer(*app, "--threads", a->threads, 0, "CPU threads; 0 = all (default)", 4096);
  app->add_flag("--json", a->json, "report as JSON");
  return {app, [a] { return build(*a); }};
}

// ---- convert

struct ConvertArguments {
  std::string in, out;
  FormatFlags formats;
  bool json = false;
};

int convert(const ConvertArguments& a) {
  const auto format = [](const std::string& name) {
    return name.empty() ? std::nullopt : std::optional<KvFormat>(format_named(name));
  };
  KvCacheFormats formats;
  formats.key = format(a.formats.key);
  formats.value = format(a.formats.value);
  formats.first_key = format(a.formats.first_key);
  formats.first_value = format(a.formats.first_value);
  formats.encode_mode = a.formats.mode();
  Progress progress;
  progress.show("reading " + one_line(a.in));
  const KvCache cache = KvCache::load(a.in);
  progress.show("converting");
  const KvCache converted = cache.converted(formats);
  progress.show("writing " + one_line(a.out));
  converted.save(a.out);
  return inspect(a.out, a.json, false);
}

Command add_convert(CLI::App& cache) {
  CLI::App* app = cache.add_subcommand("convert", "the same tokens in other formats");
  const auto a = std::make_shared<ConvertArguments>();
  app->add_option("file", a->in, "a saved cache")->required();
  app->add_option("--out", a->out, "the file to write; may be the same")->required();
  a->formats.declare(*app, " (default as it is)");
  app->add_flag("--json", a->json, "report as JSON");
  return {app, [a] { return convert(*a); }};
}

}  // namespace

Command add_cache(CLI::App& root) {
  CLI::App* app =
      root.add_subcommand("cache", "saved KV caches: build, inspect, verify, convert, and their error");
  app->require_subcommand(1);
  const std::vector<Command> commands = {add_build(*app), add_inspect(*app, false), add_inspect(*app, true),
                                         add_convert(*app), add_cache_error(*app)};
  return {app, [commands] {
            const auto parsed = [](const Command& command) { return command.app->parsed(); };
            return std::find_if(commands.begin(), commands.end(), parsed)->run();
          }};
}

}  // namespace attnspan::cli
