// Queue of chunks to send by priority, in one order that rank 0 sets for all ranks.
//
// Ranks begin an urgent operation at different times. If each rank switched to it on its own, what it had sent of the
// previous operation would occupy its window until all ranks had returned to that one, and the rest would go chunk by
// chunk: 8 workers of BERT-base took 52 s per step that way, and 25 s without priorities. Rank 0 therefore cuts
// operations into runs of chunks, chooses the next run and broadcasts it (engine_chunks.cc), some windows ahead of
// what it sends.
//
// It cannot deadlock: all chunks of the rank that has sent the fewest are answered, since all others have sent the
// same ones, and its next chunk may go as soon as the rank has begun the operation. It waits for no operation that it
// begins later: rank 0 schedules an operation that others may not have begun only when no older one is queued.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "engine/outbox.h"

namespace shoal {

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

}  // namespace shoal
