#pragma once
// What a model's attention layers keep in a cache, from a Hugging Face config.json or a GGUF header.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace attnspan::cli {

// Layers that are alike.
struct LayerGroup {
  int64_t layers = 0;
  int64_t heads = 0;  // 0: not known
  int64_t kv_heads = 0;
  int64_t head_dim = 0, head_dim_v = 0;
  bool value_is_key = false;  // MLA: one row of head_dim, whose first head_dim_v values are the value
  int64_t window = -1;        // keys that a token sees, itself included; -1 = all
};

struct ModelShape {
  std::string source;                // where it comes from, for the report
  std::vector<LayerGroup> groups;    // layers with a cache
  int64_t layers_without_cache = 0;  // linear attention, state spaces, layers that read another layer's cache
  int64_t context = 0;               // the model's own limit; 0: not known
  double weight_bytes = 0;           // 0: not known
};

// A file by its first bytes: GGUF, else JSON. Throws Error(io) naming the file and the key that is missing.
ModelShape read_model_shape(const std::string& path);

}  // namespace attnspan::cli
