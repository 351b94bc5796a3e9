#include "emulated_device.hpp"

#include <cstdlib>
#include <cstring>

#include "attnspan/error.hpp"
#include "emulator/kernel.hpp"
#include "emulator/report.hpp"

namespace attnspan::metal_emulation {
namespace {

// What stands for an MTLBuffer. Fresh memory is poisoned: reading it before it is written shows as NaN.
struct EmulatedBuffer {
  explicit EmulatedBuffer(size_t bytes) : words((bytes + 15) / 16 * 2, 0xfff7fff7fff7fff7ULL), extent{} {
    extent = {reinterpret_cast<unsigned char*>(words.data()),
              reinterpret_cast<unsigned char*>(words.data()) + bytes};
  }
  std::vector<uint64_t> words;
  emu::Extent extent;  // ends at the last byte that was asked for
};

EmulatedBuffer& buffer_of(void* handle) { return *static_cast<EmulatedBuffer*>(handle); }

class EmulatedDevice final : public metal::MetalDevice {
 public:
  explicit EmulatedDevice(emu::Schedule schedule) : schedule_(schedule) {}

  std::string description() const override { return "Metal shaders on the emulator of the tests"; }
  void* allocate(size_t bytes) override { return new EmulatedBuffer(bytes); }
  void release(void* handle) override { delete &buffer_of(handle); }
  void upload(void* to, const void* from, size_t bytes) override {
    std::memcpy(buffer_of(to).extent.begin, from, bytes);
  }
  void download(void* to, const void* from, size_t bytes) override {
    std::memcpy(to, buffer_of(const_cast<void*>(from)).extent.begin, bytes);
  }

  void run(const metal::Plan& plan, void* scratch) override {
    for (const metal::Launch& launch : plan.launches) {
      try {
        emu::dispatch(dispatch_of(launch, scratch), schedule_);
      } catch (const emu::Fault& fault) {
        throw Error(ErrorCode::internal, "metal", fault.what());
      }
    }
  }

 private:
  static emu::Dispatch dispatch_of(const metal::Launch& launch, void* scratch) {
    emu::Dispatch work;
    work.kernel = launch.kernel;
    work.constants.assign(launch.constants.begin(), launch.constants.end());
    work.groups = launch.groups;
    work.threads = launch.threads;
    work.shared_bytes = launch.threadgroup_bytes;
    for (const metal::TensorSlot& slot : launch.tensors) {
      void* handle = slot.scratch ? scratch : slot.buffer;
      emu::DevicePointer<unsigned char> pointer;
      if (handle != nullptr) {
        const emu::Extent& extent = buffer_of(handle).extent;
        pointer = {extent.begin + slot.byte_offset, &extent};
      }
      work.arguments.tensors[0].push_back(pointer);
    }
    const auto* params = reinterpret_cast<const unsigned char*>(launch.params.data());
    work.arguments.bytes[1].assign(params, params + launch.params.size());
    return work;
  }

  emu::Schedule schedule_;
};

}  // namespace

std::unique_ptr<metal::MetalDevice> make_emulated_device(emu::Schedule schedule) {
  return std::make_unique<EmulatedDevice>(schedule);
}

BackendOrReason make_backend() {
  const char* schedule = std::getenv("ATTNSPAN_METAL_SCHEDULE");
  return metal::make_backend(
      make_emulated_device(emu::parse_schedule(schedule != nullptr ? schedule : "forward")));
}

}  // namespace attnspan::metal_emulation
