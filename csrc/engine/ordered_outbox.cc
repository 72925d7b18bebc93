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
  if (found == lines_.end() || found->second.num_sent == found->second.num_added) return {};  // not begun on this rank
  Line& line = found->second;
  Outgoing taken{line.op, line.num_sent};
  const std::size_t bytes = InFlight::counted(*line.op, line.num_sent, rank);
  if (!in_flight_.fits(bytes, window)) return {};
  in_flight_.sent(line.op->seq, bytes);
  ahead_ -= std::min(ahead_, line.op->parts[line.num_sent].contribution.size);
  if (++line.num_sent >= run->second.end) {
    runs_.erase(run);
    ++next_run_;
  }
  if (line.num_sent == line.op->parts.size()) lines_.erase(found);
  return taken;
}

}  // namespace shoal
