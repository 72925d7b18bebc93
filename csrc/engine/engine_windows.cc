// When chunks leave: what the windows let through, and the order of those with a priority. All on the transport's thread.
#include <algorithm>

#include "base/clock.h"
#include "engine/engine.h"

namespace shoal {

namespace {

constexpr std::size_t kRunsAhead = 4;
constexpr int kRanksAWindow = 64;

}  // namespace

double Engine::least_window() const {
  return static_cast<double>(options_.least_window_bytes) * (topology_->num_hosts() + topology_->num_helpers());
}

std::size_t Engine::open(const Window& window) const {
  return static_cast<std::size_t>(std::max(window.bytes, least_window()));
}

// Sends what waits while the windows are open. What goes to ourselves needs no window. Each outbox has a window of its
// own: else what fills it could wait for an operation that another rank begins only after one that we hold back.
void Engine::pump() {
  if (pumping_) return;  // an answer of our own server came while we were at it
  pumping_ = true;
  while (!failed_ && !parted_) {
    auto next = outbox_.next(open(window_), options_.rank);
    if (!next) {
      if (options_.rank == 0) set_order();
      next = ordered_.next(open(ordered_window_), options_.rank);
    }
    if (!next) break;
    send_contribution(next->first, next->second);
  }
  pumping_ = false;
}

// Rank 0: tells the others which chunks go next. Far enough ahead that they never wait for it, and no further, since
// what becomes urgent goes behind that. A run is a window's worth, and more where many ranks have to hear of it.
void Engine::set_order() {
  const std::size_t bytes = open(ordered_window_) * static_cast<std::size_t>(1 + options_.size / kRanksAWindow);
  while (ordered_.bytes_ahead() < kRunsAhead * bytes) {
    const auto run = ordered_.choose(num_begun_by_all(), bytes);
    if (!run) return;
    ordered_.extend(num_runs_, *run);
    broadcast(FrameType::order, run->seq, run->end, num_runs_++, "");
  }
}

void Engine::heard_order(int peer, const FrameHeader& header) {
  if (peer != 0) return malformed(peer, "it set an order, which is for rank 0 to do");
  ordered_.extend(header.signature, {header.seq, header.chunk});
  pump();
}

std::uint64_t Engine::num_begun_by_all() const {
  std::uint64_t num = submitted_;
  for (int rank = 0; rank < options_.size; ++rank) {
    if (rank != options_.rank) num = std::min(num, states_[static_cast<std::size_t>(rank)].submitted);
  }
  return num;
}

// The chunk, sent to another host's server, has been answered, or is served beside this rank now.
void Engine::left_the_way(const Op& op, std::uint64_t index) {
  if (op.ordered) ordered_.arrived(op, index);
  else outbox_.arrived(op, index);
}

// Opens or closes the window so that an answer takes about answer_s: more would only fill queues on the way,
// and there the flows to one server starve those to another, until the last one decides when the sum is there.
// 8 + 8 hosts at 200 Mbit/s, 16 MiB: 0.96 s with 2 MiB on the way to each server, 0.71 s with 32 KiB.
void Engine::answered(const Op& op, std::uint64_t index) {
  const Op::Part& part = op.parts[index];
  if (part.server == options_.rank) return;
  left_the_way(op, index);
  Window& window = op.ordered ? ordered_window_ : window_;
  window.answered += part.contribution.size;
  window.bytes = std::max(window.bytes, least_window());
  if (static_cast<double>(window.answered) < window.bytes) return;
  const double took_s = static_cast<double>(now_ns() - part.sent_ns) * 1e-9;
  window.bytes *= std::clamp(options_.answer_s / std::max(took_s, 1e-6), 0.5, 2.0);
  const double most = std::max(least_window(), static_cast<double>(options_.window_bytes));
  window.bytes = std::clamp(window.bytes, least_window(), most);
  window.answered = 0;
}

}  // namespace shoal
