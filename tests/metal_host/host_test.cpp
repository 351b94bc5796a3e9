// The host side of the Metal backend, device.mm, on the Metal of these tests: what it refuses, what it keeps,
// and that it leaves nothing behind. That it binds the right things is shown by the grid, which runs on it
// too.

#include <gtest/gtest.h>

#include "attnspan/attention.hpp"
#include "attnspan/error.hpp"
#include "check/buffer.hpp"
#include "core/problem.hpp"
#include "fake_metal.hpp"
#include "objc_runtime.hpp"
#include "registry/make_backends.hpp"

namespace attnspan {
namespace {

using check::Buffer;

class MetalHost : public testing::Test {
 protected:
  void SetUp() override { fake_metal::state() = {}; }
  void TearDown() override { fake_metal::state() = {}; }
};

std::unique_ptr<Backend> make() {
  BackendOrReason made = metal::make_backend();
  EXPECT_NE(made.backend, nullptr) << made.reason;
  return std::move(made.backend);
}

// Tensors of one head on the device.
struct Call {
  explicit Call(Backend& backend, int64_t head_dim = 64) : memory(*backend.memory()) {
    check::Random random(1);
    for (Tensor* tensor : {&args.query, &args.key, &args.value, &args.out}) {
      Buffer host = Buffer::poisoned({1, 20, 1, head_dim}, DType::f32);
      host.fill_normal(random);
      *tensor = host.tensor();
      const size_t bytes = static_cast<size_t>(tensor->numel() * 4);
      tensor->data = memory.allocate(bytes);
      memory.upload(tensor->data, host.tensor().data, bytes);
      tensor->device = Device::metal;
    }
  }
  ~Call() {
    for (const Tensor* tensor : {&args.query, &args.key, &args.value, &args.out})
      memory.release(tensor->data);
  }
  void run(Backend& backend) const { backend.forward(make_problem(args), {}); }

  DeviceMemory& memory;
  ForwardArgs args;
};

TEST_F(MetalHost, RefusesInOneLine) {
  struct Refusal {
    void (*change)(fake_metal::State&);
    const char* says;
  };
  const Refusal refusals[] = {
      {[](fake_metal::State& s) { s.has_device = false; }, "no Metal device"},
      {[](fake_metal::State& s) { s.has_simdgroup_matrices = false; }, "no simdgroup matrices"},
      {[](fake_metal::State& s) { s.threadgroup_bytes = 16384; }, "16384 bytes, needs 32768"},
      {[](fake_metal::State& s) { s.library_loads = false; }, "does not load: no Metal library"},
  };
  for (const Refusal& refusal : refusals) {
    fake_metal::state() = {};
    refusal.change(fake_metal::state());
    const BackendOrReason made = metal::make_backend();
    EXPECT_EQ(made.backend, nullptr) << refusal.says;
    EXPECT_NE(made.reason.find(refusal.says), std::string::npos) << made.reason;
    EXPECT_EQ(made.reason.find('\n'), std::string::npos) << made.reason;
  }
}

TEST_F(MetalHost, NamesItsDevice) {
  EXPECT_EQ(make()->description(), "a Metal of the tests, 32 KiB of threadgroup memory, unified memory");
}

TEST_F(MetalHost, KeepsPipelines) {
  const std::unique_ptr<Backend> backend = make();
  const Call call(*backend), wider(*backend, 72);
  call.run(*backend);
  const fake_metal::State first = fake_metal::state();
  call.run(*backend);
  EXPECT_EQ(fake_metal::state().pipelines_made, first.pipelines_made);
  EXPECT_EQ(fake_metal::state().functions_made, first.functions_made);
  EXPECT_EQ(fake_metal::state().dispatches, first.dispatches + 1);
  EXPECT_EQ(fake_metal::state().command_buffers, first.command_buffers + 1);
  wider.run(*backend);
  EXPECT_EQ(fake_metal::state().pipelines_made, first.pipelines_made + 1);
}

TEST_F(MetalHost, LeavesNothingBehind) {
  const int before = objc::live_objects();
  {
    const std::unique_ptr<Backend> backend = make();
    const Call call(*backend);
    call.run(*backend);
    const int with_one_call = objc::live_objects();
    for (int i = 0; i < 3; ++i) call.run(*backend);
    EXPECT_EQ(objc::live_objects(), with_one_call);
    EXPECT_GT(with_one_call, before);
  }
  EXPECT_EQ(objc::live_objects(), before);
}

std::string message_of(const std::function<void()>& action, ErrorCode code) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

TEST_F(MetalHost, SaysWhatFailed) {
  const std::unique_ptr<Backend> backend = make();
  const Call call(*backend);
  fake_metal::state().failing_kernel = "attention_forward_rows_64_f32";
  const std::string missing = message_of([&] { call.run(*backend); }, ErrorCode::internal);
  EXPECT_NE(missing.find("kernel attention_forward_rows_64_f32: no function"), std::string::npos) << missing;
  fake_metal::state().failing_kernel = "";
  fake_metal::state().most_threads = 64;
  const std::string narrow = message_of([&] { call.run(*backend); }, ErrorCode::unsupported);
  EXPECT_NE(narrow.find("gets 64 threads in simdgroups of 32"), std::string::npos) << narrow;
  const std::string memory =
      message_of([&] { backend->memory()->allocate(size_t{1} << 41); }, ErrorCode::out_of_memory);
  EXPECT_NE(memory.find("no buffer of 2199023255552 bytes"), std::string::npos) << memory;
  for (const std::string& message : {missing, narrow, memory})
    EXPECT_EQ(message.find('\n'), std::string::npos);
}

// A fault of a kernel comes back as the error of the command buffer, here an access beyond a tensor.
TEST_F(MetalHost, ReportsWhatAKernelDidWrong) {
  const std::unique_ptr<Backend> backend = make();
  const Call call(*backend);
  ForwardArgs args = call.args;
  args.key.shape[1] = args.value.shape[1] = 400;  // it has 20
  const std::string fault =
      message_of([&] { backend->forward(make_problem(args), {}); }, ErrorCode::internal);
  EXPECT_NE(fault.find("of a tensor of 5120 bytes"), std::string::npos) << fault;
}

}  // namespace
}  // namespace attnspan
