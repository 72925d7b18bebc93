#include "engine/flow_control.h"

#include <algorithm>

#include "base/clock.h"
#include "transport/address.h"

namespace shoal {

namespace {

constexpr std::size_t kRunsAhead = 4;
constexpr int kRanksAWindow = 64;

}  // namespace

// ---- in call order ------------------------------------------------------------------------------------------

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

// ---- by priority -------------------------------------------------------------------------------------------

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
    const std::size_t size = best->op->parts[best->num_chosen].contribution.size();
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
  ahead_ -= std::min(ahead_, line.op->parts[line.num_sent].contribution.size());
  if (++line.num_sent >= run->second.end) {
    runs_.erase(run);
    ++next_run_;
  }
  if (line.num_sent == line.op->parts.size()) lines_.erase(found);
  return taken;
}

// ---- windows -----------------------------------------------------------------------------------------------

namespace {

// Connections for data to each server, or rails.
int num_paths_to_one(const EngineOptions& options) {
  if (!options.fabric.empty()) return 1 + static_cast<int>(std::ranges::count(options.fabric, ','));
  return options.connections_per_peer * static_cast<int>(addresses_of(options.address).size());
}

}  // namespace

FlowControl::FlowControl(const EngineOptions& options, const Topology& topology, const Liveness& liveness, Mailbox& mailbox)
    : options_(options),
      liveness_(liveness),
      mailbox_(mailbox),
      num_paths_to_one_(num_paths_to_one(options)),
      least_bytes_(options.min_window_bytes ? options.min_window_bytes : topology.usual_message_bytes()) {}

void FlowControl::add(const OpPtr& op, std::uint64_t index) {
  num_paths_ = op->num_links * num_paths_to_one_;
  message_bytes_ = static_cast<double>(std::max(least_bytes_, op->bytes_of(0)));
  if (op->ordered) ordered_.add(op, index);
  else outbox_.add(op, index);
}

std::size_t FlowControl::room(const Window& window) const {
  return static_cast<std::size_t>(std::max(window.bytes, message_bytes_) * num_paths_);
}

std::optional<Outgoing> FlowControl::next() {
  if (auto next = outbox_.next(room(window_), options_.rank)) return next;
  if (ordered_.empty()) return {};
  if (options_.rank == 0) set_order();
  return ordered_.next(room(ordered_window_), options_.rank);
}

// On rank 0: sends the others the order of the next chunks, far enough ahead that they never wait for it, and no
// further, since urgent chunks can only go after it. A run is one window, and more with many ranks to notify.
void FlowControl::set_order() {
  const std::size_t bytes = room(ordered_window_) * static_cast<std::size_t>(1 + options_.size / kRanksAWindow);
  while (ordered_.bytes_ahead() < kRunsAhead * bytes) {
    const auto run = ordered_.choose(liveness_.num_begun_by_all(), bytes);
    if (!run) return;
    ordered_.extend(num_runs_, *run);
    mailbox_.broadcast({FrameType::order, run->seq, run->end, num_runs_++, ""});
  }
}

void FlowControl::on_order(int peer, const FrameHeader& header) {
  if (peer != 0) throw ProtocolError(peer, "it sent an order, which only rank 0 may");
  ordered_.extend(header.signature, {header.seq, header.chunk});
}

void FlowControl::retire(const Op& op, std::uint64_t index) {
  if (op.ordered) ordered_.arrived(op, index);
  else outbox_.arrived(op, index);
}

// Adapts the window so that a round trip takes about target_rtt_s. A larger window only fills queues on the path,
// where flows to one server starve those to another, and the last server determines when the sum is complete. 8 + 8
// hosts at 200 Mbit/s, 16 MiB: 0.96 s with 2 MiB in flight per server, 0.71 s with 32 KiB.
void FlowControl::answered(const Op& op, std::uint64_t index) {
  const Op::Part& part = op.parts[index];
  if (part.server == options_.rank) return;
  retire(op, index);
  Window& window = op.ordered ? ordered_window_ : window_;
  window.answered += op.in_flight_bytes(index);
  if (window.answered < room(window)) return;
  const double took_s = static_cast<double>(now_ns() - part.sent_ns) * 1e-9;
  const double most = std::max(message_bytes_, static_cast<double>(options_.window_bytes) / num_paths_);
  window.bytes = std::max(window.bytes, message_bytes_) * std::clamp(options_.target_rtt_s / std::max(took_s, 1e-6), 0.5, 2.0);
  window.bytes = std::clamp(window.bytes, message_bytes_, most);
  window.answered = 0;
}

void FlowControl::clear() {
  outbox_ = {};
  ordered_ = {};
}

}  // namespace shoal
