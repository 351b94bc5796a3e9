#include "model_shape.hpp"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "attnspan/error.hpp"
#include "io/file.hpp"
#include "io/gguf.hpp"

namespace attnspan::cli {
namespace {

using nlohmann::json;

constexpr int64_t kMaxCount = 1 << 20;  // of layers, heads, dims: nothing real is near, and products fit

int64_t checked(int64_t value, const std::string& path, const std::string& key, int64_t lowest = 1) {
  if (value < lowest || value > kMaxCount) {
    throw Error(ErrorCode::io, path,
                "found " + std::to_string(value) + " under '" + key + "', expected " +
                    std::to_string(lowest) + " to " + std::to_string(kMaxCount));
  }
  return value;
}

// Every how many layers one sees everything, in families whose files may leave it out. Others: every layer
// has the window that the file names (Hugging Face), or none has (GGUF, where the runtime decides).
struct WindowPeriod {
  const char* family;
  int64_t period;
};
constexpr WindowPeriod kWindowPeriods[] = {{"gemma2", 2},  {"gemma3n", 5}, {"gemma3", 6},  {"gemma3_text", 6},
                                           {"cohere2", 4}, {"exaone4", 4}, {"gpt-oss", 2}, {"gpt_oss", 2}};

std::optional<int64_t> window_period(const std::string& family) {
  for (const WindowPeriod& known : kWindowPeriods) {
    if (family == known.family) return known.period;
  }
  return std::nullopt;
}

// Layers that follow each other in any order, gathered into groups of equals.
class Groups {
 public:
  void add(const LayerGroup& layer) {
    for (LayerGroup& group : groups_) {
      if (group.heads == layer.heads && group.kv_heads == layer.kv_heads &&
          group.head_dim == layer.head_dim && group.head_dim_v == layer.head_dim_v &&
          group.value_is_key == layer.value_is_key && group.window == layer.window) {
        ++group.layers;
        return;
      }
    }
    groups_.push_back(layer);
    groups_.back().layers = 1;
  }
  std::vector<LayerGroup> take() { return std::move(groups_); }

 private:
  std::vector<LayerGroup> groups_;
};

// ---- config.json

class Config {
 public:
  explicit Config(const std::string& path) : path_(path) {
    io::InputFile file(path);
    constexpr int64_t kMaxConfig = 64 << 20;
    if (file.size() > kMaxConfig) throw Error(ErrorCode::io, path, "is too large for a config.json");
    std::string text(static_cast<size_t>(file.size()), '\0');
    file.read_at(0, text.data(), file.size());
    root_ = json::parse(text, nullptr, false);
    if (!root_.is_object()) throw Error(ErrorCode::io, path, "is neither a GGUF file nor a JSON object");
    // Models that also see or hear keep their language model one level down.
    for (const char* part : {"text_config", "llm_config", "language_config"}) {
      if (root_.contains(part) && root_[part].is_object()) {
        root_ = json(root_[part]);
        break;
      }
    }
  }

  const std::string& path() const { return path_; }
  std::string family() const {
    const json* type = find({"model_type"});
    return type != nullptr && type->is_string() ? type->get<std::string>() : "";
  }
  const json* find(std::initializer_list<const char*> keys) const {
    for (const char* key : keys) {
      const auto found = root_.find(key);
      if (found != root_.end() && !found->is_null()) return &*found;
    }
    return nullptr;
  }
  std::optional<int64_t> number(std::initializer_list<const char*> keys, int64_t lowest = 1) const {
    const json* value = find(keys);
    if (value == nullptr || !value->is_number_integer()) return std::nullopt;
    return checked(value->get<int64_t>(), path_, *keys.begin(), lowest);
  }
  int64_t required(std::initializer_list<const char*> keys) const {
    if (const auto value = number(keys)) return *value;
    throw Error(ErrorCode::io, path_, std::string("has no '") + *keys.begin() + "'");
  }
  // One number for all layers, or one for each.
  int64_t of_layer(std::initializer_list<const char*> keys, int64_t layer, int64_t otherwise) const {
    const json* value = find(keys);
    if (value == nullptr || !value->is_array()) return number(keys).value_or(otherwise);
    const auto i = static_cast<size_t>(layer);
    if (i >= value->size() || !(*value)[i].is_number_integer()) {
      throw Error(ErrorCode::io, path_,
                  std::string("'") + *keys.begin() + "' has no entry for layer " + std::to_string(layer));
    }
    return checked((*value)[i].get<int64_t>(), path_, *keys.begin(), 0);
  }

