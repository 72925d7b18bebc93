#include "engine/direct_exchange.h"

#include <algorithm>

#include "base/clock.h"
#include "engine/reduce.h"

namespace shoal {

namespace {

constexpr std::size_t kMaxCellBytes = 64 << 10;
constexpr std::size_t kMaxBytesOfAll = 256 << 10;  // inputs of all ranks together: they stay in the cache

// Bytes of one rank's input and of the whole result, as far as they pass through cells.
std::size_t bytes_in(const OpSpec& spec, int num_ranks) {
  const std::size_t bytes = spec.count * size_of(spec.element);
  return spec.kind == Kind::reduce_scatter ? bytes * static_cast<std::size_t>(num_ranks) : bytes;
}

}  // namespace

std::size_t DirectExchange::cell_bytes(int num_ranks) {
  return std::min(kMaxCellBytes, kMaxBytesOfAll / static_cast<std::size_t>(num_ranks) / 64 * 64);
}

bool DirectExchange::takes(const OpSpec& spec, int num_ranks) {
  return spec.kind != Kind::delegated && bytes_in(spec, num_ranks) <= cell_bytes(num_ranks);
}

bool DirectExchange::step() {
  bool moved = false;
  while (!diverged_ && !waiting_.empty() && cell_is_free()) {
    enter(waiting_.front());
    entered_.push_back(std::move(waiting_.front()));
    waiting_.pop_front();
    moved = true;
  }
  while (!diverged_ && !entered_.empty() && shm_.round(num_left_).done.load(std::memory_order_acquire) > num_left_) {
    const OpPtr op = std::move(entered_.front());
    entered_.pop_front();
    leave(*op);
    hooks_.done(op);
    moved = true;
  }
  return moved;
}

// Says that it waits before it looks, so that a rank that leaves afterwards rings.
bool DirectExchange::cell_is_free() {
  const auto all_left = [&] {
    for (int rank = 0; rank < num_ranks_; ++rank) {
      if (shm_.progress(rank).num_left.load() + shm_.layout().num_cells <= num_entered_) return false;
    }
    return true;
  };
  std::atomic<std::uint32_t>& blocked = shm_.progress(me_).blocked;
  if (all_left()) {
    if (blocked.load(std::memory_order_relaxed)) blocked = 0;
    return true;
  }
  blocked = 1;
  return all_left();
}

void DirectExchange::enter(const OpPtr& op) {
  const std::uint64_t number = op->ticket = num_entered_++, begin = now_ns();
  const bool contributes = op->spec.kind != Kind::broadcast || op->spec.root == me_;
  if (contributes) copy_bytes(shm_.cell(me_, number), op->spec.input, bytes_in(op->spec, num_ranks_));
  shm_.cell_signature(me_, number).store(op->signature, std::memory_order_relaxed);
  hooks_.trace("copy in", begin, op->seq, 0);
  const auto ranks = static_cast<std::uint64_t>(num_ranks_);
  const std::uint64_t last = (number / shm_.layout().num_cells + 1) * ranks;
  if (shm_.round(number).num_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == last) complete(*op);
}

// This rank is the last to arrive.
void DirectExchange::complete(const Op& op) {
  if (!agreed(op)) return;
  const std::uint64_t begin = now_ns();
  const bool reduces = op.spec.kind == Kind::all_reduce || op.spec.kind == Kind::reduce || op.spec.kind == Kind::reduce_scatter;
  const std::size_t bytes = bytes_in(op.spec, num_ranks_);
  if (reduces && bytes) {
    std::vector<const void*> inputs;
    for (int rank = 0; rank < num_ranks_; ++rank) inputs.push_back(shm_.cell(rank, op.ticket));
    const Element type = op.spec.element;
    combine_in_order(shm_.cell_result(op.ticket), inputs, bytes / size_of(type), {op.spec.combine, type, type, num_ranks_});
  }
  shm_.round(op.ticket).done.store(op.ticket + 1);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank != me_) shm_.ring_caller(rank);
  }
  hooks_.trace("sum", begin, op.seq, 0);
}

bool DirectExchange::agreed(const Op& op) {
  for (int rank = 0; rank < num_ranks_; ++rank) {
    const std::uint64_t theirs = shm_.cell_signature(rank, op.ticket).load(std::memory_order_relaxed);
    if (theirs == op.signature) continue;
    diverged_ = true;
    hooks_.report_mismatch(op.seq, rank, theirs);
    return false;
  }
  return true;
}

void DirectExchange::leave(const Op& op) {
  const std::uint64_t begin = now_ns();
  const std::size_t bytes = op.spec.count * op.width();
  const auto mine = static_cast<std::size_t>(me_) * bytes;
  switch (op.spec.kind) {
    case Kind::all_reduce: copy_bytes(op.spec.output, shm_.cell_result(op.ticket), bytes); break;
    case Kind::reduce:
      if (op.spec.root == me_) copy_bytes(op.spec.output, shm_.cell_result(op.ticket), bytes);
      break;
    case Kind::reduce_scatter: copy_bytes(op.spec.output, shm_.cell_result(op.ticket) + mine, bytes); break;
    case Kind::broadcast:
      if (op.spec.root != me_) copy_bytes(op.spec.output, shm_.cell(op.spec.root, op.ticket), bytes);
      break;
    case Kind::all_gather:
      for (int rank = 0; rank < num_ranks_; ++rank) {
        if (rank != me_) copy_bytes(op.spec.output + static_cast<std::size_t>(rank) * bytes, shm_.cell(rank, op.ticket), bytes);
      }
      break;
    case Kind::barrier:
    case Kind::delegated:
    case Kind::all_to_all:
    case Kind::gather:
    case Kind::scatter:
    case Kind::send:
    case Kind::recv:
    case Kind::configure:
    case Kind::load:
    case Kind::dump:
    case Kind::update:
    case Kind::collect:
    case Kind::measure:
    case Kind::factor:
    case Kind::normalise:
    case Kind::apply: break;
  }
  hooks_.trace("copy out", begin, op.seq, 0);
  shm_.progress(me_).num_left.store(++num_left_);
  for (int rank = 0; rank < num_ranks_; ++rank) {
    if (rank != me_ && shm_.progress(rank).blocked.load()) shm_.ring(rank);
  }
}

}  // namespace shoal
