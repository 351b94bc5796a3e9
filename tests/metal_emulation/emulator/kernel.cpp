#include "emulator/kernel.hpp"

#include "emulator/report.hpp"

namespace emu {

std::map<std::string, KernelFunction>& kernels() {
  static std::map<std::string, KernelFunction> map;
  return map;
}

std::multimap<int, ConstantSetter>& function_constants() {
  static std::multimap<int, ConstantSetter> map;
  return map;
}

void dispatch(const Dispatch& work, Schedule schedule) {
  const auto found = kernels().find(work.kernel);
  if (found == kernels().end()) throw Fault("no kernel is called " + work.kernel);
  for (const auto& [index, set] : function_constants()) set(work.constants.at(index));
  Machine machine(schedule);
  const std::function<void()> body = [&] { found->second(work.arguments); };
  // Threadgroups may run in any order: the last first, in the schedules that turn orders round.
  const bool backwards = schedule == Schedule::reverse || schedule == Schedule::skewed;
  const uint64_t count = uint64_t{work.groups[0]} * work.groups[1] * work.groups[2];
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t group = backwards ? count - 1 - i : i;
    const std::array<uint32_t, 3> position = {static_cast<uint32_t>(group % work.groups[0]),
                                              static_cast<uint32_t>(group / work.groups[0] % work.groups[1]),
                                              static_cast<uint32_t>(group / work.groups[0] / work.groups[1])};
    try {
      machine.run(body, position, work.threads, work.shared_bytes);
    } catch (const Fault& fault) {
      throw Fault(work.kernel + ": " + fault.what());
    }
  }
}

}  // namespace emu
