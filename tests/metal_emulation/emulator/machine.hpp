#pragma once
// Runs the threads of one threadgroup as fibers on one OS thread. Barriers and simdgroup operations are the
// only places where a fiber gives way, so a schedule is the order in which ready fibers run between them.

#include <array>
#include <boost/context/detail/fcontext.hpp>
#include <cstdint>
#include <functional>
#include <random>
#include <source_location>
#include <string>
#include <vector>

#include "emulator/memory.hpp"

namespace emu {

inline constexpr uint32_t kSimdWidth = 32;

// Which of the orders that a GPU may choose is run. A missing threadgroup barrier shows when one simdgroup
// runs ahead (skewed), a missing simdgroup barrier when lanes run in another order (reverse, shuffled).
enum class Schedule { forward, reverse, shuffled, skewed };
Schedule parse_schedule(const std::string& name);

struct Position {
  std::array<uint32_t, 3> group{};  // threadgroup_position_in_grid
  uint32_t thread = 0;              // thread_index_in_threadgroup
  uint32_t lane = 0;                // thread_index_in_simdgroup
  uint32_t simdgroup = 0;           // simdgroup_index_in_threadgroup
};

using Site = std::source_location;

// What lanes of a simdgroup show each other: two values of up to 16 bytes per lane, kept in two phases so
// that a lane may start the next exchange while others still read this one.
struct LaneData {
  alignas(16) unsigned char bytes[16];
};

class Machine {
 public:
  explicit Machine(Schedule schedule);
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  // Runs one threadgroup to its end. Throws Fault.
  void run(const std::function<void()>& body, std::array<uint32_t, 3> group, uint32_t threads,
           uint32_t shared_bytes);

  static Machine& current();
  // Barriers and simdgroup operations that threadgroups of this process have come through: how much was done.
  static uint64_t rendezvous() { return rendezvous_; }
  const Position& position() const { return running_->position; }
  SharedMemory& shared() { return shared_; }
  Accessor accessor() const {
    const Position& p = running_->position;
    return {p.thread, p.simdgroup, threadgroup_epoch_, simdgroups_[p.simdgroup].epoch};
  }

  // Both wait for all threads of the threadgroup or simdgroup at this very call. Memory is ordered only where
  // `orders_memory` is set.
  void threadgroup_barrier(bool orders_memory, const Site& site);
  void simdgroup_barrier(bool orders_memory, const Site& site);
  // Shows `mine` to the other lanes; returns what every lane showed at the same call.
  const std::array<LaneData, kSimdWidth>& exchange(const LaneData& mine, const Site& site);

  [[noreturn]] void end_with_fault(const std::string& message);

 private:
  enum class State : uint8_t { ready, at_threadgroup, at_simdgroup, done };
  struct Fiber {
    State state = State::ready;
    bool orders_memory = false;
    Site site;
    Position position;
    boost::context::detail::fcontext_t context = nullptr;
  };
  struct Simdgroup {
    std::array<std::array<LaneData, kSimdWidth>, 2> shown;
    std::array<uint8_t, kSimdWidth> phase{};
    uint32_t epoch = 0;
    uint32_t waiting = 0;
  };

  inline static uint64_t rendezvous_ = 0;
  static void enter(boost::context::detail::transfer_t transfer);
  void start(std::array<uint32_t, 3> group, uint32_t threads);
  void schedule_round(std::vector<uint32_t>& order);
  bool run_in_order(const std::vector<uint32_t>& order);
  bool run_simdgroup(uint32_t simdgroup);
  void resume(Fiber& fiber);
  void wait(State state, bool orders_memory, const Site& site);
  void release_simdgroup(uint32_t simdgroup);
  void release_threadgroup();
  [[noreturn]] void report_divergence();
  uint32_t lanes_of(uint32_t simdgroup) const;

  Schedule schedule_;
  std::mt19937 random_;
  std::vector<Fiber> fibers_;
  std::vector<Simdgroup> simdgroups_;
  SharedMemory shared_;
  const std::function<void()>* body_ = nullptr;
  boost::context::detail::fcontext_t scheduler_ = nullptr;
  Fiber* running_ = nullptr;
  uint32_t threadgroup_epoch_ = 0;
  uint32_t waiting_ = 0;  // at the threadgroup barrier
  uint32_t done_ = 0;
  std::string fault_;
  char* stacks_ = nullptr;
  size_t stack_count_ = 0;
};

}  // namespace emu
