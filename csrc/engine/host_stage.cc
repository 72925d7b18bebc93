#include "engine/host_stage.h"

#include <cstring>
#include <stdexcept>

#include "base/clock.h"
#include "engine/combine.h"

namespace shoal {

namespace {

constexpr int kNapMs = 200;

// An empty tensor may have a null address.
void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes) std::memcpy(to, from, bytes);
}

bool is_half(Element element) { return element == Element::float16 || element == Element::bfloat16; }

}  // namespace

HostStage::HostStage(const Topology& topology, const std::string& segment, const ShmLayout& layout,
                     bool wide_partials, double timeout_s, StageHooks hooks)
    : topology_(topology),
      shm_(segment, topology.local_index(), layout, timeout_s),
      wide_partials_(wide_partials),
      hooks_(std::move(hooks)),
      me_(topology.local_index()),
      num_locals_(static_cast<int>(topology.my_locals().size())) {
  thread_ = std::thread([this] { run(); });
}

HostStage::~HostStage() { stop(); }

void HostStage::stop() {
  const std::lock_guard lock(stop_mutex_);  // a failure and close() may run concurrently
  if (!thread_.joinable()) return;
  stopping_ = true;
  shm_.ring(me_);
  thread_.join();
}

void HostStage::submit(OpPtr op) {
  for (std::uint64_t index = 0; index < op->chunks.size(); ++index) {
    if (op->bytes_of(index) <= shm_.layout().slot_bytes) continue;
    throw std::logic_error("chunk " + std::to_string(index) + " of " + numbered(op->seq) + " has " +
                           std::to_string(op->bytes_of(index)) + " bytes, a slot of the shared memory " +
                           std::to_string(shm_.layout().slot_bytes));
  }
  {
    const std::lock_guard lock(mutex_);
    submitted_.push_back(std::move(op));
  }
  shm_.ring(me_);
}

void HostStage::finish(const Op& op, std::uint64_t index) {
  const std::uint64_t ticket = op.first_ticket + index;
  shm_.ready(ticket).store(ticket + 1, std::memory_order_release);
  ring_others();
  shm_.ring(me_);
}

void HostStage::ring_others() {
  for (int rank = 0; rank < num_locals_; ++rank) {
    if (rank != me_) shm_.ring(rank);
  }
}

void HostStage::run() {
  try {
    while (!stopping_) {
      const std::uint32_t seen = shm_.bell(me_);
      if (!step()) shm_.sleep(me_, seen, kNapMs);
    }
  } catch (const std::exception& error) {
    hooks_.error(error.what());
  }
}

bool HostStage::step() {
  bool moved = take_submissions();
  moved |= enter();
  moved |= own();
  moved |= leave();
  return moved;
}

bool HostStage::take_submissions() {
  std::vector<OpPtr> fresh;
  {
    const std::lock_guard lock(mutex_);
    fresh.swap(submitted_);
  }
  for (OpPtr& op : fresh) {
    op->first_ticket = end_;
    for (std::uint64_t index = 0; index < op->chunks.size(); ++index) entries_.push_back({op, index, next_number_});
    end_ += op->chunks.size();
    ++next_number_;
  }
  return !fresh.empty();
}

// ---- entering: contributions into slots -----------------------------------------------------------------

bool HostStage::slot_is_free(std::uint64_t ticket) {
  const std::uint64_t slots = shm_.layout().num_slots;
  if (ticket < slots) return true;
  for (int rank = 0; rank < num_locals_; ++rank) {
    if (shm_.left(rank, ticket).load(std::memory_order_acquire) < ticket - slots + 1) return false;
  }
  return true;
}

bool HostStage::contributes(const Entry& entry) const {
  const bool mine = topology_.owner(topology_.my_host(), entry.op->spec, entry.index, entry.op->chunks[entry.index]) ==
                    topology_.rank();
  return entry.op->sums() && !mine;  // the owner reads its own tensor directly
}

bool HostStage::enter() {
  bool moved = false;
  while (to_enter_ < end_ && slot_is_free(to_enter_)) {
    const Entry& each = entry(to_enter_);
    if (each.index == 0) {
      shm_.signature(me_, each.number).store(each.op->signature, std::memory_order_relaxed);
      shm_.signature_tag(me_, each.number).store(each.number + 1, std::memory_order_release);
    }
    if (contributes(each)) {
      const std::uint64_t begin = now_ns();
      copy_bytes(shm_.contribution(me_, to_enter_), each.op->input_at(each.index, topology_.rank()),
           each.op->bytes_of(each.index));
      hooks_.trace("copy in", begin, each.op->seq, each.index);
    }
    shm_.entered(me_, to_enter_).store(to_enter_ + 1, std::memory_order_release);
    ++to_enter_;
    moved = true;
  }
  if (moved) ring_others();
  return moved;
}

// ---- owning: reduction, or transfer to other hosts ------------------------------------------------------

bool HostStage::contributions_are_in(const Entry&, std::uint64_t ticket) {
  for (int rank = 0; rank < num_locals_; ++rank) {
    if (shm_.entered(rank, ticket).load(std::memory_order_acquire) != ticket + 1) return false;
  }
  return true;
}

