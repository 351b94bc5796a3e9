#pragma once
/// Non-owning tensor views. Memory layouts (BSHD, BHSD, packed, sliced, broadcast) are strides, never copies.

#include <array>
#include <cstdint>
#include <string>

namespace attnspan {

enum class DType : int32_t { f32 = 0, f16 = 1, bf16 = 2, i32 = 3 };
enum class Device : int32_t { cpu = 0, cuda = 1, webgpu = 2, metal = 3 };

/// Bytes of one element.
constexpr int64_t size_of(DType dtype) { return dtype == DType::f16 || dtype == DType::bf16 ? 2 : 4; }
const char* name_of(DType dtype);
const char* name_of(Device device);

inline constexpr int kMaxRank = 4;

/// A view of up to four dimensions. rank == 0 means "not given".
/// `data` is an address on `device` (for Device::webgpu a WGPUBuffer, for Device::metal an MTLBuffer).
struct Tensor {
  void* data = nullptr;
  int64_t byte_offset = 0;  ///< of the first element from `data`
  DType dtype = DType::f32;
  Device device = Device::cpu;
  int rank = 0;
  std::array<int64_t, kMaxRank> shape{};
  std::array<int64_t, kMaxRank> stride{};  ///< in elements

  explicit operator bool() const { return rank != 0; }
  int64_t numel() const {
    int64_t n = rank == 0 ? 0 : 1;
    for (int i = 0; i < rank; ++i) n *= shape[i];
    return n;
  }
  std::string shape_text() const;  ///< "[2, 128, 8, 64]"
};

/// Dense row-major view of any shape.
Tensor contiguous(const void* data, DType dtype, std::initializer_list<int64_t> shape,
                  Device device = Device::cpu);
/// `[batch, seqlen, heads, dim]` over memory in that order.
Tensor bshd(const void* data, DType dtype, int64_t batch, int64_t seqlen, int64_t heads, int64_t dim,
            Device device = Device::cpu);
/// The same shape `[batch, seqlen, heads, dim]` over memory ordered `[batch, heads, seqlen, dim]`.
Tensor bhsd(const void* data, DType dtype, int64_t batch, int64_t seqlen, int64_t heads, int64_t dim,
            Device device = Device::cpu);
/// The view with two dimensions exchanged.
Tensor transposed(const Tensor& tensor, int dim_a, int dim_b);

}  // namespace attnspan
