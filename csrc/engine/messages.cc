#include "engine/messages.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/clock.h"

namespace shoal {

namespace {

constexpr std::size_t kNumSlots = 8;
constexpr std::size_t kSlotBytes = 64 << 10;
constexpr std::size_t kRunParts = 16;  // parts that are queued together
constexpr int kRuns = 2;
constexpr std::size_t kMaxOffers = 1 << 20;  // of a rank, without a receive

bool overlap(const Block& one, const Block& other, std::size_t width) {
  if (!one.count || !other.count) return false;
  return one.data < other.data + other.count * width && other.data < one.data + one.count * width;
}

// Checks that no input of an operation by messages overlaps an output, but for this rank's own part in place.
void require_blocks_apart(const OpSpec& spec, int rank) {
  const std::size_t width = size_of(spec.element);
  const auto blocks = [&](const std::vector<Block>& by_rank, const std::byte* one) {
    return by_rank.empty() ? std::vector<Block>{{const_cast<std::byte*>(one), spec.count}} : by_rank;
  };
  const std::vector<Block> inputs = blocks(spec.inputs, spec.input), outputs = blocks(spec.outputs, spec.output);
  for (std::size_t k = 0; k < inputs.size(); ++k) {
    for (std::size_t j = 0; j < outputs.size(); ++j) {
      const bool mine = (inputs.size() == 1 || static_cast<int>(k) == rank) && (outputs.size() == 1 || static_cast<int>(j) == rank);
      if (!overlap(inputs[k], outputs[j], width) || (mine && inputs[k].data == outputs[j].data)) continue;
      throw std::invalid_argument("an output of " + describe(spec) + " overlaps an input; clone one of them first");
    }
  }
}

// Returns whether an offer is for a receive.
bool fits(const FrameHeader& header, int peer, const OpPtr& op, int from) {
  if (from >= 0 && from != peer) return false;
  if (is_message(op->spec.kind) != is_message(header.kind)) return false;
  return header.seq == (is_message(op->spec.kind) ? static_cast<std::uint32_t>(op->spec.tag) : op->seq);
}

FrameHeader part_of(std::uint64_t number, std::size_t part) {
  FrameHeader header;
  header.type = FrameType::part;
  header.chunk = number;
  header.server = static_cast<std::uint32_t>(part);
  return header;
}

}  // namespace

void require_blocks(const OpSpec& spec, int rank, int size) {
  const auto n = static_cast<std::size_t>(size);
  const bool any = spec.kind == Kind::recv && spec.root == -1;
  if (is_message(spec.kind)) {
    if (any || (0 <= spec.root && spec.root < size && spec.root != rank)) return;
    throw std::invalid_argument("a message between rank " + std::to_string(rank) + " and rank " + std::to_string(spec.root) +
                                " of a group of " + std::to_string(size));
  }
  const bool root = spec.root == rank, all = spec.kind == Kind::all_to_all;
  const std::size_t inputs = all || (spec.kind == Kind::scatter && root) ? n : 0;
  const std::size_t outputs = all || (spec.kind == Kind::gather && root) ? n : 0;
  if (spec.inputs.size() != inputs || spec.outputs.size() != outputs) {
    throw std::invalid_argument(std::string(name_of(spec.kind)) + " has " + std::to_string(spec.inputs.size()) + " inputs and " +
                                std::to_string(spec.outputs.size()) + " outputs where " + std::to_string(inputs) + " and " +
                                std::to_string(outputs) + " are needed");
  }
  if (!inputs && !outputs) return;
  const std::uint64_t given = inputs ? spec.inputs[static_cast<std::size_t>(rank)].count : spec.count;
  const std::uint64_t taken = outputs ? spec.outputs[static_cast<std::size_t>(rank)].count : spec.count;
  if (given != taken) {
    throw std::invalid_argument(describe(spec) + ": this rank gives itself " + std::to_string(given) + " elements and takes " +
                                std::to_string(taken));
  }
  require_blocks_apart(spec, rank);
}

void copy_own_block(const OpSpec& spec, int rank) {
  if (spec.inputs.empty() && spec.outputs.empty()) return;
  const auto me = static_cast<std::size_t>(rank);
  const std::byte* from = spec.inputs.empty() ? spec.input : spec.inputs[me].data;
  std::byte* to = spec.outputs.empty() ? spec.output : spec.outputs[me].data;
  const std::size_t bytes = (spec.inputs.empty() ? spec.count : spec.inputs[me].count) * size_of(spec.element);
  if (bytes && to != from) std::memmove(to, from, bytes);
}

ShmLayout message_layout(const Topology& topology) {
  ShmLayout layout;
  layout.num_ranks = static_cast<int>(topology.my_locals().size());
  layout.num_slots = kNumSlots;
  layout.slot_bytes = kSlotBytes;
  return layout;
}

Messages::Messages(Parts parts)
    : with_(std::move(parts)),
      me_(with_.members.rank),
      frame_bytes_(with_.options.chunk_bytes ? with_.options.chunk_bytes : Topology::kMessageBytes),
      peers_(static_cast<std::size_t>(with_.members.size())) {}

void Messages::use(std::shared_ptr<SharedSegment> slots) {
  slots_ = std::move(slots);
  holder_.assign(kNumSlots, -1);
  for (std::uint64_t slot = 0; slot < kNumSlots; ++slot) free_slots_.push_back(slot);
}

bool Messages::by_slots(int peer) const { return with_.topology.host_of(peer) == with_.topology.my_host(); }

std::size_t Messages::part_bytes(int peer) const { return by_slots(peer) ? kSlotBytes : frame_bytes_; }

std::size_t Messages::num_parts(int peer, std::size_t bytes) const {
  return (bytes + part_bytes(peer) - 1) / part_bytes(peer);
}

// ---- this rank's operations -----------------------------------------------------------------------------

void Messages::begin(const OpPtr& op) {
  const OpSpec& spec = op->spec;
  const int size = with_.members.size();
  const bool all = spec.kind == Kind::all_to_all, root = spec.root == me_;
  op->has_messages = true;
  if (spec.kind == Kind::recv) receive({op, spec.root, spec.output, spec.count * op->width()});
  if (spec.kind == Kind::send) send(op, spec.root, spec.input, spec.count);
  if (spec.kind == Kind::gather && !root) send(op, spec.root, spec.input, spec.count);
  if (spec.kind == Kind::scatter && !root) receive({op, spec.root, spec.output, spec.count * op->width()});
  for (int k = 1; k < size && (all || (spec.kind == Kind::gather && root)); ++k) {
    const int peer = (me_ + size - k) % size;
    const Block& block = spec.outputs[static_cast<std::size_t>(peer)];
    receive({op, peer, block.data, block.count * op->width()});
  }
  for (int k = 1; k < size && (all || (spec.kind == Kind::scatter && root)); ++k) {
    const int peer = (me_ + k) % size;  // not all to the same rank first
    send(op, peer, spec.inputs[static_cast<std::size_t>(peer)].data, spec.inputs[static_cast<std::size_t>(peer)].count);
  }
  with_.ops.release(op);
}

void Messages::send(const OpPtr& op, int peer, const std::byte* data, std::uint64_t count) {
  Peer& to = at(peer);
  const std::size_t bytes = count * op->width();
  FrameHeader header;
  header.type = FrameType::offer;
  header.kind = op->spec.kind;
  header.element = header.input = op->spec.element;
  header.seq = is_message(op->spec.kind) ? static_cast<std::uint32_t>(op->spec.tag) : op->seq;
  header.chunk = to.num_offered++;
  header.signature = op->signature;
  header.root = op->spec.root;
  if (bytes <= frame_bytes_ && to.unasked_bytes + bytes <= with_.options.unexpected_bytes) {
    to.unasked_bytes += bytes;
    return with_.mailbox.send(peer, header, Payload{data, bytes, with_.ops.held(op)});
  }
  with_.ops.hold(*op);
  to.going[header.chunk] = {op, data, bytes, num_parts(peer, bytes)};
  header.redo = 1;
  with_.mailbox.send(peer, header, payload_of(std::string(reinterpret_cast<const char*>(&bytes), sizeof bytes)));
}

void Messages::receive(Receive receive) {
  with_.ops.hold(*receive.op);
  for (auto offer = offers_.begin(); offer != offers_.end(); ++offer) {
    if (!fits(offer->header, offer->peer, receive.op, receive.peer)) continue;
    const Offer found = std::move(*offer);
    offers_.erase(offer);
    --at(found.peer).num_waiting;
    return take(found, std::move(receive));
  }
  receives_.push_back(std::move(receive));
}

// ---- offers ---------------------------------------------------------------------------------------------

void Messages::on_offer(int peer, const FrameHeader& header, Payload payload) {
  if (with_.members.is_helper(peer)) throw ProtocolError(peer, "a helper sends no messages");
  const Kind kind = header.kind;
  if (!by_messages(kind) || kind == Kind::recv) throw ProtocolError(peer, "an offer of a " + std::string(name_of(kind)));
  Offer offer{peer, header, std::move(payload), 0};
  offer.bytes = offer.payload.size();
  Peer& from = at(peer);
  if (!offer.whole()) {
    if (offer.payload.size() != sizeof offer.bytes) throw ProtocolError(peer, "an offer without the size of the message");
    std::memcpy(&offer.bytes, offer.payload.data(), sizeof offer.bytes);
  } else if ((from.held_bytes += offer.bytes) > with_.options.unexpected_bytes) {
    throw ProtocolError(peer, "more than " + std::to_string(with_.options.unexpected_bytes) + " bytes of messages unasked");
  }
  if (header.chunk < from.num_considered || from.overtaking.size() + from.num_waiting >= kMaxOffers) {
    throw ProtocolError(peer, "message " + std::to_string(header.chunk) + " where " + std::to_string(from.num_considered) +
                                  " are known");
  }
  from.overtaking[header.chunk] = std::move(offer);
  for (auto next = from.overtaking.begin(); next != from.overtaking.end() && next->first == from.num_considered;) {
    Offer due = std::move(next->second);
    next = from.overtaking.erase(next);
    ++from.num_considered;
    consider(std::move(due));
  }
}

void Messages::consider(Offer offer) {
  for (auto each = receives_.begin(); each != receives_.end(); ++each) {
    if (!fits(offer.header, offer.peer, each->op, each->peer)) continue;
    Receive found = std::move(*each);
    receives_.erase(each);
    return take(offer, std::move(found));
  }
  if (!is_message(offer.header.kind) && is_due(offer)) return;
  ++at(offer.peer).num_waiting;
  offers_.push_back(std::move(offer));
}

// Returns whether an offer without a receive is of an operation that this rank has begun as another one.
bool Messages::is_due(const Offer& offer) {
  const std::uint64_t begun = with_.ops.num_submitted();  // before find()
  const OpPtr op = with_.ops.find(offer.header.seq);
  if (!op && offer.header.seq >= begun) return false;
  if (op ? op->signature != offer.header.signature : with_.mismatch.differs(offer.header)) {
    with_.mismatch.on_unexpected_result(offer.peer, offer.header);
    return true;
  }
  if (op && !op->has_messages) return false;  // begin() comes
  throw ProtocolError(offer.peer, "a message of " + numbered(offer.header.seq) + " that nobody waits for");
}

void Messages::take(const Offer& offer, Receive receive) {
  const Kind kind = offer.header.kind;
  if (!is_message(kind) && receive.op->signature != offer.header.signature) {
    return with_.mismatch.on_unexpected_result(offer.peer, offer.header);
  }
  check_fit(*receive.op, offer.peer, offer.bytes, offer.header.element, receive.bytes);
  if (receive.op->spec.source) *receive.op->spec.source = offer.peer;
  receive.peer = offer.peer;
  Peer& from = at(offer.peer);
  if (!offer.whole()) {
    const std::size_t parts = num_parts(offer.peer, offer.bytes);
    from.coming[offer.header.chunk] = {std::move(receive), std::vector<bool>(parts), parts};
    FrameHeader accept;
    accept.type = FrameType::accept;
    accept.chunk = offer.header.chunk;
    return with_.mailbox.send(offer.peer, accept, {});
  }
  if (offer.bytes) std::memcpy(receive.data, offer.payload.data(), offer.bytes);
  from.held_bytes -= offer.bytes;
  from.taken_bytes += offer.bytes;
  if (from.taken_bytes && from.taken_bytes >= with_.options.unexpected_bytes / 4) {
    FrameHeader room;
    room.type = FrameType::room;
    room.chunk = std::exchange(from.taken_bytes, 0);
    with_.mailbox.send(offer.peer, room, {});
  }
  received(receive, offer.header.chunk);
}

void Messages::check_fit(const Op& op, int peer, std::size_t bytes, Element element, std::size_t expected_bytes) const {
  const OpSpec& spec = op.spec;
  if (bytes == expected_bytes && element == spec.element) return;
  const auto sized = [](std::size_t of_bytes, Element of) {
    return std::to_string(of_bytes / size_of(of)) + " elements of " + std::string(name_of(of));
  };
  const std::string what = is_message(spec.kind) ? "message (tag " + std::to_string(spec.tag) + ")"
                                                 : "part of " + numbered(op.seq) + ", " + describe(spec) + ",";
  throw GroupFailure("the ranks do not agree about the " + what + " from " + with_.members.name_of(peer) + " to " +
                     with_.members.name_of(me_) + ": it sends " + sized(bytes, element) + ", and " +
                     sized(expected_bytes, spec.element) + " are expected");
}

void Messages::received(const Receive& receive, std::uint64_t number) {
  with_.journal.traced("message", now_ns(), receive.op->seq, number);
  with_.ops.release(receive.op);
}

// ---- large messages -------------------------------------------------------------------------------------

void Messages::on_accept(int peer, const FrameHeader& header) {
  if (with_.members.is_helper(peer)) throw ProtocolError(peer, "a helper receives no messages");
  const auto found = at(peer).going.find(header.chunk);
  if (found == at(peer).going.end() || std::exchange(found->second.accepted, true)) {
    throw ProtocolError(peer, "it accepts message " + std::to_string(header.chunk) + ", which is not offered");
  }
  if (!by_slots(peer)) return send_runs(peer, header.chunk);
  to_slots_.emplace_back(peer, header.chunk);
  fill_slots();
}

// Queues a few parts at a time: a queue of all of a large message would take much memory.
void Messages::send_runs(int peer, std::uint64_t number) {
  const auto found = at(peer).going.find(number);
  if (found == at(peer).going.end()) return;
  Outgoing& message = found->second;
  const std::size_t size = part_bytes(peer);
  while (message.num_runs < kRuns && message.next_part < message.num_parts) {
    ++message.num_runs;
    const auto next = [this, peer, number](const void*) {
      with_.post([this, peer, number]() SHOAL_NO_ANALYSIS {
        const auto sent = at(peer).going.find(number);
        if (sent == at(peer).going.end()) return;
        --sent->second.num_runs;
        send_runs(peer, number);
      });
    };
    const std::shared_ptr<const void> run(static_cast<const void*>(message.data), next);
    for (std::size_t k = 0; k < kRunParts && message.next_part < message.num_parts; ++k) {
      const std::size_t part = message.next_part++, begin = part * size;
      const Payload payload{message.data + begin, std::min(size, message.bytes - begin), run};
      with_.mailbox.send(peer, part_of(number, part), payload);
    }
  }
  if (message.num_runs || message.next_part < message.num_parts) return;
  const OpPtr op = message.op;
  at(peer).going.erase(found);
  with_.ops.release(op);
}

// Copies parts of the messages to ranks of this host into free slots, one message after the other.
void Messages::fill_slots() {
  while (!free_slots_.empty() && !to_slots_.empty()) {
    const auto [peer, number] = to_slots_.front();
    to_slots_.pop_front();
    const auto found = at(peer).going.find(number);
    Outgoing& message = found->second;
    const std::uint64_t slot = free_slots_.back();
    free_slots_.pop_back();
    holder_[slot] = peer;
    const std::size_t part = message.next_part++, begin = part * kSlotBytes;
    std::memcpy(slots_->contribution(with_.topology.local_index(), slot), message.data + begin,
                std::min(kSlotBytes, message.bytes - begin));
    std::atomic_thread_fence(std::memory_order_release);
    FrameHeader header = part_of(number, part);
    header.needed = static_cast<std::uint16_t>(slot + 1);
    with_.mailbox.send(peer, header, {});
    if (message.next_part < message.num_parts) {
      to_slots_.emplace_back(peer, number);
      continue;
    }
    const OpPtr op = message.op;
    at(peer).going.erase(found);
    with_.ops.release(op);
  }
}

void Messages::on_part(int peer, const FrameHeader& header, const Payload& payload) {
  if (with_.members.is_helper(peer)) throw ProtocolError(peer, "a helper sends no messages");
  Peer& from = at(peer);
  const auto found = from.coming.find(header.chunk);
  if (found == from.coming.end()) {
    throw ProtocolError(peer, "a part of message " + std::to_string(header.chunk) + ", which was not accepted");
  }
  Incoming& message = found->second;
  const std::size_t part = header.server, begin = part * part_bytes(peer);
  const bool known = part < message.has.size() && !message.has[part];
  const std::size_t bytes = known ? std::min(part_bytes(peer), message.receive.bytes - begin) : 0;
  const bool in_slot = by_slots(peer);
  if (!known || (in_slot ? header.needed < 1 || header.needed > kNumSlots || payload.size() : payload.size() != bytes)) {
    throw ProtocolError(peer, "part " + std::to_string(part) + " of message " + std::to_string(header.chunk) + " with " +
                                  std::to_string(payload.size()) + " bytes, of " + std::to_string(message.has.size()) +
                                  " parts of " + std::to_string(part_bytes(peer)) + " bytes; give all ranks the same options");
  }
  const std::byte* data = payload.data();
  if (in_slot) {
    const std::vector<int>& locals = with_.topology.my_locals();
    const auto local = std::find(locals.begin(), locals.end(), peer) - locals.begin();
    std::atomic_thread_fence(std::memory_order_acquire);
    data = slots_->contribution(static_cast<int>(local), header.needed - 1u);
  }
  std::memcpy(message.receive.data + begin, data, bytes);
  message.has[part] = true;
  if (in_slot) {
    FrameHeader room;
    room.type = FrameType::room;
    room.needed = header.needed;
    with_.mailbox.send(peer, room, {});
  }
  if (--message.num_missing) return;
  const Receive receive = std::move(message.receive);
  from.coming.erase(found);
  received(receive, header.chunk);
}

void Messages::on_room(int peer, const FrameHeader& header) {
  if (with_.members.is_helper(peer)) throw ProtocolError(peer, "a helper receives no messages");
  Peer& to = at(peer);
  if (!header.needed) {
    if (header.chunk > to.unasked_bytes) throw ProtocolError(peer, "it has taken more bytes of messages than were sent");
    to.unasked_bytes -= header.chunk;
    return;
  }
  const std::size_t slot = header.needed - 1u;
  if (slot >= holder_.size() || holder_[slot] != peer) throw ProtocolError(peer, "it gives back a slot that it does not have");
  holder_[slot] = -1;
  free_slots_.push_back(slot);
  fill_slots();
}

void Messages::clear() {
  for (Peer& each : peers_) each = {};
  offers_.clear();
  receives_.clear();
  to_slots_.clear();
}

}  // namespace shoal
