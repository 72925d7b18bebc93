#include "engine/ordered_outbox.h"

#include <algorithm>

namespace shoal {

void OrderedOutbox::add(const OpPtr& op, std::uint64_t index) {
  Line& line = lines_[op->seq];
  line.op = op;
  line.num_added = index + 1;
}

std::optional<OrderedOutbox::Run> OrderedOutbox::choose(std::uint64_t num_begun, std::size_t bytes) {
  Line* best = nullptr;
  for (auto& [seq, line] : lines_) {
    if (line.num_chosen == line.num_added) continue;
    if (best && seq >= num_begun) break;
    if (!best || line.op->spec.priority > best->op->spec.priority) best = &line;
  }
  if (!best) return {};
  for (std::size_t chosen = 0; chosen < bytes && best->num_chosen < best->num_added; ++best->num_chosen) {
    const std::size_t size = best->op->parts[best->num_chosen].contribution.size;
    chosen += size;
    ahead_ += size;
  }
  return Run{best->op->seq, best->num_chosen};
}

std::optional<Outgoing> OrderedOutbox::next(std::size_t window, int rank) {
  const auto run = runs_.find(next_run_);
  if (run == runs_.end()) return {};
  const auto found = lines_.find(run->second.seq);
  if (found == lines_.end() || found->second.num_sent == found->second.num_added) return {};  // not begun here
  Line& line = found->second;
  const std::uint64_t index = line.num_sent;
  const std::size_t bytes = bytes_between_hosts(*line.op, index, rank);
  if (bytes && on_the_way_ && on_the_way_ + bytes > window) return {};
  Outgoing taken{line.op, index};
  line.on_the_way += bytes;
  on_the_way_ += bytes;
  ahead_ -= std::min(ahead_, line.op->parts[index].contribution.size);
  if (++line.num_sent >= run->second.end) {
    runs_.erase(run);
    ++next_run_;
  }
  forget_if_over(found);
  return taken;
}

void OrderedOutbox::arrived(const Op& op, std::uint64_t index) {
  const auto line = lines_.find(op.seq);
  if (line == lines_.end()) return;
  const std::size_t bytes = std::min(line->second.on_the_way, op.parts[index].contribution.size);
  line->second.on_the_way -= bytes;
  on_the_way_ -= bytes;
  forget_if_over(line);
}

void OrderedOutbox::forget_if_over(std::map<std::uint64_t, Line>::iterator line) {
  if (line->second.num_sent == line->second.op->parts.size() && line->second.on_the_way == 0) lines_.erase(line);
}

}  // namespace shoal
