#include "engine/chunk_path.h"

#include <cstring>

#include "base/clock.h"
#include "engine/reduce.h"

namespace shoal {

namespace {
constexpr std::size_t kLeastTimedBytes = 4 << 10;  // smaller chunks tell of latency, not of a link's rate
}

ChunkPath::ChunkPath(Parts parts)
    : with_(std::move(parts)),
      me_(with_.members.rank),
      answered_(static_cast<std::size_t>(with_.topology.size() + with_.topology.num_helpers())),
      flow_(with_.options, with_.topology, with_.liveness, with_.mailbox),
      server_(
          with_.pool, budget_, with_.topology.num_hosts(),
          [this](int peer, const FrameHeader& header, const Payload& payload) SHOAL_NO_ANALYSIS { answer(peer, header, payload); },
          [this](const SumServer::Conflict& conflict) SHOAL_NO_ANALYSIS { with_.mismatch.on_conflict(conflict); }),
      withheld_(static_cast<std::size_t>(with_.members.size())) {}

// ---- contributions --------------------------------------------------------------------------------------

void ChunkPath::begin(const OpPtr& op) {
  const OpSpec& spec = op->spec;
  const bool wide = with_.options.wide_partials && with_.topology.any_host_shared() && is_half(spec.element) && op->sums();
  for (std::uint64_t index = 0; index < op->chunks.size(); ++index) {
    const Chunk& chunk = op->chunks[index];
    const bool source = spec.kind == Kind::broadcast ? spec.root == me_ : chunk.server == me_;
    with_.ops.hold(*op);
    if (!op->sums() && !source) {
      expect(op, index, op->output_at(index, me_));
      continue;
    }
    std::byte* destination = nullptr;
    if (sums_for_all(spec.kind) || (spec.kind == Kind::reduce && spec.root == me_) ||
        (spec.kind == Kind::reduce_scatter && source)) {
      destination = op->output_at(index, me_);
    }
    Payload data(op->input_at(index, me_), op->bytes_of(index));
    if (wide) {
      Payload widened = with_.pool.payload(chunk.count * sizeof(float));
      widen(reinterpret_cast<float*>(widened.writable()), data.data(), chunk.count, spec.element);
      data = std::move(widened);
    }
    push(op, index, std::move(data), wide ? Element::float32 : spec.element, destination);
  }
  if (forwards(spec.kind)) with_.mailbox.broadcast({FrameType::heartbeat});
  if (op->ordered && me_ != 0) with_.mailbox.beat(0);  // rank 0 may schedule it now
  with_.ops.release(op);
}

void ChunkPath::push(const OpPtr& op, std::uint64_t index, Payload data, Element input, std::byte* destination) {
  Op::Part& part = op->parts[index];
  part.step = Op::Step::waiting;
  part.contributed = true;
  part.input = input;
  part.destination = destination;
  part.server = route(*op, index, op->chunks[index].server);
  if (forwards(op->spec.kind)) {
    data = data.owned_by(with_.ops.held(op));
    const auto early = index == 0 ? early_.find(op->seq) : early_.end();
    if (early != early_.end()) {  // a root expects no result: an early one belongs to another operation
      for (const EarlyFrame& each : early->second) {
        if (each.header.signature != op->signature) return with_.mismatch.on_unexpected_result(each.peer, each.header);
      }
    }
  }
  part.contribution = std::move(data);
  flow_.add(op, index);
  pump();
}

void ChunkPath::expect(const OpPtr& op, std::uint64_t index, std::byte* destination) {
  Op::Part& part = op->parts[index];
  part.step = Op::Step::waiting;
  part.destination = destination;
  part.server = op->chunks[index].server;
  replay_early(op->seq);
}

// Sends queued chunks while the windows are open.
void ChunkPath::pump() {
  if (pumping_) return;  // this rank's own server has answered inside send_contribution()
  struct Guard {
    bool& flag;
    ~Guard() { flag = false; }
  } guard{pumping_ = true};
  while (!with_.mismatch.diverged()) {
    const auto next = flow_.next();
    if (!next) return;
    send_contribution(next->first, next->second);
  }
}

void ChunkPath::send_contribution(const OpPtr& op, std::uint64_t index) {
  Op::Part& part = op->parts[index];
  const FrameHeader header = header_of(*op, index, FrameType::push);
  Payload payload = forwards(op->spec.kind) ? std::move(part.contribution) : part.contribution;
  if (forwards(op->spec.kind)) part.contribution = {nullptr, payload.size()};
  part.sent_ns = now_ns();
  with_.journal.traced("push", part.sent_ns, op->seq, index);
  if (part.server != me_) return with_.mailbox.send(part.server, header, std::move(payload));
  const std::string wrong =
      server_.contribute({me_, with_.topology.my_host()}, header, std::move(payload), place_for_sum(op, index));
  if (!wrong.empty()) throw GroupFailure(with_.members.name_of(me_) + " made a malformed contribution: " + wrong);
}

// Of a lost helper's weights, the rank that has a copy takes over the piece; of sums, any.
int ChunkPath::route(const Op& op, std::uint64_t index, int server) const {
  if (is_served(op.spec.kind) && with_.router.is_lost(server)) return buddy_of(op.spec.table, index, with_.members.size());
  return with_.router.route(op.seq, index, server);
}

FrameHeader ChunkPath::header_of(const Op& op, std::uint64_t index, FrameType type) const {
  const Op::Part& part = op.parts[index];
  FrameHeader header;
  header.type = type;
  header.kind = op.spec.kind;
  header.element = returns_weights(op.spec.kind) ? op.spec.weights : op.spec.element;
  header.input = part.input;
  header.combine = op.spec.combine;
  const bool copies = op.spec.copied && changes_weights(op.spec.kind) && with_.members.is_helper(part.server);
  header.redo = part.server != op.chunks[index].server ? 1 : copies ? 2 : 0;
  header.needed = static_cast<std::uint16_t>(op.sums() ? with_.topology.num_hosts() : 1);
  header.host = static_cast<std::uint16_t>(op.sums() ? with_.topology.my_host() : 0);
  header.divisor = static_cast<std::uint16_t>(with_.members.size());
  header.root = op.spec.kind == Kind::all_gather ? me_ : op.spec.root;
  header.seq = op.seq;
  header.chunk = index;
  header.signature = op.signature;
  header.table = op.spec.table;
  header.step = op.spec.step;
  header.rule = op.spec.rule;
  header.server = static_cast<std::uint32_t>(part.server);
  return header;
}

// ---- this rank's server ---------------------------------------------------------------------------------

// Checks what SumServer cannot know: the sender and the root.
void ChunkPath::check_sender(int peer, const FrameHeader& header) const {
  if (with_.members.is_helper(peer)) throw ProtocolError(peer, "a helper contributes nothing");
  const Kind kind = header.kind;
  if (kind == Kind::all_gather) throw ProtocolError(peer, "a part of an all_gather, which its rank sends to all itself");
  const bool rooted = kind == Kind::broadcast || kind == Kind::reduce;
  if (rooted && (header.root < 0 || header.root >= with_.members.size())) {
    throw ProtocolError(peer, "there is no rank " + std::to_string(header.root));
  }
  if (kind == Kind::broadcast && header.root != peer) {
    throw ProtocolError(peer, "a broadcast of rank " + std::to_string(header.root) + ", which sends it itself");
  }
}

// Checks what this rank knows of an operation that it has begun. Of another it sees only whether contributions fit together,
// and passes a broadcast on as it comes: the receiver then names both.
void ChunkPath::check_push(int peer, const FrameHeader& header, std::size_t bytes) {
  const OpPtr op = with_.ops.find(header.seq);
  if (!op || op->signature != header.signature) return;
  std::string wrong = refusal_of(*op, header);
  if (wrong.empty()) {
    const Chunk& chunk = op->chunks[header.chunk];
    const std::string text = "chunk " + std::to_string(header.chunk) + " of " + numbered(header.seq);
    if (chunk.server != me_ && !with_.members.is_helper(chunk.server)) {
      wrong = "a contribution to " + text + ", which " + with_.members.name_of(chunk.server) + " serves";
    } else if (forwards(header.kind) && bytes != op->bytes_of(header.chunk)) {
      wrong = std::to_string(bytes) + " bytes for " + text + ", which has " + std::to_string(op->bytes_of(header.chunk));
    }
  }
  if (!wrong.empty()) throw ProtocolError(peer, wrong);
}

// Returns what contradicts the operation, in a frame that has its signature, or an empty string.
std::string ChunkPath::refusal_of(const Op& op, const FrameHeader& header) const {
  const Kind kind = op.spec.kind;
  const std::string text = "chunk " + std::to_string(header.chunk) + " of " + numbered(header.seq);
  if (header.kind != kind) {
    return text + " as of a " + std::string(name_of(header.kind)) + ", but it is a " + std::string(name_of(kind));
  }
  if (header.chunk >= op.chunks.size()) {
    return text + ", which has " + std::to_string(op.chunks.size()) + "; give all ranks the same options";
  }
  const int root = kind == Kind::all_gather ? op.chunks[header.chunk].server : op.spec.root;
  if (header.root != root) return text + " with root " + std::to_string(header.root) + ", not " + std::to_string(root);
  return "";
}

void ChunkPath::on_push(int peer, const FrameHeader& header, Payload payload) {
  check_sender(peer, header);
  check_push(peer, header, payload.size());
  const std::string wrong = server_.contribute({peer, with_.topology.host_of(peer)}, header, std::move(payload));
  if (!wrong.empty()) throw ProtocolError(peer, wrong);
}

void ChunkPath::on_supply(int peer, const FrameHeader& header, Payload payload) {
  check_sender(peer, header);
  const auto retained = retained_.find(header.seq);
  const OpPtr op = retained != retained_.end() ? retained->second : with_.ops.find(header.seq);
  const bool same = op && op->signature == header.signature && header.chunk < op->chunks.size();
  if (same && !with_.topology.is_helper(op->chunks[header.chunk].server)) {
    throw ProtocolError(peer, "it supplies chunk " + std::to_string(header.chunk) + " of " + numbered(header.seq) + ", which " +
                                  with_.members.name_of(op->chunks[header.chunk].server) + " serves");
  }
  const std::string wrong = server_.supply({peer, with_.topology.host_of(peer)}, header, std::move(payload));
  if (!wrong.empty()) throw ProtocolError(peer, wrong);
}

// A lost helper has answered nobody whose sum comes now: all contribute again, to this rank.
void ChunkPath::on_copy(int peer, const FrameHeader& header, Payload payload) {
  if (!with_.members.is_helper(peer)) throw ProtocolError(peer, "a rank keeps no weights that have a copy here");
  if (with_.router.is_lost(peer)) return;
  const std::string wrong = server_.take_copy(peer, header, std::move(payload));
  if (!wrong.empty()) throw ProtocolError(peer, wrong);
}

// Answers a contributor: with the result if it needs it, else with an empty confirmation.
void ChunkPath::answer(int peer, const FrameHeader& header, const Payload& payload) {
  if (header.type == FrameType::copied) return with_.mailbox.send(peer, header, {});
  const Kind kind = header.kind;
  with_.journal.traced("sum", now_ns(), header.seq, header.chunk);
  if (forwards(kind)) return forward(peer, header, payload);
  const bool needed = sums_for_all(kind) || (kind == Kind::reduce && peer == header.root) ||
                      (kind == Kind::reduce_scatter && peer == me_);
  send_result(peer, header, needed ? payload : Payload{});
}

// Sends a contribution on to every other host. The contributor is confirmed when the last copy has been sent, so its
// window also bounds the data queued here for a rank that does not read.
void ChunkPath::forward(int peer, const FrameHeader& header, const Payload& payload) {
  const Kind kind = header.kind;
  Payload forwarded = payload;
  if (peer == me_) {
    send_result(peer, header, {});
  } else {
    const auto confirm = [this, peer, header, owner = payload.owner()](const void*) {
      with_.post([this, peer, header]() SHOAL_NO_ANALYSIS { send_result(peer, header, {}); });
    };
    forwarded = payload.owned_by({static_cast<const void*>(payload.data()), confirm});
  }
  for (int host = 0; host < with_.topology.num_hosts(); ++host) {
    if (host == with_.topology.host_of(peer)) continue;
    const int root = kind == Kind::broadcast ? header.root : me_;
    send_result(with_.topology.owner(host, kind, root, header.chunk, me_), header, forwarded);
  }
}

void ChunkPath::send_result(int peer, FrameHeader header, const Payload& payload) {
  header.type = FrameType::result;
  if (peer == me_) return deliver(peer, header, payload);
  Withheld& withheld = withheld_[static_cast<std::size_t>(peer)];
  if (forwards(header.kind) && payload.size() > 0 && with_.liveness.num_begun(peer) <= header.seq) {
    if (withheld.sent_bytes + payload.size() > with_.options.unexpected_bytes) {
      withheld.results.emplace_back(header, payload);
      return;
    }
    withheld.sent_bytes += payload.size();
  }
  with_.mailbox.send(peer, header, payload);
}

void ChunkPath::resume(int rank) {
  Withheld withheld = std::exchange(withheld_[static_cast<std::size_t>(rank)], {});
  for (auto& [header, payload] : withheld.results) send_result(rank, header, payload);
}

void ChunkPath::send_withheld() {
  for (std::size_t rank = 0; rank < withheld_.size(); ++rank) {
    Withheld withheld = std::exchange(withheld_[rank], {});
    for (auto& [header, payload] : withheld.results) with_.mailbox.send(static_cast<int>(rank), header, std::move(payload));
  }
}

// ---- results --------------------------------------------------------------------------------------------

void ChunkPath::deliver(int peer, const FrameHeader& header, Payload payload) {
  if (with_.mismatch.diverged()) return;
  const std::uint64_t begun = with_.ops.num_submitted();  // before find(): a later operation finds its results in early_
  const OpPtr op = with_.ops.find(header.seq);
  if (!op) {
    if (header.seq >= begun) early_[header.seq].push_back({peer, header, std::move(payload)});
    else if (with_.mismatch.differs(header)) with_.mismatch.on_unexpected_result(peer, header);  // it may have completed
    return;
  }
  if (op->signature != header.signature) return with_.mismatch.on_unexpected_result(peer, header);
  if (const std::string wrong = refusal_of(*op, header); !wrong.empty()) refuse_result(peer, header, "a result of " + wrong);
  switch (op->parts[header.chunk].step) {
    case Op::Step::done: return;
    case Op::Step::idle: early_[header.seq].push_back({peer, header, std::move(payload)}); return;
    case Op::Step::waiting: break;
  }
  if (!payload.size() && returns_weights(header.kind)) payload = server_.weights_of_copy(header);
  check_result(peer, header, *op, payload.size());
  finish(op, header.chunk, std::move(payload));
  pump();
}

// A helper's results are not written in place: if it is lost in the middle of one, the contribution goes to a stand-in,
// and an operation in place has it where the result goes. A lost rank fails the group.
std::shared_ptr<std::byte> ChunkPath::place_for(int peer, const FrameHeader& header) {
  if (header.type != FrameType::result || with_.members.is_helper(peer) || with_.mismatch.diverged()) return nullptr;
  const OpPtr op = with_.ops.find(header.seq);
  if (!op || header.chunk >= op->parts.size() || op->signature != header.signature) return nullptr;
  const Op::Part& part = op->parts[header.chunk];
  if (part.server != peer || part.step != Op::Step::waiting || !part.destination) return nullptr;
  if (header.payload_bytes != op->result_bytes_of(header.chunk)) return nullptr;
  return {with_.ops.held(op), part.destination};  // which holds the operation meanwhile
}

// The sum of a chunk that this rank serves is written in place too, and sent to the others from there. Not into a slot
// of the shared memory, which is used again before it has been sent.
std::shared_ptr<std::byte> ChunkPath::place_for_sum(const OpPtr& op, std::uint64_t index) const {
  const Op::Part& part = op->parts[index];
  const bool of_elements = op->sums() && !sends_coefficients(op->spec.kind) && !returns_sums(op->spec.kind);
  const bool fits = of_elements && op->bytes_of(index) == op->result_bytes_of(index);
  if (!fits || !part.destination || with_.topology.any_host_shared()) return nullptr;
  return {with_.ops.held(op), part.destination};
}

// A server passes on what the root of a broadcast sends, perhaps before it knows the operation: either may be wrong.
void ChunkPath::refuse_result(int peer, const FrameHeader& header, const std::string& what) const {
  const int root = header.root;
  const bool forwarded = forwards(header.kind) && 0 <= root && root < with_.members.size() && root != peer;
  if (!forwarded) throw ProtocolError(peer, what);
  throw GroupFailure(with_.members.name_of(peer) + " passed on from " + with_.members.name_of(root) + " " + what +
                     ": the memory or the program of one of them is corrupt");
}

void ChunkPath::check_result(int peer, const FrameHeader& header, const Op& op, std::size_t bytes) {
  const Op::Part& part = op.parts[header.chunk];
  const std::string chunk = "chunk " + std::to_string(header.chunk) + " of " + numbered(header.seq);
  // The original server may have answered before it was lost.
  if (peer != part.server && peer != op.chunks[header.chunk].server) {
    refuse_result(peer, header, "a result of " + chunk + ", which " + with_.members.name_of(part.server) + " serves");
  }
  const std::size_t expected = part.destination ? op.result_bytes_of(header.chunk) : 0;
  if (bytes == expected) return;
  refuse_result(peer, header, "a result of " + std::to_string(bytes) + " bytes where " + std::to_string(expected) +
                                  " were expected, " + chunk);
}

void ChunkPath::finish(const OpPtr& op, std::uint64_t index, Payload payload) {
  Op::Part& part = op->parts[index];
  if (part.destination && payload.data() != part.destination && payload.size()) {
    std::memcpy(part.destination, payload.data(), payload.size());
  }
  const std::uint64_t now = now_ns();
  with_.journal.traced("pull", now, op->seq, index);
  part.step = Op::Step::done;
  if (part.contributed) {
    if (part.server != me_ && op->sums() && op->bytes_of(index) >= kLeastTimedBytes) {
      Answered& by = answered_[static_cast<std::size_t>(part.server)];
      by.chunks.fetch_add(1, std::memory_order_relaxed);
      by.ns.fetch_add(now - part.sent_ns, std::memory_order_relaxed);
    }
    flow_.answered(*op, index);
    part.contribution = {};
  }
  if (with_.topology.is_helper(part.server) && !changes_weights(op->spec.kind)) {
    op->retained[index] = std::move(payload);
    retained_[op->seq] = op;
  }
  if (with_.finish_on_host && (op->sums() || !part.contributed)) with_.finish_on_host(*op, index);
  with_.ops.release(op);
}

std::vector<ServerTime> ChunkPath::server_times() const {
  std::vector<ServerTime> times;
  for (const Answered& each : answered_) times.push_back({each.chunks.load(), each.ns.load()});
  return times;
}

void ChunkPath::replay_early(std::uint64_t seq) {
  const auto found = early_.find(seq);
  if (found == early_.end()) return;
  std::vector<EarlyFrame> early = std::move(found->second);
  early_.erase(found);
  for (EarlyFrame& each : early) deliver(each.peer, each.header, std::move(each.payload));
}

void ChunkPath::on_order(int peer, const FrameHeader& header) {
  flow_.on_order(peer, header);
  pump();
}

// ---- lost helpers ---------------------------------------------------------------------------------------

// Sends chunks that a lost helper has not answered to their stand-ins, which reduce them in the same order. They
// bypass the window: queued behind it, two ranks could each have a window full of chunks that the other holds back.
void ChunkPath::reroute(int server) {
  std::map<std::uint64_t, OpPtr> affected = retained_;
  for (const OpPtr& op : with_.ops.pending()) affected[op->seq] = op;
  for (const auto& [seq, op] : affected) reroute(server, op);
  pump();
}

void ChunkPath::reroute(int server, const OpPtr& op) {
  for (std::uint64_t index = 0; index < op->parts.size(); ++index) {
    Op::Part& part = op->parts[index];
    if (part.step == Op::Step::idle || part.server != server) continue;
    part.server = route(*op, index, server);
    if (part.step == Op::Step::waiting) {
      if (part.sent_ns == 0) continue;  // still queued: it goes to the stand-in
      if (part.server == me_) flow_.retire(*op, index);
      send_contribution(op, index);
      continue;
    }
    const auto held = op->retained.find(index);
    if (held == op->retained.end()) continue;
    const FrameHeader header = header_of(*op, index, FrameType::supply);
    if (part.server != me_) {
      with_.mailbox.send(part.server, header, held->second);
      continue;
    }
    const std::string wrong = server_.supply({me_, with_.topology.my_host()}, header, held->second);
    if (!wrong.empty()) throw GroupFailure(with_.members.name_of(me_) + " supplied a malformed result: " + wrong);
  }
}

// ---- the end --------------------------------------------------------------------------------------------

void ChunkPath::forget_below(std::uint64_t seq) {
  retained_.erase(retained_.begin(), retained_.lower_bound(seq));
  early_.erase(early_.begin(), early_.lower_bound(seq));
  server_.forget_below(seq);
}

void ChunkPath::clear() {
  flow_.clear();
  for (Withheld& each : withheld_) each = {};
  server_.clear();
  early_.clear();
  retained_.clear();
}

}  // namespace shoal
