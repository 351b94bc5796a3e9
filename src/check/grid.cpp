#include "check/grid.hpp"

#include <algorithm>

namespace attnspan::check {
namespace {

using Specs = std::vector<CaseSpec>;

const DType kDTypes[] = {DType::f32, DType::f16, DType::bf16};

std::string text(int64_t value) { return std::to_string(value); }

class Grid {
 public:
  explicit Grid(GridSize size) : size_(size) {}

  void add(CaseSpec spec, const std::string& name) {
    spec.name = name;
    spec.seed = specs_.size() + 1;
    specs_.push_back(std::move(spec));
  }
  template <typename T>
  T pick(T small, T standard, T all) const {
    return size_ == GridSize::small ? small : size_ == GridSize::standard ? standard : all;
  }
  GridSize size() const { return size_; }
  Specs take() { return std::move(specs_); }

 private:
  GridSize size_;
  Specs specs_;
};

// 0, 1, tile - 1, tile, tile + 1 and odd primes
void add_lengths(Grid& grid) {
  const std::vector<int64_t> q =
      grid.pick<std::vector<int64_t>>({0, 1, 17, 64, 65}, {0, 1, 15, 17, 63, 64, 65, 113},
                                      {0, 1, 2, 15, 16, 17, 31, 63, 64, 65, 113, 127, 128, 129});
  const std::vector<int64_t> k =
      grid.pick<std::vector<int64_t>>({0, 1, 33, 64, 67}, {0, 1, 15, 17, 63, 64, 65, 131, 257},
                                      {0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257, 521});
  for (int64_t seqlen_q : q) {
    for (int64_t seqlen_k : k) {
      for (bool causal : {false, true}) {
        CaseSpec s;
        s.batch = 1;
        s.heads = s.kv_heads = 1;
        s.seqlen_q = seqlen_q;
        s.seqlen_k = seqlen_k;
        s.causal = causal;
        grid.add(s, "length_" + text(seqlen_q) + "x" + text(seqlen_k) + (causal ? "_causal" : ""));
      }
    }
  }
}

void add_head_dims(Grid& grid) {
  const std::vector<std::pair<int64_t, int64_t>> dims = grid.pick<std::vector<std::pair<int64_t, int64_t>>>(
      {{1, 1},
       {3, 3},
       {40, 40},
       {64, 64},
       {72, 72},
       {100, 100},
       {128, 128},
       {192, 128},
       {256, 256},
       {576, 512}},
      {{1, 1},
       {3, 3},
       {40, 24},
       {64, 64},
       {72, 72},
       {80, 80},
       {96, 96},
       {100, 100},
       {128, 128},
       {192, 128},
       {192, 192},
       {256, 256},
       {512, 512},
       {576, 512},
       {576, 576}},
      {{1, 1},     {2, 1},     {3, 3},     {7, 9},     {16, 16},   {31, 33},   {40, 24},
       {64, 64},   {64, 128},  {72, 72},   {80, 80},   {96, 96},   {100, 100}, {127, 129},
       {128, 128}, {160, 160}, {192, 128}, {192, 192}, {256, 256}, {257, 257}, {320, 256},
       {512, 512}, {575, 511}, {576, 512}, {576, 576}});
  for (DType dtype : kDTypes) {
    for (const auto& [head_dim, head_dim_v] : dims) {
      CaseSpec s;
      s.batch = 1;
      s.heads = s.kv_heads = 1;
      s.seqlen_q = grid.pick(19, 37, 67);
      s.seqlen_k = grid.pick(37, 67, 131);
      s.dtype = dtype;
      s.head_dim = head_dim;
      s.head_dim_v = head_dim_v;
      s.causal = true;
      grid.add(s, std::string("head_dim_") + text(head_dim) + "_" + text(head_dim_v) + "_" + name_of(dtype));
    }
  }
}

void add_gqa(Grid& grid) {
  for (int64_t ratio : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16}) {
    CaseSpec s;
    s.batch = 1;
    s.kv_heads = 2;
    s.heads = 2 * ratio;
    s.seqlen_q = 19;
    s.seqlen_k = 35;
    s.causal = true;
    grid.add(s, "gqa_" + text(ratio));
  }
}

void add_layouts(Grid& grid) {
  for (DType dtype : kDTypes) {
    for (Layout layout : {Layout::bshd, Layout::bhsd, Layout::sliced, Layout::broadcast}) {
      CaseSpec s;
      s.dtype = dtype;
      s.layout = layout;
      s.seqlen_q = 35;
      s.seqlen_k = 49;
      s.head_dim = 40;
      s.head_dim_v = 56;
      grid.add(s, std::string("layout_") + name_of(layout) + "_" + name_of(dtype));
    }
  }
}

void add_masks(Grid& grid) {
  struct Mask {
    const char* name;
    bool causal;
    int64_t left, right;
    Diagonal diagonal;
  };
  const Mask masks[] = {
      {"window_0_0", false, 0, 0, {}},
      {"window_7_left", false, 7, -1, {}},
      {"window_5_right", false, -1, 5, {}},
      {"window_16_3", false, 16, 3, {}},
      {"causal_window_20", true, 20, -1, {}},
      {"causal_window_33_5", true, 33, 5, {}},
      {"causal_top_left", true, -1, -1, Diagonal::top_left()},
      {"window_top_left", false, 9, 9, Diagonal::top_left()},
      {"chunk_at_13", true, -1, -1, Diagonal::at(13)},
      {"diagonal_before_all_keys", true, -1, -1, Diagonal::at(-200)},
      {"diagonal_after_all_keys", true, 11, -1, Diagonal::at(200)},
      {"window_begins_mid_tile", true, 3, -1, Diagonal::at(30)},
  };
  for (const Mask& mask : masks) {
    for (const auto& [seqlen_q, seqlen_k] : {std::pair<int64_t, int64_t>{67, 67}, {35, 103}, {103, 35}}) {
      CaseSpec s;
      s.batch = 1;
      s.heads = 2;
      s.kv_heads = 1;
      s.seqlen_q = seqlen_q;
      s.seqlen_k = seqlen_k;
      s.causal = mask.causal;
      s.window_left = mask.left;
      s.window_right = mask.right;
      s.diagonal = mask.diagonal;
      grid.add(s, std::string(mask.name) + "_" + text(seqlen_q) + "x" + text(seqlen_k));
    }
  }
  const std::pair<const char*, Documents> documents[] = {{"document_starts", Documents::starts},
                                                         {"document_starts_ends", Documents::starts_ends},
                                                         {"left_padded", Documents::left_padded},
                                                         {"right_padded", Documents::right_padded}};
  for (const auto& [name, kind] : documents) {
    for (bool causal : {false, true}) {
      CaseSpec s;
      s.seqlen_q = s.seqlen_k = 71;
      s.documents = kind;
      s.causal = causal;
      grid.add(s, std::string(name) + (causal ? "_causal" : ""));
    }
  }
}

void add_packed(Grid& grid) {
  const std::vector<int64_t> q = {5, 0, 1, 33, 17, 0, 1}, k = {5, 3, 1, 49, 0, 0, 7};
  for (DType dtype : kDTypes) {
    for (bool causal : {false, true}) {
      CaseSpec s;
      s.dtype = dtype;
      s.packed_q = q;
      s.packed_k = k;
      s.causal = causal;
      grid.add(s, std::string("packed_") + name_of(dtype) + (causal ? "_causal" : ""));
      s.window_left = 6;
      s.alibi = s.sinks = true;
      s.softcap = 20;
      grid.add(
          s, std::string("packed_window_alibi_sinks_softcap_") + name_of(dtype) + (causal ? "_causal" : ""));
    }
  }
}

void add_scores(Grid& grid) {
  for (DType dtype : kDTypes) {
    CaseSpec base;
    base.seqlen_q = 35;
    base.seqlen_k = 67;
    base.dtype = dtype;
    const std::string suffix = std::string("_") + name_of(dtype);
    CaseSpec s = base;
    s.softcap = 2;
    grid.add(s, "softcap" + suffix);
    s = base;
    s.bias = true;
    grid.add(s, "bias" + suffix);
    s.masking_bias = true;
    grid.add(s, "masking_bias" + suffix);
    s = base;
    s.alibi = true;
    grid.add(s, "alibi" + suffix);
    s = base;
    s.sinks = true;
    grid.add(s, "sinks" + suffix);
    s.seqlen_k = 0;
    grid.add(s, "sinks_without_keys" + suffix);
    s = base;
    s.seqused_k = true;
    s.causal = true;
    grid.add(s, "seqused_k" + suffix);
    s = base;
    s.softmax_scale = 0.37F;
    grid.add(s, "softmax_scale" + suffix);
    s = base;
    s.values = Values::extreme;
    grid.add(s, "extreme_logits" + suffix);
    s.causal = true;
    s.window_left = 3;
    grid.add(s, "extreme_logits_window" + suffix);
  }
}

// Random products of features, the same on every machine.
void add_products(Grid& grid, int count, bool backward) {
  Random random(20260901);
  const auto chance = [&](int percent) { return static_cast<int>(random() % 100) < percent; };
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  for (int i = 0; i < count; ++i) {
    CaseSpec s;
    s.dtype = kDTypes[below(3)];
    s.layout = static_cast<Layout>(below(backward ? 3 : 4));
    s.batch = 1 + below(2);
    s.kv_heads = 1 + below(2);
    s.heads = s.kv_heads * (1 + below(4));
    const int64_t dims[] = {8, 40, 64, 72, 96, 128};
    s.head_dim = dims[below(6)];
    s.head_dim_v = chance(70) ? s.head_dim : dims[below(6)];
    const int64_t longest = grid.pick<int64_t>(70, 150, 300);
    s.seqlen_q = below(longest);
    s.seqlen_k = below(longest);
    s.causal = chance(60);
    if (chance(50)) s.window_left = below(40);
    if (chance(20)) s.window_right = below(20);
    if (chance(30)) s.diagonal = chance(50) ? Diagonal::top_left() : Diagonal::at(below(60) - 20);
    if (chance(30)) s.softcap = 5;
    s.bias = chance(25);
    s.masking_bias = s.bias && chance(50);
    s.alibi = chance(25);
    s.sinks = chance(25);
    s.dlse = chance(40);
    if (chance(30)) {
      s.documents = static_cast<Documents>(1 + below(4));
    } else if (chance(25)) {
      s.seqused_k = true;
    } else if (!s.bias && chance(30)) {
      s.packed_q = {below(20), below(40), 0, 1};
      s.packed_k = {below(40), below(40), below(5), below(30)};
    }
    grid.add(s, "product_" + text(i));
  }
}

}  // namespace

