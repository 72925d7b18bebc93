#include "engine/host_stage.h"

#include <algorithm>
#include <stdexcept>

#include "base/clock.h"
#include "base/copy.h"
#include "engine/reduce.h"

namespace shoal {

namespace {

constexpr int kNapMs = 200;

constexpr int kSpins = 2000;  // pauses of a waiting caller before it yields: about 25 us
constexpr int kYields = 100;  // before it sleeps: where ranks share cores, the others need so many turns for their part

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

// The factors of a matrix with long rows are a few numbers more than a chunk's (optim/adafactor.h).
constexpr std::size_t kFactorRoom = 64;

ShmLayout stage_layout(const Topology& topology, const EngineOptions& options) {
  const bool alone = topology.num_hosts() == 1;
  ShmLayout layout;
  layout.num_ranks = static_cast<int>(topology.my_locals().size());
  layout.slot_bytes = alone                 ? options.shared_chunk_bytes
                      : options.chunk_bytes ? options.chunk_bytes
                                            : Topology::kMessageBytes;
  if (!alone) layout.slot_bytes += kFactorRoom;
  layout.result_bytes = alone ? layout.slot_bytes : 2 * layout.slot_bytes;
  layout.num_slots = alone ? options.num_slots : kSlotsBetweenHosts * options.num_slots;
  layout.num_cells = alone ? DirectExchange::kNumCells : 0;
  layout.cell_bytes = DirectExchange::cell_bytes(layout.num_ranks);
  layout.num_pipe_slots = alone ? BlockExchange::kNumSlots : 0;
  layout.pipe_slot_bytes = BlockExchange::slot_bytes(layout.num_ranks);
  return layout;
}

HostStage::HostStage(const Topology& topology, const std::string& segment, const EngineOptions& options,
                     double timeout_s, StageHooks hooks)
    : topology_(topology),
      shm_(segment, topology.local_index(), stage_layout(topology, options), timeout_s),
      wide_partials_(options.wide_partials),
      hooks_(std::move(hooks)),
      me_(topology.local_index()),
      num_locals_(static_cast<int>(topology.my_locals().size())),
      may_spin_(static_cast<unsigned>(num_locals_) <= std::thread::hardware_concurrency()),
      direct_(shm_, me_, hooks_),
      blocks_(shm_, me_, hooks_),
      thread_([this] { run(); }) {}

HostStage::~HostStage() { stop(); }

void HostStage::stop() {
  const MutexLock lock(stop_mutex_);
  if (!thread_.joinable()) return;
  stopping_ = true;
  shm_.wake_all(me_);
  { const MutexLock no_step(step_mutex_); }  // a caller may be in the middle of one
  thread_.join();
}

void HostStage::submit(const OpPtr& op) {
  for (std::uint64_t index = 0; index < op->chunks.size(); ++index) {
    const std::size_t bytes = std::max(op->bytes_of(index), op->result_bytes_of(index));
    if (bytes <= shm_.layout().slot_bytes) continue;
    throw std::logic_error("chunk " + std::to_string(index) + " of " + numbered(op->seq) + " has " +
                           std::to_string(bytes) + " bytes, a slot of the shared memory " +
                           std::to_string(shm_.layout().slot_bytes));
  }
  {
    const MutexLock lock(submit_mutex_);
    submitted_.push_back(op);
  }
  if (!op->chunks.empty() || !advance()) shm_.ring(me_);
}

// ---- who advances ---------------------------------------------------------------------------------------

void HostStage::run() {
  while (!stopping_) {
    const std::uint32_t seen = shm_.bell(me_);
    if (shm_.num_driving(me_) == 0) {
      const MutexLock lock(step_mutex_);
      if (step()) continue;
      if (idle()) shm_.advances_alone(me_) = 0;
    }
    shm_.sleep(me_, Sleeper::stage, seen, kNapMs);
  }
}

bool HostStage::advance() {
  if (!step_mutex_.try_lock()) return false;
  step();
  step_mutex_.unlock();
  return true;
}

void HostStage::advance_alone() {
  shm_.advances_alone(me_) = 1;
  shm_.ring(me_);
}

// The stage's thread leaves the work to a caller that drives, and gets it back with what is left of it.
void HostStage::drive(const Op& op, double timeout_s) {
  if (op.ended || timeout_s == 0) return static_cast<void>(advance());
  constexpr double kLongS = 1e9;
  const auto until = std::chrono::steady_clock::now() + seconds(timeout_s < 0 ? kLongS : timeout_s);
  shm_.num_driving(me_).fetch_add(1);
  int num_idle = 0;
  bool left_over = false;
  while (!op.ended && !stopping_) {
    const std::uint32_t seen = shm_.bell(me_);
    bool moved;
    {
      const MutexLock lock(step_mutex_);
      moved = step();
      left_over = !entries_.empty() || !blocks_.idle() || (!direct_.idle() && shm_.advances_alone(me_));
    }
    if (op.ended) break;
    if (moved) num_idle = 0;
    else if (num_idle >= kYields && std::chrono::steady_clock::now() >= until) break;
    else relax(num_idle, seen, until);
  }
  const bool others_drive = shm_.num_driving(me_).fetch_sub(1) > 1;
  if (left_over || others_drive) shm_.ring(me_);
}

// Waits for the bell: spins, then yields, then sleeps.
void HostStage::relax(int& num_idle, std::uint32_t seen, std::chrono::steady_clock::time_point until) {
  if (num_idle == 0 && may_spin_) {
    for (int spin = 0; spin < kSpins && shm_.bell(me_) == seen; ++spin) pause();
  }
  if (num_idle++ < kYields) {
    if (shm_.bell(me_) == seen) std::this_thread::yield();
    return;
  }
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now()).count();
  shm_.sleep(me_, Sleeper::caller, seen, static_cast<int>(std::clamp<std::int64_t>(left + 1, 0, kNapMs)));
}

// Does all that can be done now. Returns whether anything moved.
bool HostStage::step() {
  if (stopping_) return false;
  try {
    bool moved = take_submissions();
    moved |= direct_.step();
    moved |= blocks_.step();
    if (direct_.diverged() || blocks_.diverged()) stopping_ = true;
    if (entries_.empty()) return moved;
    moved |= enter();
    moved |= own();
    moved |= leave();
    return moved;
  } catch (const std::exception& error) {
    stopping_ = true;
    hooks_.error(error.what());
    return false;
  }
}

void HostStage::finish(const Op& op, std::uint64_t index) {
  const std::uint64_t ticket = op.ticket + index;
  shm_.ready(ticket).store(ticket + 1, std::memory_order_release);
  ring_others();
  shm_.ring(me_);
}

void HostStage::ring_others() {
  for (int rank = 0; rank < num_locals_; ++rank) {
    if (rank != me_) shm_.ring(rank);
  }
}

bool HostStage::take_submissions() {
  std::vector<OpPtr> fresh;
  {
    const MutexLock lock(submit_mutex_);
    fresh.swap(submitted_);
  }
  for (OpPtr& op : fresh) {
    if (BlockExchange::takes(op->spec.kind)) {
      blocks_.add(op);
      continue;
    }
    if (op->chunks.empty()) {
      direct_.add(std::move(op));
      continue;
    }
    op->ticket = end_;
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

bool HostStage::contributions_are_in(std::uint64_t ticket) {
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
    if (!contributions_are_in(to_own_)) break;
    if (each.op->sums()) add_up(each, to_own_);
    else hand_round(each, to_own_);
    moved = true;
  }
  if (moved) ring_others();
  return moved;
}

void HostStage::add_up(const Entry& each, std::uint64_t ticket) {
  const std::uint64_t begin = now_ns();
  Op& op = *each.op;
  const std::size_t count = op.bytes_of(each.index) / op.width();
  std::vector<const void*> inputs;
  for (int rank = 0; rank < num_locals_; ++rank) {
    if (rank == me_) inputs.push_back(op.input_at(each.index, topology_.rank()));
    else inputs.push_back(shm_.contribution(rank, ticket));
  }
  const Element type = op.spec.element;
  const bool to_all = sums_for_all(op.spec.kind);
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
    default: return is_served(op.spec.kind);
  }
}

bool HostStage::leave() {
  bool moved = false;
  // A mismatched operation must not look completed: leave only chunks that own() has passed.
  while (to_leave_ < to_own_ && shm_.ready(to_leave_).load(std::memory_order_acquire) == to_leave_ + 1) {
    const Entry each = entry(to_leave_);
    if (takes_result(each)) {
      const std::uint64_t begin = now_ns();
      const Chunk& last = each.op->chunks.back();
      const bool large = (last.begin + last.count) * each.op->width() >= kStreamedBytes;
      (large ? copy_streaming : copy_bytes)(each.op->output_at(each.index, topology_.rank()), shm_.result(to_leave_),
                                            each.op->result_bytes_of(each.index));
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
