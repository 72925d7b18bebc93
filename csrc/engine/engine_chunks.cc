// The path of a chunk: from the tensor to its server, and the result back; and flow control. All on the transport's
// thread.
#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "engine/combine.h"
#include "engine/engine.h"

namespace shoal {

namespace {

constexpr std::size_t kRunsAhead = 4;
constexpr int kRanksAWindow = 64;

bool is_half(Element element) { return element == Element::float16 || element == Element::bfloat16; }

// Kinds whose results go to ranks that contribute nothing, and so may not have begun the operation.
bool forwards(Kind kind) { return kind == Kind::broadcast || kind == Kind::all_gather; }

}  // namespace

// Begins an operation if this rank is alone on its host; otherwise the host stage calls push() and expect().
void Engine::begin(const OpPtr& op) {
  if (failed_) return;
  const OpSpec& spec = op->spec;
  const bool wide = options_.wide_partials && topology_->any_host_shared() && is_half(spec.element) && op->sums();
  for (std::uint64_t index = 0; index < op->chunks.size(); ++index) {
    const Chunk& chunk = op->chunks[index];
    const bool source = spec.kind == Kind::broadcast ? spec.root == options_.rank : chunk.server == options_.rank;
    op->pending.fetch_add(1);
    if (!op->sums() && !source) {
      expect(op, index, op->output_at(index, options_.rank));
      continue;
    }
    std::byte* destination = nullptr;
    if (spec.kind == Kind::all_reduce || spec.kind == Kind::barrier ||
        (spec.kind == Kind::reduce && spec.root == options_.rank) || (spec.kind == Kind::reduce_scatter && source)) {
      destination = op->output_at(index, options_.rank);
    }
    Payload data{op->input_at(index, options_.rank), op->bytes_of(index), nullptr, 0, false};
    if (wide) {
      const auto buffer = pool_.take(chunk.count * sizeof(float));
      widen(reinterpret_cast<float*>(buffer.get()), data.data, chunk.count, spec.element);
      data = {buffer.get(), chunk.count * sizeof(float), buffer, 0, false};
    }
    push(op, index, std::move(data), wide ? Element::float32 : spec.element, destination);
  }
  if (forwards(spec.kind)) broadcast(FrameType::heartbeat, 0, 0, 0, "");
  if (op->ordered && options_.rank != 0) send(0, {}, {});  // rank 0 may schedule it now
  finished_one(op);
}

// Keeps an operation pending while a queue points into the caller's memory.
std::shared_ptr<const void> Engine::hold(const OpPtr& op) {
  op->pending.fetch_add(1);
  return {static_cast<const void*>(op.get()), [this, op](const void*) { finished_one(op); }};
}

void Engine::push(const OpPtr& op, std::uint64_t index, Payload data, Element input, std::byte* destination) {
  if (failed_) return;
  Op::Part& part = op->parts[index];
  part.step = Op::Step::waiting;
  part.contributed = true;
  part.input = input;
  part.destination = destination;
  part.server = route(op->seq, index, op->chunks[index].server);
  if (part.server < 0) return fail("no server is left: the last helper was lost and workers do not serve");
  if (forwards(op->spec.kind)) {
    data.owner = hold(op);
    const auto early = early_frames_.find(op->seq);  // a root expects no result: an early one belongs to another operation
    if (index == 0 && early != early_frames_.end() && early->second.front().header.signature != op->signature) {
      return on_unexpected_result(early->second.front().peer, early->second.front().header);
    }
  }
  part.contribution = std::move(data);
  if (op->ordered) ordered_.add(op, index);
  else outbox_.add(op, index);
  pump();
}

void Engine::expect(const OpPtr& op, std::uint64_t index, std::byte* destination) {
  if (failed_) return;
  op->parts[index].step = Op::Step::waiting;
  op->parts[index].destination = destination;
  op->parts[index].server = op->chunks[index].server;
  replay_early(op->seq);
}

int Engine::route(std::uint64_t seq, std::uint64_t index, int server) {
  if (!topology_->is_helper(server) || !lost_helpers_[static_cast<std::size_t>(server - options_.size)]) return server;
  return topology_->stand_in(seq, index, lost_helpers_, options_.workers_serve);
}

void Engine::send_contribution(const OpPtr& op, std::uint64_t index) {
  Op::Part& part = op->parts[index];
  FrameHeader header = header_of(*op, index, FrameType::push);
  Payload payload = forwards(op->spec.kind) ? std::move(part.contribution) : part.contribution;
  if (forwards(op->spec.kind)) part.contribution = {nullptr, payload.size, nullptr, 0, false};
  part.sent_ns = now_ns();
  traced("push", part.sent_ns, op->seq, index);
  if (part.server != options_.rank) return send(part.server, header, std::move(payload));
  const std::string wrong = server_->contribute(options_.rank, header, std::move(payload));
  if (!wrong.empty()) fail(rank_name(options_.rank) + " made a malformed contribution: " + wrong);
}

FrameHeader Engine::header_of(const Op& op, std::uint64_t index, FrameType type) const {
  const Op::Part& part = op.parts[index];
  FrameHeader header;
  header.type = type;
  header.kind = static_cast<std::uint8_t>(op.spec.kind);
  header.element = static_cast<std::uint8_t>(op.spec.element);
  header.input = static_cast<std::uint8_t>(part.input);
  header.combine = static_cast<std::uint8_t>(op.spec.combine);
  header.redo = part.server != op.chunks[index].server;
  header.needed = static_cast<std::uint16_t>(op.sums() ? topology_->num_hosts() : 1);
  header.host = static_cast<std::uint16_t>(op.sums() ? topology_->my_host() : 0);
  header.divisor = static_cast<std::uint16_t>(options_.size);
  header.root = op.spec.kind == Kind::all_gather ? options_.rank : op.spec.root;
  header.seq = op.seq;
  header.chunk = index;
  header.signature = op.signature;
  header.server = static_cast<std::uint32_t>(part.server);
  return header;
}

// Sends a result of this rank's server to the ranks that need it, and an empty confirmation to other contributors.
void Engine::answer(int peer, const FrameHeader& header, const Payload& payload) {
  const auto kind = static_cast<Kind>(header.kind);
  traced("sum", now_ns(), header.seq, header.chunk);
  const bool to_peer = kind == Kind::all_reduce || kind == Kind::barrier ||
                       (kind == Kind::reduce && peer == header.root) ||
                       (kind == Kind::reduce_scatter && peer == options_.rank);
  if (!forwards(kind)) return send_result(peer, header, to_peer ? payload : Payload{});
  // The contributor is confirmed when the last copy has been sent, so its window also bounds the data queued here for
  // a rank that does not read.
  Payload forwarded = payload;
  if (peer == options_.rank) {
    send_result(peer, header, {});
  } else {
    const auto confirm = [this, peer, header](const void*) {
      transport_->post([this, peer, header] { send_result(peer, header, {}); });
    };
    forwarded.owner = {payload.data, [confirm, owner = payload.owner](const void* data) { confirm(data); }};
  }
  for (int host = 0; host < topology_->num_hosts(); ++host) {
    if (host == topology_->host_of(peer)) continue;
    const int root = kind == Kind::broadcast ? header.root : options_.rank;
    send_result(topology_->owner(host, kind, root, header.chunk, options_.rank), header, forwarded);
  }
}

void Engine::send_result(int peer, FrameHeader header, const Payload& payload) {
  header.type = FrameType::result;
  if (peer == options_.rank) return deliver(peer, header, payload);
  PeerState& state = states_[static_cast<std::size_t>(peer)];
  const bool unasked = forwards(static_cast<Kind>(header.kind)) && payload.size > 0 && state.submitted <= header.seq;
  if (unasked) {
    if (state.unexpected_bytes + payload.size > options_.unexpected_bytes) {
      state.deferred.emplace_back(header, payload);
      return;
    }
    state.unexpected_bytes += payload.size;
  }
  send(peer, header, payload);
}

// On shutdown, sends results withheld from ranks that had not begun the operation.
void Engine::send_deferred() {
  for (std::size_t peer = 0; peer < states_.size(); ++peer) {
    std::deque<std::pair<FrameHeader, Payload>> deferred;
    deferred.swap(states_[peer].deferred);
    for (auto& [header, payload] : deferred) send(static_cast<int>(peer), header, std::move(payload));
  }
}

void Engine::send(int peer, FrameHeader header, Payload payload) {
  header.submitted = submitted_;
  header.completed = completed_;
  transport_->send(peer, header, std::move(payload));
}

// Handles a result, or the confirmation of a contribution.
void Engine::deliver(int peer, const FrameHeader& header, Payload payload) {
  if (failed_ || diverged_) return;
  const std::uint64_t begun = submitted_;  // read before find(): an operation begun later finds its results in early_frames_
  const OpPtr op = find(header.seq);
  if (!op) {
    if (header.seq >= begun) {
      early_frames_[header.seq].push_back({peer, header, std::move(payload)});
      return;
    }
    const Record mine = record_of(header.seq);  // it may have completed
    if (mine.seq == header.seq && mine.signature != header.signature) on_unexpected_result(peer, header);
    return;
  }
  if (op->signature != header.signature) return on_unexpected_result(peer, header);
  if (header.chunk >= op->parts.size()) {
    return fail("the ranks cut " + numbered(header.seq) + " differently; give all of them the same options");
  }
  const std::uint64_t index = header.chunk;
  Op::Part& part = op->parts[index];
  if (part.step == Op::Step::done) return;
  if (part.step == Op::Step::idle) {
    early_frames_[header.seq].push_back({peer, header, std::move(payload)});
    return;
  }
  if (peer != part.server && peer != op->chunks[index].server) {  // the original server may have answered before it was lost
    return malformed(peer, "a result of chunk " + std::to_string(index) + " of " + numbered(header.seq) + ", which " +
                               server_name(part.server) + " serves");
  }
  const std::size_t expected = part.destination ? op->bytes_of(index) : 0;
  if (payload.size != expected) {
    return malformed(peer, "a result of " + std::to_string(payload.size) + " bytes where " + std::to_string(expected) +
                               " were expected, chunk " + std::to_string(index) + " of " + numbered(header.seq));
  }
  if (expected) std::memcpy(part.destination, payload.data, expected);
  traced("pull", now_ns(), op->seq, index);
  part.step = Op::Step::done;
  const int server = part.server;
  if (part.contributed) {
    answered(*op, index);
    part.contribution = {};
  }
  if (topology_->is_helper(server)) {
    op->retained[index] = std::move(payload);
    retained_[op->seq] = op;
  }
  if (stage_ && (op->sums() || !part.contributed)) stage_->finish(*op, index);
  finished_one(op);
  pump();
}

// Handles a result whose signature differs from this rank's operation of that number. A helper reduces only
// contributions that match, so it is broken. A rank may have issued another operation; a forwarded result is
// attributed to its root.
void Engine::on_unexpected_result(int peer, const FrameHeader& header) {
  if (topology_->is_helper(peer)) return malformed(peer, "a result that does not match the contribution");
  const bool forwarded = forwards(static_cast<Kind>(header.kind)) && 0 <= header.root && header.root < options_.size;
  suspect(header.seq, forwarded ? header.root : peer, header.signature);
}

void Engine::replay_early(std::uint64_t seq) {
  const auto found = early_frames_.find(seq);
  if (found == early_frames_.end()) return;
  std::vector<EarlyFrame> early = std::move(found->second);
  early_frames_.erase(found);
  for (EarlyFrame& each : early) deliver(each.peer, each.header, std::move(each.payload));
}

// ---- flow control ---------------------------------------------------------------------------------------

double Engine::min_window() const {
  return static_cast<double>(options_.min_window_bytes) * (topology_->num_hosts() + topology_->num_helpers());
}

std::size_t Engine::open(const Window& window) const {
  return static_cast<std::size_t>(std::max(window.bytes, min_window()));
}

// Sends queued chunks while the windows are open. Chunks served by this rank need no window. Each outbox has its own
// window: with a shared one, the chunks that fill it could wait for an operation that another rank begins only after
// one that is held back here.
void Engine::pump() {
  if (pumping_) return;  // this rank's own server has answered inside send_contribution()
  pumping_ = true;
  while (!failed_ && !diverged_) {
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

// On rank 0: sends the others the order of the next chunks, far enough ahead that they never wait for it, and no
// further, since urgent chunks can only go after it. A run is one window, and more with many ranks to notify.
void Engine::set_order() {
  const std::size_t bytes = open(ordered_window_) * static_cast<std::size_t>(1 + options_.size / kRanksAWindow);
  while (ordered_.bytes_ahead() < kRunsAhead * bytes) {
    const auto run = ordered_.choose(num_begun_by_all(), bytes);
    if (!run) return;
    ordered_.extend(num_runs_, *run);
    broadcast(FrameType::order, run->seq, run->end, num_runs_++, "");
  }
}

void Engine::on_order(int peer, const FrameHeader& header) {
  if (peer != 0) return malformed(peer, "it sent an order, which only rank 0 may");
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

// Accounts for a chunk that is no longer in flight: answered, or now served by this rank.
void Engine::retire(const Op& op, std::uint64_t index) {
  if (op.ordered) ordered_.arrived(op, index);
  else outbox_.arrived(op, index);
}

// Adapts the window so that a round trip takes about target_rtt_s. A larger window only fills queues on the path,
// where flows to one server starve those to another, and the last server determines when the sum is complete. 8 + 8
// hosts at 200 Mbit/s, 16 MiB: 0.96 s with 2 MiB in flight per server, 0.71 s with 32 KiB.
void Engine::answered(const Op& op, std::uint64_t index) {
  const Op::Part& part = op.parts[index];
  if (part.server == options_.rank) return;
  retire(op, index);
  Window& window = op.ordered ? ordered_window_ : window_;
  window.answered += part.contribution.size;
  window.bytes = std::max(window.bytes, min_window());
  if (static_cast<double>(window.answered) < window.bytes) return;
  const double took_s = static_cast<double>(now_ns() - part.sent_ns) * 1e-9;
  window.bytes *= std::clamp(options_.target_rtt_s / std::max(took_s, 1e-6), 0.5, 2.0);
  const double most = std::max(min_window(), static_cast<double>(options_.window_bytes));
  window.bytes = std::clamp(window.bytes, min_window(), most);
  window.answered = 0;
}

}  // namespace shoal
