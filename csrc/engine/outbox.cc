#include "engine/outbox.h"

#include <algorithm>

namespace shoal {

void Outbox::add(const OpPtr& op, std::uint64_t index) {
  Line& line = lines_[op->seq];
  line.op = op;
  line.waiting.insert(std::ranges::lower_bound(line.waiting, index), index);  // nearly always at the end
}

std::optional<Outgoing> Outbox::next(std::size_t window, int rank) {
  const auto line = std::ranges::find_if(lines_, [](const auto& each) { return !each.second.waiting.empty(); });
  if (line == lines_.end()) return {};
  auto& [op, waiting, on_the_way] = line->second;
  const std::uint64_t index = waiting.front();
  const std::size_t bytes = bytes_between_hosts(*op, index, rank);
  const bool fits = !bytes || !on_the_way_ || on_the_way_ + bytes <= window;
  const bool keeps_going = line == lines_.begin() && on_the_way == 0;
  if (!fits && !keeps_going) return {};
  Outgoing taken{op, index};
  waiting.pop_front();
  on_the_way += bytes;
  on_the_way_ += bytes;
  forget_if_idle(line);
  return taken;
}

void Outbox::arrived(const Op& op, std::uint64_t index) {
  const auto line = lines_.find(op.seq);
  if (line == lines_.end()) return;
  const std::size_t bytes = std::min(line->second.on_the_way, op.parts[index].contribution.size);
  line->second.on_the_way -= bytes;
  on_the_way_ -= bytes;
  forget_if_idle(line);
}

void Outbox::forget_if_idle(std::map<std::uint64_t, Line>::iterator line) {
  if (line->second.waiting.empty() && line->second.on_the_way == 0) lines_.erase(line);
}

}  // namespace shoal