Specs forward_grid(GridSize size) {
  Grid grid(size);
  add_lengths(grid);
  add_head_dims(grid);
  add_gqa(grid);
  add_layouts(grid);
  add_masks(grid);
  add_packed(grid);
  add_scores(grid);
  add_products(grid, grid.pick(30, 150, 1000), false);
  return grid.take();
}

Specs backward_grid(GridSize size) {
  Grid grid(size);
  add_lengths(grid);
  add_head_dims(grid);
  add_gqa(grid);
  add_layouts(grid);
  add_masks(grid);
  add_packed(grid);
  add_scores(grid);
  add_products(grid, grid.pick(30, 120, 800), true);
  Specs specs = grid.take();
  for (CaseSpec& s : specs) {
    if (s.layout == Layout::broadcast)
      s.layout = Layout::bshd;  // gradients of a broadcast input are the caller's sum
  }
  return specs;
}

Specs decode_grid(GridSize size) {
  Grid grid(size);
  const std::vector<int64_t> lengths = grid.pick<std::vector<int64_t>>({1, 63, 300}, {1, 255, 1000, 2049},
                                                                       {1, 63, 255, 1000, 2049, 5000, 9001});
  for (DType dtype : kDTypes) {
    for (int64_t seqlen_q : {1, 2, 5, 16}) {
      for (int64_t seqlen_k : lengths) {
        CaseSpec s;
        s.batch = 1;
        s.dtype = dtype;
        s.seqlen_q = seqlen_q;
        s.seqlen_k = seqlen_k;
        s.kv_heads = 1;
        s.heads = seqlen_q == 5 ? 7 : 4;
        s.head_dim = s.head_dim_v = seqlen_q == 2 ? 96 : 128;
        s.causal = true;
        s.seqused_k = seqlen_q == 16;
        const std::string name = text(seqlen_q) + "x" + text(seqlen_k) + "_" + name_of(dtype);
        grid.add(s, "decode_" + name);
        s.window_left = 70;
        s.softcap = 8;
        s.sinks = true;
        grid.add(s, "decode_window_softcap_sinks_" + name);
      }
    }
  }
  for (int64_t ratio : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16}) {
    CaseSpec s;
    s.seqlen_q = 1;
    s.seqlen_k = grid.pick(200, 700, 3000);
    s.kv_heads = 2;
    s.heads = 2 * ratio;
    grid.add(s, "decode_gqa_" + text(ratio));
  }
  return grid.take();
}

