#include "engine/outbox.h"

#include <algorithm>

namespace shoal {

void Outbox::add(const OpPtr& op, std::uint64_t index) {
  Line& line = lines_[op->seq];
  line.op = op;
  line.waiting.insert(std::ranges::lower_bound(line.waiting, index), index);  // almost always at the end
}

std::optional<Outgoing> Outbox::next(std::size_t window, int rank) {
  if (lines_.empty()) return {};
  const auto oldest = lines_.begin();
  auto& [op, waiting] = oldest->second;
  Outgoing taken{op, waiting.front()};
  const std::size_t bytes = InFlight::counted(*op, taken.second, rank);
  if (!in_flight_.fits(bytes, window) && in_flight_.any_up_to(op->seq)) return {};
  in_flight_.sent(op->seq, bytes);
  waiting.pop_front();
  if (waiting.empty()) lines_.erase(oldest);
  return taken;
}

}  // namespace shoal
