#include "engine/block_exchange.h"

#include <algorithm>

#include "base/clock.h"
#include "base/copy.h"

namespace shoal {

namespace {

constexpr std::size_t kMinSlotBytes = 4 << 10, kMaxSlotBytes = 64 << 10;
constexpr std::size_t kBytesOfRank = 1 << 20;  // slots to all others: they stay in the cache

}  // namespace

std::size_t BlockExchange::slot_bytes(int num_ranks) {
  const std::size_t slots = kNumSlots * static_cast<std::size_t>(std::max(num_ranks - 1, 1));
  return std::clamp(kBytesOfRank / slots / kMinSlotBytes * kMinSlotBytes, kMinSlotBytes, kMaxSlotBytes);
}

BlockExchange::BlockExchange(SharedSegment& shm, int rank, const StageHooks& hooks)
    : shm_(shm),
      hooks_(hooks),
      me_(rank),
      num_ranks_(shm.layout().num_ranks),
      going_(static_cast<std::size_t>(num_ranks_)),
      coming_(static_cast<std::size_t>(num_ranks_)) {}

void BlockExchange::add(const OpPtr& op) {
  const OpSpec& spec = op->spec;
  const Kind kind = spec.kind;
  for (int peer = 0; peer < num_ranks_; ++peer) {
    if (peer == me_) continue;
    const auto at = static_cast<std::size_t>(peer);
    const bool to_root = kind == Kind::gather && spec.root == peer, from_root = kind == Kind::scatter && spec.root == peer;
    if (!spec.inputs.empty()) open(going_, peer, op, spec.inputs[at]);
    else if (to_root) open(going_, peer, op, {const_cast<std::byte*>(spec.input), spec.count});
    if (!spec.outputs.empty()) open(coming_, peer, op, spec.outputs[at]);
    else if (from_root) open(coming_, peer, op, {spec.output, spec.count});
  }
}

void BlockExchange::open(std::vector<std::deque<Moving>>& queues, int peer, const OpPtr& op, const Block& block) {
  queues[static_cast<std::size_t>(peer)].push_back({op, block.data, block.count * op->width()});
  ++op->blocks_left;
  ++num_open_;
}

bool BlockExchange::step() {
  if (idle()) return false;
  bool moved = false;
  for (int k = 1; k < num_ranks_ && !diverged_; ++k) moved |= empty((me_ + num_ranks_ - k) % num_ranks_);
  for (int k = 1; k < num_ranks_ && !diverged_; ++k) moved |= fill((me_ + k) % num_ranks_);  // each rank begins with another
  return moved;
}

// ---- sending --------------------------------------------------------------------------------------------

bool BlockExchange::fill(int peer) {
  std::deque<Moving>& queue = going_[static_cast<std::size_t>(peer)];
  std::uint64_t filled = shm_.pipe(me_, peer).num_filled.load(std::memory_order_relaxed);
  bool moved = false;
  while (!queue.empty() && has_room(peer, filled)) {
    Moving& block = queue.front();
    const std::uint64_t begin = now_ns();
    const std::size_t bytes = std::min(shm_.layout().pipe_slot_bytes, block.bytes - block.done);
    shm_.pipe_head(me_, peer, filled) = {block.op->signature, block.bytes};
    copy_bytes(shm_.pipe_slot(me_, peer, filled), block.data + block.done, bytes);
    shm_.pipe(me_, peer).num_filled.store(++filled, std::memory_order_release);
    hooks_.trace("copy in", begin, block.op->seq, static_cast<std::uint64_t>(peer));
    block.done += bytes;
    moved = true;
    if (block.done == block.bytes) close(queue);
  }
  if (moved) shm_.ring_caller(peer);
  return moved;
}

// Says that it waits before it looks, so that a receiver that empties a slot afterwards rings. The receiver's thread
// has to empty slots even if none of its callers waits.
bool BlockExchange::has_room(int peer, std::uint64_t num_filled) {
  SharedSegment::Pipe& pipe = shm_.pipe(me_, peer);
  const auto room = [&] { return num_filled < pipe.num_emptied.load() + shm_.layout().num_pipe_slots; };
  if (room()) return true;
  if (pipe.blocked.exchange(1) == 0) shm_.ring(peer);
  return room();
}

// ---- receiving ------------------------------------------------------------------------------------------

bool BlockExchange::empty(int peer) {
  std::deque<Moving>& queue = coming_[static_cast<std::size_t>(peer)];
  SharedSegment::Pipe& pipe = shm_.pipe(peer, me_);
  std::uint64_t emptied = pipe.num_emptied.load(std::memory_order_relaxed);
  bool moved = false;
  while (!queue.empty() && pipe.num_filled.load(std::memory_order_acquire) > emptied) {
    Moving& block = queue.front();
    if (block.done == 0 && !fits(peer, block, shm_.pipe_head(peer, me_, emptied))) return moved;
    const std::uint64_t begin = now_ns();
    const std::size_t bytes = std::min(shm_.layout().pipe_slot_bytes, block.bytes - block.done);
    const bool large = block.bytes * static_cast<std::size_t>(num_ranks_) >= kStreamedBytes;
    (large ? copy_streaming : copy_bytes)(block.data + block.done, shm_.pipe_slot(peer, me_, emptied), bytes);
    pipe.num_emptied.store(++emptied);
    hooks_.trace("copy out", begin, block.op->seq, static_cast<std::uint64_t>(peer));
    block.done += bytes;
    moved = true;
    if (block.done == block.bytes) close(queue);
  }
  if (moved && pipe.blocked.load() && pipe.blocked.exchange(0)) shm_.ring(peer);
  return moved;
}

bool BlockExchange::fits(int peer, const Moving& block, const SharedSegment::BlockHead& head) {
  const SharedSegment::BlockHead theirs = head;
  if (theirs.signature == block.op->signature && theirs.bytes == block.bytes) return true;
  diverged_ = true;
  if (theirs.signature != block.op->signature) hooks_.report_mismatch(block.op->seq, peer, theirs.signature);
  else hooks_.report_misfit(block.op, peer, theirs.bytes, block.bytes);
  return false;
}

void BlockExchange::close(std::deque<Moving>& queue) {
  const OpPtr op = std::move(queue.front().op);
  queue.pop_front();
  --num_open_;
  if (--op->blocks_left == 0) hooks_.done(op);
}

}  // namespace shoal
