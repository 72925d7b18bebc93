#include "engine/outbox.h"

#include <algorithm>

namespace shoal {

namespace {

std::size_t bytes_of(const Op& op, std::uint64_t index, int rank) {
  const Op::Part& part = op.parts[index];
  return part.server == rank ? 0 : part.contribution.size;
}

}  // namespace

void Outbox::add(const OpPtr& op, std::uint64_t index) {
  Line& line = lines_[op->seq];
  line.op = op;
  line.waiting.insert(std::ranges::lower_bound(line.waiting, index), index);  // nearly always at the end
  in_order_.insert(place_of(*op));
}

std::optional<Outbox::Item> Outbox::next(std::size_t window, int rank) {
  if (in_order_.empty()) return {};
  const auto urgent = lines_.find(in_order_.begin()->second), oldest = lines_.begin();
  const std::size_t bytes = bytes_of(*urgent->second.op, urgent->second.waiting.front(), rank);
  if (!bytes || !on_the_way_ || on_the_way_ + bytes <= window) return take(urgent, bytes);
  const Line& line = oldest->second;
  if (line.waiting.empty() || line.on_the_way > 0) return {};
  return take(oldest, bytes_of(*line.op, line.waiting.front(), rank));
}

Outbox::Item Outbox::take(std::map<std::uint64_t, Line>::iterator line, std::size_t bytes) {
  const OpPtr op = line->second.op;
  std::deque<std::uint64_t>& waiting = line->second.waiting;
  const std::uint64_t index = waiting.front();
  waiting.pop_front();
  line->second.on_the_way += bytes;
  on_the_way_ += bytes;
  if (waiting.empty()) in_order_.erase(place_of(*op));
  forget_if_idle(line);
  return {op, index};
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
