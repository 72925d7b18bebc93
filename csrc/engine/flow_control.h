// Chooses the chunk that this rank sends next, and when: queues of chunks and the windows that bound the bytes in
// flight. On the network thread.
//
// Chunks are sent in the order of the pattern under one window for all servers, which keeps their load balanced at
// any time. Each queue has its own window: with a shared one, the chunks that fill it could wait for an operation
// that another rank begins only after one that is held back here.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "engine/members.h"
#include "engine/options.h"

namespace shoal {

// Accounts for the bytes that an outbox has sent to other hosts' servers and that are not answered.
class InFlight {
 public:
  // Chunks served by `rank` itself do not count.
  static std::size_t counted(const Op& op, std::uint64_t index, int rank) {
    const Op::Part& part = op.parts[index];
    return part.server == rank ? 0 : op.in_flight_bytes(index);
  }

  // Chunks that do not count need no window, and neither does the first chunk in flight.
  bool fits(std::size_t bytes, std::size_t window) const { return !bytes || !bytes_ || bytes_ + bytes <= window; }

  // Returns whether the operation or an earlier one has bytes in flight.
  bool any_up_to(std::uint64_t seq) const { return !of_.empty() && of_.begin()->first <= seq; }

  void sent(std::uint64_t seq, std::size_t bytes) {
    if (!bytes) return;
    of_[seq] += bytes;
    bytes_ += bytes;
  }

  void arrived(const Op& op, std::uint64_t index) {
    const auto found = of_.find(op.seq);
    if (found == of_.end()) return;
    const std::size_t bytes = std::min(found->second, op.in_flight_bytes(index));
    found->second -= bytes;
    bytes_ -= bytes;
    if (!found->second) of_.erase(found);
  }

  std::size_t bytes() const { return bytes_; }

 private:
  std::map<std::uint64_t, std::size_t> of_;  // bytes by operation number
  std::size_t bytes_ = 0;
};

// An operation and the index of a chunk.
using Outgoing = std::pair<OpPtr, std::uint64_t>;

// Queue of chunks to send in call order, with the bytes in flight.
//
// One window bounds the bytes in flight (FlowControl), so that queues along the path stay short. Operations are
// sent in call order, the chunks of one operation in the order of the server pattern. The order of additions does not
// depend on it. Operations with a priority use another queue (OrderedOutbox).
//
// Chunks that wait for a reduction inside the host are added late, when newer operations may have filled the window.
// The oldest operation may therefore always have one chunk in flight: all ranks send its chunks in the same order, so
// those of the rank that has sent the fewest are all answered, and its next one can go.
class Outbox {
 public:
  void add(const OpPtr& op, std::uint64_t index);

  // Removes and returns the next chunk, or nothing while `window` bytes are in flight. Chunks served by `rank` need
  // no window, and neither does the first chunk in flight.
  std::optional<Outgoing> next(std::size_t window, int rank);

  // The chunk is no longer in flight: answered, or now served by this rank.
  void arrived(const Op& op, std::uint64_t index) { in_flight_.arrived(op, index); }

  std::size_t bytes_in_flight() const { return in_flight_.bytes(); }

 private:
  struct Line {  // of one operation
    OpPtr op;
    std::deque<std::uint64_t> waiting;  // ascending
  };

  std::map<std::uint64_t, Line> lines_;  // by operation number, oldest first; only those with chunks
  InFlight in_flight_;
};

// Queue of chunks to send by priority, in one order that rank 0 sets for all ranks.
//
// Ranks begin an urgent operation at different times. If each rank switched to it on its own, what it had sent of the
// previous operation would occupy its window until all ranks had returned to that one, and the rest would go chunk by
// chunk: 8 workers of BERT-base took 52 s per step that way, and 25 s without priorities. Rank 0 therefore cuts
// operations into runs of chunks, chooses the next run and broadcasts it (FlowControl::set_order), some windows ahead of
// what it sends.
//
// It cannot deadlock: all chunks of the rank that has sent the fewest are answered, since all others have sent the
// same ones, and its next chunk may go as soon as the rank has begun the operation. It waits for no operation that it
// begins later: rank 0 schedules an operation that others may not have begun only when no older one is queued.
class OrderedOutbox {
 public:
  struct Run {
    std::uint64_t seq = 0;  // operation number
    std::uint64_t end = 0;  // one past its last chunk; it starts where earlier runs ended
  };