// Returns whether all ranks of the host have begun the same operation.
bool HostStage::agreed(const Entry& each) {
  for (int rank = 0; rank < num_locals_; ++rank) {
    if (shm_.signature_tag(rank, each.number).load(std::memory_order_acquire) != each.number + 1) return false;
    const std::uint64_t theirs = shm_.signature(rank, each.number).load(std::memory_order_relaxed);
    if (theirs != each.op->signature) {
      hooks_.report_mismatch(each.op->seq, topology_.my_locals()[static_cast<std::size_t>(rank)], theirs);
      stopping_ = true;
      return false;
    }
  }
  return true;
}

bool HostStage::own() {
  bool moved = false;
  for (; to_own_ < to_enter_; ++to_own_) {
    const Entry& each = entry(to_own_);
    if (each.index == 0 && !agreed(each)) break;
    const int owner = topology_.owner(topology_.my_host(), each.op->spec, each.index, each.op->chunks[each.index]);
    if (owner != topology_.rank()) continue;
    if (!contributions_are_in(each, to_own_)) break;
    act(each, to_own_);
    moved = true;
  }
  if (moved) ring_others();
  return moved;
}

void HostStage::act(const Entry& each, std::uint64_t ticket) {
  if (each.op->sums()) add_up(each, ticket);
  else hand_round(each, ticket);
}

void HostStage::add_up(const Entry& each, std::uint64_t ticket) {
  const std::uint64_t begin = now_ns();
  Op& op = *each.op;
  const std::size_t count = op.chunks[each.index].count;
  std::vector<const void*> inputs;
  for (int rank = 0; rank < num_locals_; ++rank) {
    if (rank == me_) inputs.push_back(op.input_at(each.index, topology_.rank()));
    else inputs.push_back(shm_.contribution(rank, ticket));
  }
  const Element type = op.spec.element;
  const bool to_all = op.spec.kind == Kind::all_reduce || op.spec.kind == Kind::barrier;
  // A result that only this rank needs is written directly to its tensor.
  const bool has_output = to_all || op.spec.kind == Kind::reduce_scatter
                              ? to_all || op.chunks[each.index].server == topology_.rank()
                              : op.spec.root == topology_.rank();
  std::byte* destination = to_all ? shm_.result(ticket) : has_output ? op.output_at(each.index, topology_.rank()) : nullptr;
  if (topology_.num_hosts() == 1) {
    combine_in_order(destination, inputs, count, {op.spec.combine, type, type, topology_.size()});
    shm_.ready(ticket).store(ticket + 1, std::memory_order_release);
    hooks_.trace("sum", begin, op.seq, each.index);
    return;
  }
  const Element partial = wide_partials_ && is_half(type) ? Element::float32 : type;
  const Combine combine = op.spec.combine == Combine::avg ? Combine::sum : op.spec.combine;
  combine_in_order(shm_.result(ticket), inputs, count, {combine, partial, type, 1});
  hooks_.trace("host sum", begin, op.seq, each.index);
  hooks_.push(each.op, each.index, shm_.result(ticket), partial, destination);
}

void HostStage::hand_round(const Entry& each, std::uint64_t ticket) {
  Op& op = *each.op;
  const int source = op.spec.kind == Kind::broadcast ? op.spec.root : op.chunks[each.index].server;
  if (source != topology_.rank()) {
    hooks_.expect(each.op, each.index, shm_.result(ticket));
    return;
  }
  const std::byte* data = op.input_at(each.index, topology_.rank());
  copy_bytes(shm_.result(ticket), data, op.bytes_of(each.index));
  shm_.ready(ticket).store(ticket + 1, std::memory_order_release);
  if (topology_.num_hosts() > 1) hooks_.push(each.op, each.index, data, op.spec.element, nullptr);
}

// ---- leaving: results out of slots ----------------------------------------------------------------------

bool HostStage::takes_result(const Entry& each) const {
  const Op& op = *each.op;
  switch (op.spec.kind) {
    case Kind::all_reduce: return true;
    case Kind::broadcast: return op.spec.root != topology_.rank();
    case Kind::all_gather: return op.chunks[each.index].server != topology_.rank();
    default: return false;
  }
}

bool HostStage::leave() {
  bool moved = false;
  // A mismatched operation must not look completed: leave only chunks that own() has passed.
  while (to_leave_ < to_own_ && shm_.ready(to_leave_).load(std::memory_order_acquire) == to_leave_ + 1) {
    const Entry each = entry(to_leave_);
    if (takes_result(each)) {
      const std::uint64_t begin = now_ns();
      copy_bytes(each.op->output_at(each.index, topology_.rank()), shm_.result(to_leave_), each.op->bytes_of(each.index));
      hooks_.trace("copy out", begin, each.op->seq, each.index);
    }
    shm_.left(me_, to_leave_).store(to_leave_ + 1, std::memory_order_release);
    ++to_leave_;
    entries_.pop_front();
    ++first_;
    moved = true;
    if (each.index + 1 == each.op->chunks.size()) hooks_.done(each.op);
  }
  if (moved) ring_others();
  return moved;
}

}  // namespace shoal
