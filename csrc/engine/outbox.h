// Queue of chunks to send in call order, with the bytes in flight.
//
// One window bounds the bytes in flight (engine_chunks.cc), so that queues along the path stay short. Operations are
// sent in call order, the chunks of one operation in the order of the server pattern. The order of additions does not
// depend on it. Operations with a priority use another queue (ordered_outbox.h).
//
// Chunks that wait for a reduction inside the host are added late, when newer operations may have filled the window.
// The oldest operation may therefore always have one chunk in flight: all ranks send its chunks in the same order, so
// those of the rank that has sent the fewest are all answered, and its next one can go.
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

}  // namespace shoal
