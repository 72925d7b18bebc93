// Reduction inside a host through shared memory. In a group on one host, small operations move as a whole
// (direct_exchange.h), and operations of blocks between two ranks through pipes (block_exchange.h). For the others each
// rank copies its contribution into a slot, the owner of a chunk reduces them, and all ranks copy the result out. With
// several hosts, the owner sends the host's partial sum to the chunk's server and writes the result into the slot.
//
// Chunks of successive operations form one stream with tickets 0, 1, ...; the slot of a chunk is its ticket modulo
// the number of slots, so that the end of one operation overlaps with the start of the next.
//
// step() advances this rank's part. A caller that waits does so itself, which needs no other thread; the stage's
// thread does it while nobody waits.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "engine/block_exchange.h"
#include "engine/direct_exchange.h"
#include "engine/options.h"
#include "engine/stage_hooks.h"
#include "engine/topology.h"
#include "transport/shm.h"

namespace shoal {

inline constexpr std::size_t kSlotsBetweenHosts = 4;  // factor on num_slots: chunks between hosts are smaller

// The same on all ranks of the host.
ShmLayout stage_layout(const Topology& topology, const EngineOptions& options);

class HostStage {
 public:
  HostStage(const Topology& topology, const std::string& segment, const EngineOptions& options, double timeout_s,
            StageHooks hooks);
  ~HostStage();

  // Whether a group of one host moves the operation as a whole: it needs no chunks.
  static bool is_direct(const OpSpec& spec, int num_ranks) { return DirectExchange::takes(spec, num_ranks); }

  // Throws std::logic_error for a chunk that is larger than a slot.
  void submit(const OpPtr& op);
  // Continues a chunk whose result has arrived, or whose contribution was taken. Any thread.
  void finish(const Op& op, std::uint64_t index);

  // Advances on the calling thread until the operation has ended, `timeout_s` has passed (negative: no limit) or the
  // stage has stopped.
  void drive(const Op& op, double timeout_s);
  // Advances as far as possible without waiting, unless another thread does. Returns whether it did.
  bool advance();
  // The stage's thread advances what has been submitted: nobody will wait for it.
  void advance_alone();

  void stop();  // any thread but the stage's; afterwards it does not access callers' memory

 private:
  struct Entry {
    OpPtr op;
    std::uint64_t index;
    std::uint64_t number;  // of the operation on this host
  };

  void run();
  bool step() REQUIRES(step_mutex_);
  bool idle() REQUIRES(step_mutex_) { return entries_.empty() && direct_.idle() && blocks_.idle(); }
  bool take_submissions() REQUIRES(step_mutex_);
  bool enter() REQUIRES(step_mutex_);
  bool own() REQUIRES(step_mutex_);
  bool leave() REQUIRES(step_mutex_);
  void relax(int& num_idle, std::uint32_t seen, std::chrono::steady_clock::time_point until);
  Entry& entry(std::uint64_t ticket) REQUIRES(step_mutex_) { return entries_[ticket - first_]; }
  bool slot_is_free(std::uint64_t ticket);
  bool contributes(const Entry& entry) const;
  bool takes_result(const Entry& entry) const;
  bool contributions_are_in(std::uint64_t ticket);
  bool agreed(const Entry& entry);
  void add_up(const Entry& entry, std::uint64_t ticket);
  void hand_round(const Entry& entry, std::uint64_t ticket);
  void ring_others();

  const Topology& topology_;
  SharedSegment shm_;
  const bool wide_partials_;
  const StageHooks hooks_;
  const int me_, num_locals_;
  const bool may_spin_;  // no more ranks than cores: the others run meanwhile

  Mutex submit_mutex_;
  std::vector<OpPtr> submitted_ GUARDED_BY(submit_mutex_);
  std::atomic<bool> stopping_{false};

  Mutex step_mutex_;
  DirectExchange direct_ GUARDED_BY(step_mutex_);
  BlockExchange blocks_ GUARDED_BY(step_mutex_);
  std::deque<Entry> entries_ GUARDED_BY(step_mutex_);  // tickets first_ .. end_
  std::uint64_t first_ GUARDED_BY(step_mutex_) = 0, end_ GUARDED_BY(step_mutex_) = 0,
                next_number_ GUARDED_BY(step_mutex_) = 0;
  std::uint64_t to_enter_ GUARDED_BY(step_mutex_) = 0, to_own_ GUARDED_BY(step_mutex_) = 0,
                to_leave_ GUARDED_BY(step_mutex_) = 0;

  Mutex stop_mutex_;  // a failure and close() may run concurrently
  std::thread thread_ GUARDED_BY(stop_mutex_);
};

}  // namespace shoal