Specs cache_grid(GridSize size) {
  Grid grid(size);
  const KvFormat formats[] = {KvFormat::f32, KvFormat::f16, KvFormat::bf16, KvFormat::q8, KvFormat::tbq4};
  const int64_t longest = grid.pick<int64_t>(150, 700, 3000);
  for (KvFormat k_format : formats) {
    for (KvFormat v_format : formats) {
      for (int64_t seqlen_q : {1, 5, 40}) {
        CaseSpec s;
        s.cache = true;
        s.k_format = k_format;
        s.v_format = v_format;
        s.seqlen_q = seqlen_q;
        s.seqlen_k = longest;
        s.heads = 6;
        s.kv_heads = 2;
        s.head_dim = s.head_dim_v = 128;
        s.causal = true;
        s.dtype = seqlen_q == 5 ? DType::bf16 : DType::f32;
        if (size == GridSize::small && k_format != v_format && seqlen_q == 40) continue;
        grid.add(s, std::string("cache_") + name_of(k_format) + "_" + name_of(v_format) + "_rows_" +
                        text(seqlen_q));
      }
    }
  }
  for (KvFormat format : formats) {
    for (const auto& [head_dim, head_dim_v] : {std::pair<int64_t, int64_t>{64, 64},
                                               {80, 80},
                                               {96, 40},
                                               {100, 100},
                                               {192, 128},
                                               {256, 256},
                                               {576, 512}}) {
      CaseSpec s;
      s.cache = true;
      s.k_format = s.v_format = format;
      s.seqlen_q = 3;
      s.seqlen_k = 83;
      s.head_dim = head_dim;
      s.head_dim_v = head_dim_v;
      s.page_size = 32;
      s.causal = true;
      grid.add(s, std::string("cache_") + name_of(format) + "_head_dim_" + text(head_dim) + "_" +
                      text(head_dim_v));
      s.page_size = 0;
      s.window_left = 20;
      s.softcap = 10;
      s.alibi = s.sinks = true;
      s.seqlen_q = 21;
      grid.add(s, std::string("cache_dense_features_") + name_of(format) + "_head_dim_" + text(head_dim) +
                      "_" + text(head_dim_v));
    }
  }
  return grid.take();
}

}  // namespace attnspan::check
