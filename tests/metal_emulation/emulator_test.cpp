// The emulator itself: what it computes, and that it reports each kind of fault in every schedule, with the
// line of the kernel.

#include <gtest/gtest.h>

#include "emulator/kernel.hpp"
#include "emulator/report.hpp"

namespace emu {
namespace {

const Schedule kSchedules[] = {Schedule::forward, Schedule::reverse, Schedule::shuffled, Schedule::skewed};

// A kernel of faults.metal over 64 threads, 64 ints of threadgroup memory and a tensor of `numbers`.
void run(const char* kernel, Schedule schedule, int count, std::vector<int32_t>& numbers, bool has_tensor,
         uint32_t groups = 1) {
  Extent extent{reinterpret_cast<unsigned char*>(numbers.data()),
                reinterpret_cast<unsigned char*>(numbers.data() + numbers.size())};
  Dispatch work;
  work.kernel = kernel;
  work.constants.assign(64, 0);
  work.groups = {groups, 1, 1};
  work.threads = 64;
  work.shared_bytes = 64 * 4;
  if (has_tensor) work.arguments.tensors[0] = {DevicePointer<unsigned char>(extent.begin, &extent)};
  work.arguments.bytes[1].resize(4);
  std::memcpy(work.arguments.bytes[1].data(), &count, 4);
  dispatch(work, schedule);
}

struct Expected {
  const char* kernel;
  int count;
  bool has_tensor;
  const char* kind;
  const char* line;
};

class FaultTest : public testing::TestWithParam<Expected> {};

TEST_P(FaultTest, IsReportedWithItsLine) {
  const Expected& expected = GetParam();
  for (const Schedule schedule : kSchedules) {
    std::vector<int32_t> numbers(64, 0);
    try {
      run(expected.kernel, schedule, expected.count, numbers, expected.has_tensor);
      ADD_FAILURE() << "no fault in schedule " << static_cast<int>(schedule);
    } catch (const Fault& fault) {
      const std::string message = fault.what();
      EXPECT_NE(message.find(expected.kind), std::string::npos) << message;
      EXPECT_NE(message.find(std::string("faults.metal:") + expected.line), std::string::npos) << message;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Emulator, FaultTest,
    testing::Values(Expected{"reads_before_writing", 1, false, "uninitialised read", "15"},
                    Expected{"lacks_a_threadgroup_barrier", 1, false, "", "23"},
                    Expected{"lacks_a_simdgroup_barrier", 1, false, "race", "34"},
                    Expected{"waits_in_a_branch", 40, false, "divergence", "41"},
                    Expected{"waits_at_two_places", 40, false, "divergence", "50"},
                    Expected{"sums_in_a_branch", 40, true, "divergence", "58"},
                    Expected{"writes_past_the_end", 1, true, "bytes at byte 256", "65"},
                    Expected{"reads_before_the_start", 1, true, "bytes at byte -4", "72"},
                    Expected{"leaves_threadgroup_memory", 1, false, "byte 256", "79"}),
    [](const auto& info) { return std::string(info.param.kernel); });

TEST(Emulator, OperationsMeanWhatMetalSays) {
  for (const Schedule schedule : kSchedules) {
    std::vector<int32_t> numbers(3 * 64, -1);
    run("uses_everything", schedule, 100, numbers, true, 3);
    for (int i = 0; i < 3 * 64; ++i) {
      const int lane = i % 32, simdgroup = i % 64 / 32;
      EXPECT_EQ(numbers[i], lane * 100 + (lane ^ 1) + simdgroup + 32 + 31) << i;
    }
  }
}

TEST(Emulator, RefusesUnknownNames) {
  std::vector<int32_t> numbers(64);
  EXPECT_THROW(run("no_such_kernel", Schedule::forward, 0, numbers, false), Fault);
  EXPECT_THROW(parse_schedule("sideways"), std::invalid_argument);
}

}  // namespace
}  // namespace emu
