#pragma once
// Sized structs of callers whose header may be older or newer than this library, and numbers that are names.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "core/validation.hpp"

namespace attnspan::capi {

// The caller's struct as this library knows it. Fields that an older header lacks get `defaults`; fields that
// a newer header has beyond ours must be zero, since we cannot do what they ask for.
template <typename T>
T load(const T* from, const char* name, const T& defaults) {
  require(from != nullptr, name, "a null pointer", "a struct");
  const size_t size = from->struct_size;
  require(size >= sizeof(size_t) && size <= 16 * sizeof(T), name, "struct_size " + std::to_string(size),
          std::to_string(sizeof(T)) + ", as the _init function sets it");
  T value = defaults;
  std::memcpy(&value, from, std::min(size, sizeof(T)));
  const auto* bytes = reinterpret_cast<const unsigned char*>(from);
  for (size_t i = sizeof(T); i < size; ++i) {
    require(bytes[i] == 0, name, "fields that this version of the library does not know", "them to be 0");
  }
  return value;
}

template <typename T>
void save(const T& value, T* to, const char* name) {
  require(to != nullptr, name, "a null pointer", "a struct");
  const size_t size = to->struct_size;
  require(size >= sizeof(size_t), name, "struct_size " + std::to_string(size),
          std::to_string(sizeof(T)) + ", as the _init function sets it");
  std::memcpy(to, &value, std::min(size, sizeof(T)));
  to->struct_size = size;
}

template <typename Enum>
Enum checked_enum(int32_t value, int32_t last, const char* name, const char* what) {
  require(value >= 0 && value <= last, name, std::string(what) + " " + std::to_string(value),
          "0 to " + std::to_string(last));
  return static_cast<Enum>(value);
}

}  // namespace attnspan::capi