 private:
  std::string path_;
  json root_;
};

enum class LayerKind { full, window, none };

LayerKind kind_by_name(const std::string& name) {
  if (name.find("linear") != std::string::npos || name.find("mamba") != std::string::npos ||
      name.find("conv") != std::string::npos || name.find("recurrent") != std::string::npos) {
    return LayerKind::none;
  }
  const bool window = name.find("sliding") != std::string::npos || name.find("local") != std::string::npos ||
                      name.find("chunked") != std::string::npos;
  return window ? LayerKind::window : LayerKind::full;
}

LayerKind kind_of_layer(const Config& config, int64_t layer, bool has_window) {
  if (const json* types = config.find({"layer_types", "layers_block_type"});
      types != nullptr && types->is_array()) {
    const auto i = static_cast<size_t>(layer);
    if (i >= types->size() || !(*types)[i].is_string()) {
      throw Error(ErrorCode::io, config.path(),
                  "'layer_types' has no entry for layer " + std::to_string(layer));
    }
    return kind_by_name((*types)[i].get<std::string>());
  }
  if (const auto interval = config.number({"full_attention_interval"})) {
    return (layer + 1) % *interval == 0 ? LayerKind::full : LayerKind::none;
  }
  if (const auto period = config.number({"attn_layer_period"})) {
    return layer % *period == config.number({"attn_layer_offset"}, 0).value_or(0) ? LayerKind::full
                                                                                  : LayerKind::none;
  }
  if (!has_window) return LayerKind::full;
  auto pattern = config.number({"sliding_window_pattern"});
  if (!pattern) pattern = window_period(config.family());
  if (pattern) return (layer + 1) % *pattern == 0 ? LayerKind::full : LayerKind::window;
  return LayerKind::window;
}

// The bytes of the weights, where the checkpoint lies beside its config.
double weights_beside(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::ifstream index(folder / "model.safetensors.index.json");
  if (index) {
    const json parsed = json::parse(index, nullptr, false);
    if (parsed.is_object() && parsed.contains("metadata") && parsed["metadata"].is_object() &&
        parsed["metadata"].contains("total_size") && parsed["metadata"]["total_size"].is_number()) {
      return parsed["metadata"]["total_size"].get<double>();
    }
  }
  std::error_code error;
  const auto size = std::filesystem::file_size(folder / "model.safetensors", error);
  return error ? 0 : static_cast<double>(size);
}

ModelShape shape_of_config(const std::string& path) {
  const Config config(path);
  ModelShape shape;
  shape.source = path;
  shape.context =
      config.number({"max_position_embeddings", "n_positions", "n_ctx", "seq_length"}).value_or(0);
  shape.weight_bytes = weights_beside(path);
  const int64_t layers = config.required({"num_hidden_layers", "n_layer", "n_layers", "num_layers"});
  const int64_t heads = config.required({"num_attention_heads", "n_head", "n_heads", "num_heads"});
  const json* use_window = config.find({"use_sliding_window"});
  const bool window_off = use_window != nullptr && use_window->is_boolean() && !use_window->get<bool>();
  const int64_t window =
      window_off
          ? 0
          : config.number({"sliding_window", "sliding_window_size", "attention_chunk_size"}, 0).value_or(0);
  const json* multi_query = config.find({"multi_query"});
  const bool one_kv_head = multi_query != nullptr && multi_query->is_boolean() && multi_query->get<bool>();
  const auto latent = config.number({"kv_lora_rank"});
  // Gemma 3n: the last layers read the caches of earlier ones.
  const int64_t own = layers - std::min(layers, config.number({"num_kv_shared_layers"}, 0).value_or(0));

  Groups groups;
  for (int64_t i = 0; i < layers; ++i) {
    const LayerKind kind = i < own ? kind_of_layer(config, i, window > 0) : LayerKind::none;
    LayerGroup layer;
    layer.heads = config.of_layer({"num_attention_heads", "n_head", "n_heads", "num_heads"}, i, heads);
    layer.kv_heads =
        config.of_layer({"num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"}, i,
                        one_kv_head ? 1 : layer.heads);
    if (kind == LayerKind::none || layer.kv_heads == 0) {
      ++shape.layers_without_cache;
      continue;
    }
    if (latent) {
      layer.kv_heads = 1;
      layer.head_dim_v = *latent;
      layer.head_dim = *latent + config.number({"qk_rope_head_dim"}, 0).value_or(0);
      layer.value_is_key = true;
    } else {
      const auto dim = config.number({"head_dim", "attention_head_dim", "kv_channels"});
      layer.head_dim = dim ? *dim : config.required({"hidden_size", "n_embd", "d_model"}) / heads;
      layer.head_dim_v = config.number({"v_head_dim", "head_dim_v"}).value_or(layer.head_dim);
    }
    if (kind == LayerKind::window && window > 0) layer.window = window;
    groups.add(layer);
  }
  shape.groups = groups.take();
  return shape;
}

// ---- GGUF

ModelShape shape_of_gguf(const std::string& path) {
  const io::GgufHeader header = io::read_gguf(path);
  const auto architecture = header.strings.find("general.architecture");
  if (architecture == header.strings.end()) throw Error(ErrorCode::io, path, "has no 'general.architecture'");
  const auto find = [&](const std::string& key) -> const std::vector<int64_t>* {
    const auto found = header.integers.find(architecture->second + "." + key);
    return found == header.integers.end() || found->second.empty() ? nullptr : &found->second;
  };
  const auto number = [&](const std::string& key, int64_t otherwise, int64_t lowest = 1) {
    const auto* values = find(key);
    return values == nullptr ? otherwise : checked(values->front(), path, key, lowest);
  };
  const auto of_layer = [&](const std::string& key, int64_t layer, int64_t otherwise) {
    const auto* values = find(key);
    if (values == nullptr) return otherwise;
    const auto i = values->size() == 1 ? 0 : static_cast<size_t>(layer);
    if (i >= values->size()) {
      throw Error(ErrorCode::io, path, "'" + key + "' has no entry for layer " + std::to_string(layer));
    }
    return checked((*values)[i], path, key, 0);
  };
  const auto required = [&](const std::string& key) {
    if (find(key) == nullptr) {
      throw Error(ErrorCode::io, path, "has no '" + architecture->second + "." + key + "'");
    }
    return number(key, 0, 0);
  };

  ModelShape shape;
  shape.source = path;
  shape.context = number("context_length", 0);
  const auto split = header.integers.find("split.count");
  const bool whole = split == header.integers.end() || split->second[0] <= 1;
  if (whole) shape.weight_bytes = static_cast<double>(header.tensor_bytes);
  const int64_t layers = checked(required("block_count"), path, "block_count");
  required("attention.head_count");
  const int64_t latent = number("attention.kv_lora_rank", 0, 0);
  const int64_t window = number("attention.sliding_window", 0, 0);
  const int64_t interval = number("full_attention_interval", 1);

  Groups groups;
  for (int64_t i = 0; i < layers; ++i) {
    LayerGroup layer;
    layer.heads = of_layer("attention.head_count", i, 0);
    layer.kv_heads = of_layer("attention.head_count_kv", i, layer.heads);
    if (layer.heads == 0 || layer.kv_heads == 0 || (i + 1) % interval != 0) {
      ++shape.layers_without_cache;
      continue;
    }
    if (latent > 0) {
      layer.kv_heads = 1;
      layer.head_dim_v = latent;
      layer.head_dim = latent + number("rope.dimension_count", 0, 0);
      layer.value_is_key = true;
    } else {
      const auto* width = find("attention.key_length");
      layer.head_dim = width != nullptr
                           ? number("attention.key_length", 0)
                           : checked(required("embedding_length") / layer.heads, path, "embedding_length");
      layer.head_dim_v = number("attention.value_length", layer.head_dim);
    }
    // One flag per layer, or a period: the last layer of each sees everything.
    const auto* pattern = find("attention.sliding_window_pattern");
    if (pattern != nullptr && pattern->size() > 1) {
      if (of_layer("attention.sliding_window_pattern", i, 0) != 0 && window > 0) layer.window = window;
    } else {
      const int64_t period = pattern != nullptr ? std::max<int64_t>(1, pattern->front())
                                                : window_period(architecture->second).value_or(1);
      if ((i + 1) % period != 0 && window > 0) layer.window = window;
    }
    groups.add(layer);
  }
  shape.groups = groups.take();
  return shape;
}

}  // namespace

ModelShape read_model_shape(const std::string& path) {
  io::InputFile file(path);
  char magic[4] = {};
  if (file.size() >= 4) file.read_at(0, magic, 4);
  ModelShape shape = std::string(magic, 4) == "GGUF" ? shape_of_gguf(path) : shape_of_config(path);
  if (shape.groups.empty()) throw Error(ErrorCode::io, path, "has no layer with a KV cache");
  for (const LayerGroup& group : shape.groups) {
    if (group.head_dim > 576 || group.head_dim_v > 576) {
      throw Error(ErrorCode::io, path,
                  "found head dims " + std::to_string(group.head_dim) + " and " +
                      std::to_string(group.head_dim_v) + ", expected 1 to 576");
    }
  }
  return shape;
}

}  // namespace attnspan::cli
