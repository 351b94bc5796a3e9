#include "emulator/machine.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "emulator/report.hpp"

namespace emu {
namespace {

constexpr size_t kStackBytes = 64 * 1024;

thread_local Machine* current_machine = nullptr;

bool same_place(const Site& a, const Site& b) {
  return a.line() == b.line() && a.file_name() == b.file_name();
}

}  // namespace

Schedule parse_schedule(const std::string& name) {
  if (name == "forward") return Schedule::forward;
  if (name == "reverse") return Schedule::reverse;
  if (name == "shuffled") return Schedule::shuffled;
  if (name == "skewed") return Schedule::skewed;
  throw std::invalid_argument("ATTNSPAN_METAL_SCHEDULE: found '" + name +
                              "', expected forward, reverse, shuffled or skewed");
}

Machine::Machine(Schedule schedule) : schedule_(schedule), random_(1) {}

Machine::~Machine() {
  if (stacks_ != nullptr) munmap(stacks_, stack_count_ * kStackBytes);
}

Machine& Machine::current() { return *current_machine; }

uint32_t Machine::lanes_of(uint32_t simdgroup) const {
  return std::min<uint32_t>(kSimdWidth, static_cast<uint32_t>(fibers_.size()) - simdgroup * kSimdWidth);
}

void Machine::start(std::array<uint32_t, 3> group, uint32_t threads) {
  if (stack_count_ < threads) {
    if (stacks_ != nullptr) munmap(stacks_, stack_count_ * kStackBytes);
    stacks_ = static_cast<char*>(mmap(nullptr, threads * kStackBytes, PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (stacks_ == MAP_FAILED) throw std::runtime_error("no memory for fiber stacks");
    stack_count_ = threads;
  }
  fibers_.assign(threads, Fiber());
  simdgroups_.assign((threads + kSimdWidth - 1) / kSimdWidth, Simdgroup());
  threadgroup_epoch_ = waiting_ = done_ = 0;
  for (uint32_t i = 0; i < threads; ++i) {
    fibers_[i].position = {group, i, i % kSimdWidth, i / kSimdWidth};
    fibers_[i].context =
        boost::context::detail::make_fcontext(stacks_ + (i + 1) * kStackBytes, kStackBytes, &Machine::enter);
  }
}

void Machine::run(const std::function<void()>& body, std::array<uint32_t, 3> group, uint32_t threads,
                  uint32_t shared_bytes) {
  current_machine = this;
  body_ = &body;
  shared_.start(shared_bytes);
  start(group, threads);
  std::vector<uint32_t> order(schedule_ == Schedule::skewed ? simdgroups_.size() : fibers_.size());
  std::iota(order.begin(), order.end(), 0U);
  if (schedule_ == Schedule::reverse) std::reverse(order.begin(), order.end());
  while (done_ < fibers_.size()) schedule_round(order);
}

void Machine::schedule_round(std::vector<uint32_t>& order) {
  if (schedule_ == Schedule::shuffled || schedule_ == Schedule::skewed) {
    std::shuffle(order.begin(), order.end(), random_);
  }
  bool progress = false;
  if (schedule_ == Schedule::skewed) {
    // One simdgroup after another runs as far ahead as barriers let it.
    for (uint32_t simdgroup : order) {
      while (run_simdgroup(simdgroup)) progress = true;
    }
  } else {
    progress = run_in_order(order);
  }
  if (!progress && done_ < fibers_.size()) report_divergence();
}

bool Machine::run_in_order(const std::vector<uint32_t>& order) {
  bool progress = false;
  for (uint32_t i : order) {
    if (fibers_[i].state != State::ready) continue;
    resume(fibers_[i]);
    progress = true;
  }
  return progress;
}

bool Machine::run_simdgroup(uint32_t simdgroup) {
  bool progress = false;
  for (uint32_t i = 0; i < lanes_of(simdgroup); ++i) {
    Fiber& fiber = fibers_[simdgroup * kSimdWidth + i];
    if (fiber.state != State::ready) continue;
    resume(fiber);
    progress = true;
  }
  return progress;
}

void Machine::enter(boost::context::detail::transfer_t transfer) {
  Machine& machine = current();
  machine.scheduler_ = transfer.fctx;
  (*machine.body_)();
  machine.running_->state = State::done;
  ++machine.done_;
  boost::context::detail::jump_fcontext(machine.scheduler_, nullptr);
}

void Machine::resume(Fiber& fiber) {
  running_ = &fiber;
  fiber.context = boost::context::detail::jump_fcontext(fiber.context, nullptr).fctx;
  if (!fault_.empty()) {
    const std::string message = std::move(fault_);
    fault_.clear();
    throw Fault(message);
  }
}

void Machine::end_with_fault(const std::string& message) {
  const Position& p = running_->position;
  fault_ = message + " (thread " + std::to_string(p.thread) + " of threadgroup " +
           std::to_string(p.group[0]) + ", " + std::to_string(p.group[1]) + ", " +
           std::to_string(p.group[2]) + ")";
  boost::context::detail::jump_fcontext(scheduler_, nullptr);
  std::abort();  // a failed fiber is never resumed
}

void Machine::wait(State state, bool orders_memory, const Site& site) {
  Fiber& fiber = *running_;
  fiber.state = state;
  fiber.orders_memory = orders_memory;
  fiber.site = site;
  const uint32_t simdgroup = fiber.position.simdgroup;
  if (state == State::at_threadgroup) {
    if (++waiting_ == fibers_.size()) release_threadgroup();
  } else if (++simdgroups_[simdgroup].waiting == lanes_of(simdgroup)) {
    release_simdgroup(simdgroup);
  }
  scheduler_ = boost::context::detail::jump_fcontext(scheduler_, nullptr).fctx;
}

void Machine::release_simdgroup(uint32_t simdgroup) {
  ++rendezvous_;
  const uint32_t first = simdgroup * kSimdWidth;
  const Site& site = fibers_[first].site;
  for (uint32_t i = first; i < first + lanes_of(simdgroup); ++i) {
    if (!same_place(fibers_[i].site, site)) {
      fail("divergence: lanes of one simdgroup wait at " + text_of(site) + " and at " +
           text_of(fibers_[i].site));
    }
    fibers_[i].state = State::ready;
  }
  simdgroups_[simdgroup].waiting = 0;
  if (fibers_[first].orders_memory) ++simdgroups_[simdgroup].epoch;
}

void Machine::release_threadgroup() {
  ++rendezvous_;
  const Site& site = fibers_[0].site;
  for (Fiber& fiber : fibers_) {
    if (!same_place(fiber.site, site)) {
      fail("divergence: threads wait at the threadgroup barriers " + text_of(site) + " and " +
           text_of(fiber.site));
    }
    fiber.state = State::ready;
  }
  waiting_ = 0;
  if (fibers_[0].orders_memory) ++threadgroup_epoch_;
}

void Machine::report_divergence() {
  std::string waiting = "no thread waits";
  for (const Fiber& fiber : fibers_) {
    if (fiber.state == State::at_threadgroup || fiber.state == State::at_simdgroup) {
      waiting = std::string(fiber.state == State::at_threadgroup ? "threads wait at the threadgroup barrier "
                                                                 : "lanes wait in the simdgroup operation ") +
                text_of(fiber.site);
      break;
    }
  }
  throw Fault("divergence: " + waiting + ", which not all reach (" + std::to_string(done_) + " of " +
              std::to_string(fibers_.size()) + " threads have ended)");
}

void Machine::threadgroup_barrier(bool orders_memory, const Site& site) {
  wait(State::at_threadgroup, orders_memory, site);
}

void Machine::simdgroup_barrier(bool orders_memory, const Site& site) {
  wait(State::at_simdgroup, orders_memory, site);
}

const std::array<LaneData, kSimdWidth>& Machine::exchange(const LaneData& mine, const Site& site) {
  const Position& p = running_->position;
  Simdgroup& simdgroup = simdgroups_[p.simdgroup];
  const uint8_t phase = simdgroup.phase[p.lane] ^= 1;
  simdgroup.shown[phase][p.lane] = mine;
  wait(State::at_simdgroup, false, site);
  return simdgroups_[p.simdgroup].shown[phase];
}

}  // namespace emu
