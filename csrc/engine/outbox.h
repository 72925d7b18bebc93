// What waits to be sent in the order of the calls, and how much is on its way without an answer.
//
// One window bounds what is on its way (engine_chunks.cc), so queues further on are short. Operations go in the order
// of the calls, and the chunks of one in the order of the pattern of servers. What is added to what does not depend on
// it. Operations with a priority go another way (ordered_outbox.h).
//
// Chunks that wait for sums inside a host come late, when newer operations may have filled the window. So the oldest
// operation may always have one chunk on its way: all ranks send its chunks in the same order, so that those of the
// rank that has sent the fewest are all answered, and its next one can go.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "engine/in_flight.h"
#include "engine/op.h"

namespace shoal {

// An operation and the index of a chunk.
using Outgoing = std::pair<OpPtr, std::uint64_t>;

class Outbox {
 public:
  void add(const OpPtr& op, std::uint64_t index);

  // Takes out the chunk that goes next, or nothing while `window` bytes are on their way. What goes to the server
  // beside `rank` needs no window, and nor does the first chunk when nothing is on its way.
  std::optional<Outgoing> next(std::size_t window, int rank);

  // The chunk, sent to another host's server, has been answered, or is served beside this rank now.
  void arrived(const Op& op, std::uint64_t index) { in_flight_.arrived(op, index); }

  std::size_t bytes_in_flight() const { return in_flight_.bytes(); }

 private:
  struct Line {  // an operation's
    OpPtr op;
    std::deque<std::uint64_t> waiting;  // ascending
  };

  std::map<std::uint64_t, Line> lines_;  // by number: the oldest operation first; none without a chunk
  InFlight in_flight_;
};

}  // namespace shoal
