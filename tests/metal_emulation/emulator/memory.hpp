#pragma once
// Memory as kernels see it. `device T*` is a pointer with bounds. `threadgroup T*` goes through a shadow that
// knows who touched every two bytes last: reading what nobody wrote, and accesses of two threads that no
// barrier orders, are faults, whatever the schedule.

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace emu {

// The bytes of one bound tensor or buffer.
struct Extent {
  unsigned char* begin = nullptr;
  unsigned char* end = nullptr;
};

[[noreturn, gnu::cold, gnu::noinline]] void device_fault(const Extent* extent, const void* address,
                                                         size_t bytes);

template <typename T>
class DevicePointer {
 public:
  using Byte = std::conditional_t<std::is_const_v<T>, const unsigned char, unsigned char>;

  DevicePointer() = default;
  DevicePointer(unsigned char* address, const Extent* extent) : address_(address), extent_(extent) {}
  template <typename U>
  requires(!std::is_const_v<U> || std::is_const_v<T>) explicit(!std::is_same_v<const U, T>)
      DevicePointer(const DevicePointer<U>& other)
      : address_(other.address()), extent_(other.extent()) {}

  T& operator[](int64_t index) const {
    unsigned char* element = address_ + index * static_cast<int64_t>(sizeof(T));
    if (extent_ == nullptr || element < extent_->begin || element + sizeof(T) > extent_->end) [[unlikely]] {
      device_fault(extent_, element, sizeof(T));
    }
    return *reinterpret_cast<T*>(element);
  }
  T& operator*() const { return (*this)[0]; }
  DevicePointer operator+(int64_t elements) const {
    return {address_ + elements * static_cast<int64_t>(sizeof(T)), extent_};
  }
  DevicePointer& operator+=(int64_t elements) { return *this = *this + elements; }

  unsigned char* address() const { return address_; }
  const Extent* extent() const { return extent_; }

 private:
  unsigned char* address_ = nullptr;
  const Extent* extent_ = nullptr;
};

// Who accesses, and how many memory-ordering barriers it has passed.
struct Accessor {
  uint32_t thread, simdgroup, threadgroup_epoch, simdgroup_epoch;
};

class SharedMemory {
 public:
  void start(uint32_t bytes);
  void* read(uint32_t offset, uint32_t bytes);
  void* write(uint32_t offset, uint32_t bytes);

 private:
  struct Touch {
    uint32_t generation = 0;  // of the threadgroup; an old one is no touch
    uint32_t threadgroup_epoch = 0;
    uint32_t simdgroup_epoch = 0;
    uint16_t thread = 0;
    uint16_t simdgroup = 0;
  };
  struct Cell {
    Touch written, read;
  };
  bool ordered(const Touch& touch, const Accessor& now) const;
  void check_bounds(uint32_t offset, uint32_t bytes, const void* address) const;

  std::vector<uint64_t> storage_;  // 8-byte aligned
  std::vector<Cell> cells_;        // one per two bytes
  uint32_t bytes_ = 0;
  uint32_t generation_ = 0;
};

SharedMemory& shared_memory();

template <typename T>
class SharedReference {
 public:
  explicit SharedReference(uint32_t offset) : offset_(offset) {}
  operator T() const {
    std::remove_const_t<T> value;
    std::memcpy(&value, shared_memory().read(offset_, sizeof(T)), sizeof(T));
    return value;
  }
  const SharedReference& operator=(const T& value) const {
    std::memcpy(shared_memory().write(offset_, sizeof(T)), &value, sizeof(T));
    return *this;
  }
  const SharedReference& operator=(const SharedReference& other) const {
    return *this = static_cast<T>(other);
  }
  const SharedReference& operator+=(const T& value) const { return *this = static_cast<T>(*this) + value; }
  const SharedReference& operator*=(const T& value) const { return *this = static_cast<T>(*this) * value; }
  SharedReference(const SharedReference&) = default;

 private:
  uint32_t offset_;
};

template <typename T>
class SharedPointer {
 public:
  SharedPointer() = default;
  explicit SharedPointer(uint32_t offset) : offset_(offset) {}
  template <typename U>
  requires(!std::is_const_v<U> || std::is_const_v<T>) explicit(!std::is_same_v<const U, T>)
      SharedPointer(const SharedPointer<U>& other)
      : offset_(other.offset()) {}

  SharedReference<T> operator[](int index) const { return SharedReference<T>(at(index)); }
  SharedPointer operator+(int elements) const { return SharedPointer(at(elements)); }
  uint32_t offset() const { return offset_; }

 private:
  uint32_t at(int index) const {
    return offset_ + static_cast<uint32_t>(index * static_cast<int>(sizeof(T)));
  }
  uint32_t offset_ = 0;
};

}  // namespace emu
