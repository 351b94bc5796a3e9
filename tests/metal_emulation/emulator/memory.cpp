#include "emulator/memory.hpp"

#include <string>

#include "emulator/machine.hpp"
#include "emulator/report.hpp"

namespace emu {
namespace {

constexpr uint16_t kSeveral = 0xffff;  // read by several threads or simdgroups

std::string word(uint32_t offset) { return "threadgroup memory at byte " + std::to_string(offset); }

}  // namespace

void device_fault(const Extent* extent, const void* address, size_t bytes) {
  const void* here = __builtin_return_address(0);
  if (extent == nullptr) fail_at("access through a tensor that is not bound", here);
  const auto offset = static_cast<const unsigned char*>(address) - extent->begin;
  fail_at("access of " + std::to_string(bytes) + " bytes at byte " + std::to_string(offset) +
              " of a tensor of " + std::to_string(extent->end - extent->begin) + " bytes",
          here);
}

SharedMemory& shared_memory() { return Machine::current().shared(); }

void SharedMemory::start(uint32_t bytes) {
  bytes_ = bytes;
  ++generation_;
  if (storage_.size() * 8 < bytes) storage_.resize((bytes + 7) / 8);
  if (cells_.size() * 2 < bytes) cells_.resize((bytes + 1) / 2);
}

bool SharedMemory::ordered(const Touch& touch, const Accessor& now) const {
  if (touch.generation != generation_ || touch.threadgroup_epoch != now.threadgroup_epoch) return true;
  if (touch.simdgroup != now.simdgroup) return false;
  return touch.thread == now.thread || touch.simdgroup_epoch != now.simdgroup_epoch;
}

void SharedMemory::check_bounds(uint32_t offset, uint32_t bytes, const void* address) const {
  if (offset <= bytes_ && bytes <= bytes_ - offset) return;
  fail_at("access of " + std::to_string(bytes) + " bytes at byte " +
              std::to_string(static_cast<int32_t>(offset)) + " of " + std::to_string(bytes_) +
              " bytes of threadgroup memory",
          address);
}

[[gnu::noinline]] void* SharedMemory::read(uint32_t offset, uint32_t bytes) {
  check_bounds(offset, bytes, __builtin_return_address(0));
  const Accessor now = Machine::current().accessor();
  for (uint32_t cell = offset / 2; cell < (offset + bytes + 1) / 2; ++cell) {
    const Touch& written = cells_[cell].written;
    if (written.generation != generation_) {
      fail_at("uninitialised read of " + word(offset), __builtin_return_address(0));
    }
    if (!ordered(written, now)) {
      fail_at("race: " + word(offset) + " is read by thread " + std::to_string(now.thread) +
                  " while no barrier orders the write of thread " + std::to_string(written.thread),
              __builtin_return_address(0));
    }
    Touch& read = cells_[cell].read;
    const bool shared = read.generation == generation_ && read.threadgroup_epoch == now.threadgroup_epoch;
    if (shared && read.simdgroup != now.simdgroup) {
      read.simdgroup = kSeveral;
    } else if (shared && read.thread != now.thread && read.simdgroup_epoch == now.simdgroup_epoch) {
      read.thread = kSeveral;
    } else {
      read = {generation_, now.threadgroup_epoch, now.simdgroup_epoch, static_cast<uint16_t>(now.thread),
              static_cast<uint16_t>(now.simdgroup)};
    }
  }
  return reinterpret_cast<unsigned char*>(storage_.data()) + offset;
}

[[gnu::noinline]] void* SharedMemory::write(uint32_t offset, uint32_t bytes) {
  check_bounds(offset, bytes, __builtin_return_address(0));
  const Accessor now = Machine::current().accessor();
  for (uint32_t cell = offset / 2; cell < (offset + bytes + 1) / 2; ++cell) {
    Cell& c = cells_[cell];
    if (!ordered(c.written, now) || !ordered(c.read, now)) {
      const bool after_write = !ordered(c.written, now);
      const uint16_t other = after_write ? c.written.thread : c.read.thread;
      fail_at("race: " + word(offset) + " is written by thread " + std::to_string(now.thread) +
                  " while no barrier orders the " + (after_write ? "write" : "read") + " of " +
                  (other == kSeveral ? "other threads" : "thread " + std::to_string(other)),
              __builtin_return_address(0));
    }
    c.written = {generation_, now.threadgroup_epoch, now.simdgroup_epoch, static_cast<uint16_t>(now.thread),
                 static_cast<uint16_t>(now.simdgroup)};
  }
  return reinterpret_cast<unsigned char*>(storage_.data()) + offset;
}

}  // namespace emu
