// What waits to be sent by priority: in one order, which rank 0 sets for all ranks.
//
// Ranks begin an urgent operation at different moments. Did each turn to it by itself, what it had sent of the one
// before would lie in its window until all had come back to that one, and the rest would go chunk by chunk: 8 workers
// of BERT-base took 52 s a step so, and 25 s without priorities. So rank 0 cuts the operations into runs of chunks,
// chooses which run goes next, and tells all (engine_chunks.cc), some windows ahead of what it sends.
//
// Nothing hangs: the rank that has sent the fewest chunks has all of them answered, since all others have sent the
// same, and its next one may go as soon as this rank has begun the operation. It waits for none that it would begin
// later: rank 0 turns to an operation that others may not have begun only when no older one waits.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "engine/outbox.h"

namespace shoal {

class OrderedOutbox {
 public:
  struct Run {
    std::uint64_t seq = 0;  // of the operation
    std::uint64_t end = 0;  // behind its last chunk; the first is the one that earlier runs have left
  };

  // Chunks of one operation come in ascending order, all of them.
  void add(const OpPtr& op, std::uint64_t index);

  // Chooses the run that comes after all chosen before: about `bytes` of the most urgent operation of those before
  // number `num_begun`, which all ranks have begun, or else of the oldest. Nothing: all that waits here is in runs.
  std::optional<Run> choose(std::uint64_t num_begun, std::size_t bytes);

  // Run `number` of the order is this one. They may come in any order.
  void extend(std::uint64_t number, Run run) { runs_[number] = run; }

  // As Outbox's.
  std::optional<Outgoing> next(std::size_t window, int rank);
  void arrived(const Op& op, std::uint64_t index) { in_flight_.arrived(op, index); }

  std::size_t bytes_in_flight() const { return in_flight_.bytes(); }

  // Of chunks that choose() has put into runs and next() has not taken.
  std::size_t bytes_ahead() const { return ahead_; }

 private:
  struct Line {  // an operation's
    OpPtr op;
    std::uint64_t num_added = 0, num_chosen = 0, num_sent = 0;  // chunks
  };

  std::map<std::uint64_t, Line> lines_;  // by number: the oldest operation first
  std::map<std::uint64_t, Run> runs_;    // by number, those not sent
  std::uint64_t next_run_ = 0;
  InFlight in_flight_;
  std::size_t ahead_ = 0;
};

}  // namespace shoal
