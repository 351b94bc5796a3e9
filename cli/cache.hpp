#pragma once
// The parts of `attnspan cache` that have files of their own, and what they share.

#include <string>
#include <vector>

#include "attnspan/kv_view.hpp"
#include "commands.hpp"
#include "io/tensor_file.hpp"

namespace attnspan::cli {

Command add_cache_error(CLI::App& cache);

inline const std::vector<std::string> kFormatNames = {"f32", "f16", "bf16", "q8", "tbq4"};
// A name that add_choice has checked.
KvFormat format_named(const std::string& name);

// Reads a tensor of rank 4 as [batch, seqlen, heads, dim]; errors name the flag and the file.
io::TensorBuffer read_rows(const std::string& flag, const io::TensorAddress& address);
Tensor as_bshd(const io::TensorBuffer& buffer, const std::string& layout);
std::string text_of(const io::TensorAddress& address);

}  // namespace attnspan::cli
