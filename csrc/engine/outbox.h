// What waits to be sent, the most urgent first, and how much is on its way without an answer.
//
// One window bounds what is on its way (engine_chunks.cc), so queues further on are short, and the order in which
// chunks leave here is the order in which they travel: by the priority of their operations, operations of equal
// priority in the order of the calls, and the chunks of one in the order of the pattern of servers. With one priority
// that is the order of the calls. What is added to what does not depend on it.
//
// Priorities alone could stop everything: a rank whose window is full of an urgent operation that another has not
// begun, while that one waits for an older operation. So the oldest operation may always have one chunk on its way:
// all ranks send its chunks in the same order, so that those of the rank that has sent the fewest are all answered, and
// its next one can go. So every operation that all ranks have begun ends, whatever priorities they gave it and in
// whatever order their windows filled.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "engine/op.h"

namespace shoal {

class Outbox {
 public:
  using Item = std::pair<OpPtr, std::uint64_t>;  // operation and index of the chunk

  void add(const OpPtr& op, std::uint64_t index);

  // Takes out the chunk that goes next, or nothing while `window` bytes are on their way. What goes to the server
  // beside `rank` needs no window, and nor does the first chunk when nothing is on its way.
  std::optional<Item> next(std::size_t window, int rank);

  // The chunk, sent to another host's server, has been answered, or is served beside this rank now.
  void arrived(const Op& op, std::uint64_t index);

  std::size_t bytes_on_the_way() const { return on_the_way_; }

 private:
  struct Line {  // an operation's
    OpPtr op;
    std::deque<std::uint64_t> waiting;  // ascending
    std::size_t on_the_way = 0;         // bytes
  };

  Item take(std::map<std::uint64_t, Line>::iterator line, std::size_t bytes);
  void forget_if_idle(std::map<std::uint64_t, Line>::iterator line);
  static std::pair<std::int64_t, std::uint64_t> place_of(const Op& op) {
    return {-static_cast<std::int64_t>(op.spec.priority), op.seq};
  }

  std::map<std::uint64_t, Line> lines_;               // by number: the oldest operation first
  std::set<std::pair<std::int64_t, std::uint64_t>> in_order_;  // of those that wait: the most urgent first
  std::size_t on_the_way_ = 0;
};

}  // namespace shoal