  // Adds a chunk. The chunks of an operation are added in ascending order, all of them.
  void add(const OpPtr& op, std::uint64_t index);

  // Chooses the next run: about `bytes` of the most urgent operation numbered below `num_begun`, which all ranks have
  // begun, or else of the oldest operation. Nothing if all queued chunks are in runs.
  std::optional<Run> choose(std::uint64_t num_begun, std::size_t bytes);

  // Sets run `number`. Runs may arrive in any order.
  void extend(std::uint64_t number, Run run) { runs_[number] = run; }

  // As in Outbox.
  std::optional<Outgoing> next(std::size_t window, int rank);
  void arrived(const Op& op, std::uint64_t index) { in_flight_.arrived(op, index); }

  std::size_t bytes_in_flight() const { return in_flight_.bytes(); }

  // Bytes of chunks that are in runs and were not yet taken by next().
  std::size_t bytes_ahead() const { return ahead_; }

  bool empty() const { return lines_.empty(); }

 private:
  struct Line {  // of one operation
    OpPtr op;
    std::uint64_t num_added = 0, num_chosen = 0, num_sent = 0;  // chunks
  };

  std::map<std::uint64_t, Line> lines_;  // by operation number, oldest first
  std::map<std::uint64_t, Run> runs_;    // by run number, not yet sent
  std::uint64_t next_run_ = 0;
  InFlight in_flight_;
  std::size_t ahead_ = 0;
};

class FlowControl {
 public:
  FlowControl(const EngineOptions& options, const Topology& topology, const Liveness& liveness, Mailbox& mailbox);

  void add(const OpPtr& op, std::uint64_t index) REQUIRES(network_thread);
  // Removes and returns the next chunk, or nothing while the windows are full. Chunks served by this rank need none.
  std::optional<Outgoing> next() REQUIRES(network_thread);

  // The chunk's result has arrived: adapts the window.
  void answered(const Op& op, std::uint64_t index) REQUIRES(network_thread);
  // The chunk is no longer in flight: this rank has become its server.
  void retire(const Op& op, std::uint64_t index) REQUIRES(network_thread);

  // Rank 0 has set the next run of chunks. Throws ProtocolError if another rank has.
  void on_order(int peer, const FrameHeader& header) REQUIRES(network_thread);
  void clear() REQUIRES(network_thread);

 private:
  struct Window {
    double bytes = 0;          // of each path; adapts to the round-trip time
    std::size_t answered = 0;  // bytes answered since the last adaptation
  };

  std::size_t room(const Window& window) const REQUIRES(network_thread);
  void set_order() REQUIRES(network_thread);

  const EngineOptions& options_;
  const Liveness& liveness_;
  Mailbox& mailbox_;
  const int num_paths_to_one_;     // connections to a server
  const std::size_t least_bytes_;  // of the window, for each of them
  int num_paths_ GUARDED_BY(network_thread) = 1;         // connections to all servers of the last operation's pattern
  double message_bytes_ GUARDED_BY(network_thread) = 0;  // least window of each path
  Outbox outbox_ GUARDED_BY(network_thread);
  OrderedOutbox ordered_ GUARDED_BY(network_thread);
  Window window_ GUARDED_BY(network_thread), ordered_window_ GUARDED_BY(network_thread);
  std::uint64_t num_runs_ GUARDED_BY(network_thread) = 0;  // of the priority order, set by rank 0
};

}  // namespace shoal
