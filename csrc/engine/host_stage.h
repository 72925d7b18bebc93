// Reduction inside a host through shared memory: each rank copies its contribution into a slot, the owner of a chunk
// reduces them, and all ranks copy the result out. With several hosts, the owner sends the host's partial sum to the
// chunk's server and writes the result into the slot.
//
// Chunks of successive operations form one stream with tickets 0, 1, ...; the slot of a chunk is its ticket modulo
// the number of slots, so that the end of one operation overlaps with the start of the next.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engine/op.h"
#include "engine/topology.h"
#include "transport/shm.h"

namespace shoal {

// Calls from the stage's thread to the engine.
struct StageHooks {
  // Sends the host's contribution to a chunk; the result goes to `destination`.
  std::function<void(const OpPtr&, std::uint64_t index, const std::byte* data, Element input, std::byte* destination)>
      push;
  std::function<void(const OpPtr&, std::uint64_t index, std::byte* destination)> expect;
  std::function<void(const OpPtr&)> done;  // this rank has finished the operation's last chunk
  // Local rank `rank` (numbered in the group) has issued another operation.
  std::function<void(std::uint64_t seq, int rank, std::uint64_t signature)> report_mismatch;
  std::function<void(const std::string& what)> error;  // the stage has failed
  std::function<void(const char* what, std::uint64_t begin_ns, std::uint64_t seq, std::uint64_t chunk)> trace;
};

class HostStage {
 public:
  HostStage(const Topology& topology, const std::string& segment, const ShmLayout& layout, bool wide_partials,
            double timeout_s, StageHooks hooks);
  ~HostStage();

  // Throws std::logic_error for a chunk that is larger than a slot.
  void submit(OpPtr op);
  // Continues a chunk whose result has arrived, or whose contribution was taken. Any thread.
  void finish(const Op& op, std::uint64_t index);
  void stop();  // any thread except its own

 private:
  struct Entry {
    OpPtr op;
    std::uint64_t index;
    std::uint64_t number;  // of the operation on this host
  };

  void run();
  bool step();
  bool take_submissions();
  bool enter();
  bool own();
  bool leave();
  Entry& entry(std::uint64_t ticket) { return entries_[ticket - first_]; }
  bool slot_is_free(std::uint64_t ticket);
  bool contributes(const Entry& entry) const;
  bool takes_result(const Entry& entry) const;
  bool contributions_are_in(const Entry& entry, std::uint64_t ticket);
  bool agreed(const Entry& entry);
  void act(const Entry& entry, std::uint64_t ticket);
  void add_up(const Entry& entry, std::uint64_t ticket);
  void hand_round(const Entry& entry, std::uint64_t ticket);
  void ring_others();

  const Topology& topology_;
  SharedSegment shm_;
  bool wide_partials_;
  StageHooks hooks_;
  int me_, num_locals_;

  std::mutex mutex_, stop_mutex_;
  std::vector<OpPtr> submitted_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;

  std::deque<Entry> entries_;  // tickets first_ .. end_
  std::uint64_t first_ = 0, end_ = 0, next_number_ = 0;
  std::uint64_t to_enter_ = 0, to_own_ = 0, to_leave_ = 0;
};

}  // namespace shoal
