#include "engine/engine.h"

#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "base/clock.h"
#include "base/log.h"
#include "engine/combine.h"

namespace shoal {

namespace {

// Input is read while output is written, so the two may overlap only where they are the same element.
void require_apart(const OpSpec& spec, int rank, int size) {
  if (spec.kind == Kind::barrier || spec.kind == Kind::broadcast || spec.kind == Kind::delegated) return;
  const std::size_t bytes = spec.count * size_of(spec.element), all = bytes * static_cast<std::size_t>(size);
  const bool gathers = spec.kind == Kind::all_gather, scatters = spec.kind == Kind::reduce_scatter;
  const auto input = reinterpret_cast<std::uintptr_t>(spec.input), output = reinterpret_cast<std::uintptr_t>(spec.output);
  const std::size_t mine = bytes * static_cast<std::size_t>(rank);
  const bool same = input + (scatters ? mine : 0) == output + (gathers ? mine : 0);
  const bool apart = input + (scatters ? all : bytes) <= output || output + (gathers ? all : bytes) <= input;
  if (same || apart || bytes == 0) return;
  throw std::invalid_argument("the output of " + describe(spec) + " overlaps the input " +
                              (gathers || scatters ? "elsewhere than in this rank's own part" : "partly") +
                              "; clone one of them first");
}

}  // namespace

// ---- callers' interface ---------------------------------------------------------------------------------

void Engine::set_pattern(std::vector<int> pattern) {
  const std::lock_guard lock(mutex_);
  topology_->set_pattern(std::move(pattern));
  fused_ = {};
}

std::uint64_t Engine::submit(OpSpec spec) {
  const std::lock_guard lock(mutex_);
  if (!error_.empty()) throw GroupError(error_);
  if (closed_ || !topology_) throw GroupError("group '" + options_.group + "' is not open");
  require_possible(spec);
  const OpPtr op = make_op(std::move(spec));
  if (op->spec.kind == Kind::delegated) return op->seq;
  prepare_own_part(*op);
  if (stage_) {
    stage_->submit(op);
    const bool receives = !op->sums() && topology_->num_hosts() > 1;
    if (receives) transport_->post([this] { broadcast(FrameType::heartbeat, 0, 0, 0, ""); });
  } else {
    transport_->post([this, op] { begin(op); });
  }
  return op->seq;
}

// Rejects what the reducing thread could not handle.
void Engine::require_possible(const OpSpec& spec) const {
  const bool rooted = spec.kind == Kind::broadcast || spec.kind == Kind::reduce;
  if (rooted && (spec.root < 0 || spec.root >= options_.size)) {
    throw std::invalid_argument("the root of a " + std::string(name_of(spec.kind)) + " is rank " +
                                std::to_string(spec.root) + " of " + std::to_string(options_.size));
  }
  const bool reduces = spec.kind == Kind::all_reduce || spec.kind == Kind::reduce || spec.kind == Kind::reduce_scatter;
  if (reduces) shoal::require_possible({spec.combine, spec.element, spec.element, options_.size});
  require_apart(spec, options_.rank, options_.size);
}

// Numbers the operation, cuts it into chunks and records it. Requires the mutex.
OpPtr Engine::make_op(OpSpec spec) {
  auto op = std::make_shared<Op>();
  op->spec = std::move(spec);
  op->seq = next_seq_++;
  op->signature = signature_of(op->spec);
  op->begun = Clock::now();
  if (op->spec.kind != Kind::delegated) {
    const std::size_t most = topology_->num_hosts() == 1 ? options_.shared_chunk_bytes : options_.chunk_bytes;
    op->chunks = topology_->cut(op->spec, most, fused_);
    op->parts.resize(op->chunks.size());
    // where ranks share a host, the host stage emits chunks in call order
    op->ordered = op->spec.priority && op->spec.kind == Kind::all_reduce && !topology_->any_host_shared();
  }
  const std::string name(op->spec.kind == Kind::delegated ? op->spec.name : std::string(name_of(op->spec.kind)));
  counts_["ops_" + name] += 1;
  counts_["bytes_" + name] += op->spec.count * op->width();
  records_[op->seq % kRecords] = {op->seq, op->signature, describe(op->spec)};
  ops_[op->seq] = op;
  submitted_ = next_seq_;
  const bool told = mismatch_reported_.erase(op->seq) > 0;
  if (told || announced_.count(op->seq)) {
    transport_->post([this, op] {
      announce(*op);
      std::vector<Announcement> heard;
      {
        const std::lock_guard lock(mutex_);
        const auto found = announced_.find(op->seq);
        if (found != announced_.end()) heard = found->second;
      }
      for (const Announcement& each : heard) compare(op->seq, {op->seq, op->signature, describe(op->spec)}, each);
      diagnose(op->seq);
    });
  }
  return op;
}

// Copies this rank's input of an all_gather to the output, on the caller's thread.
void Engine::prepare_own_part(Op& op) {
  if (op.spec.kind != Kind::all_gather) return;
  const std::size_t bytes = op.spec.count * op.width();
  std::byte* to = op.spec.output + static_cast<std::size_t>(options_.rank) * bytes;
  if (bytes && to != op.spec.input) std::memmove(to, op.spec.input, bytes);
}

void Engine::finish_delegated(std::uint64_t seq) {
  if (const OpPtr op = find(seq)) finished_one(op);
}

bool Engine::wait(std::uint64_t seq, double timeout_s) {
  std::unique_lock lock(mutex_);
  const auto over = [&] { return !ops_.count(seq); };
  if (timeout_s < 0) changed_.wait(lock, over);
  else if (!changed_.wait_for(lock, seconds(timeout_s), over)) return false;
  if (failed_ops_.count(seq)) throw GroupError(error_);
  return true;
}

bool Engine::is_done(std::uint64_t seq) {
  const std::lock_guard lock(mutex_);
  return !ops_.count(seq);
}

void Engine::watch(std::uint64_t seq) {
  {
    const std::lock_guard lock(mutex_);
    if (ops_.count(seq)) watched_.insert(seq);
    else watched_done_.push_back(seq);
  }
  changed_.notify_all();
}

std::vector<std::uint64_t> Engine::next_watched(double timeout_s) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, seconds(timeout_s), [&] { return !watched_done_.empty(); });
  std::vector<std::uint64_t> done(watched_done_.begin(), watched_done_.end());
  watched_done_.clear();
  return done;
}

std::string Engine::error() {
  const std::lock_guard lock(mutex_);
  return closed_ ? "" : error_;
}

void Engine::abort(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_ || !topology_) return;
  }
  auto done = std::make_shared<std::promise<void>>();
  transport_->post([this, reason, done] {
    fail(reason);
    done->set_value();
  });
  done->get_future().wait_for(std::chrono::seconds(5));
}

// ---- frames from peers (transport thread) ----------------------------------------------------------------

void Engine::on_frame(int peer, const FrameHeader& header, Payload payload) {
  on_progress(peer, header);
  if (failed_) return;
  if (diverged_ && carries_data(header.type)) return;
  switch (header.type) {
    case FrameType::push: {
      std::string wrong = check_sender(peer, header);
      if (wrong.empty()) wrong = server_->contribute(peer, header, std::move(payload));
      if (!wrong.empty()) malformed(peer, wrong);
      return;
    }
    case FrameType::result: return deliver(peer, header, std::move(payload));
    case FrameType::supply: {
      std::string wrong = check_sender(peer, header);
      if (wrong.empty()) wrong = server_->supply(peer, header, std::move(payload));
      if (!wrong.empty()) malformed(peer, wrong);
      return;
    }
    case FrameType::heartbeat: return;
    case FrameType::order: return on_order(peer, header);
    case FrameType::server_down:
      return helper_lost(static_cast<int>(header.chunk), printable(text_of(payload)), false);
    case FrameType::announce:
      if (topology_->is_helper(peer)) return malformed(peer, "a helper issues no operations");
      return on_announcement(peer, header, printable(text_of(payload)));
    case FrameType::mismatch: return on_mismatch(peer, header);
    case FrameType::fail:
      return fail((topology_->is_helper(peer) ? server_name(peer) + " reports: " : "") + printable(text_of(payload)));
    case FrameType::goodbye:
      if (!topology_->is_helper(peer)) states_[static_cast<std::size_t>(peer)].left = true;
      return;
    case FrameType::fabric: return;  // from a helper with libfabric; this rank has none
  }
}

// Checks what SumServer cannot know: the sender and the root.
std::string Engine::check_sender(int peer, const FrameHeader& header) const {
  if (topology_->is_helper(peer)) return "a helper contributes nothing";
  const auto kind = static_cast<Kind>(header.kind);
  const bool rooted = kind == Kind::broadcast || kind == Kind::reduce;
  if (rooted && (header.root < 0 || header.root >= options_.size)) return "there is no rank " + std::to_string(header.root);
  return "";
}

// ---- completion -----------------------------------------------------------------------------------------

void Engine::finished_one(const OpPtr& op) {
  if (op->pending.fetch_sub(1) == 1) complete(op);
}

void Engine::complete(const OpPtr& op) {
  {
    const std::lock_guard lock(mutex_);
    if (!ops_.erase(op->seq)) return;
    if (watched_.erase(op->seq)) watched_done_.push_back(op->seq);
    completed_ = ops_.empty() ? next_seq_ : ops_.begin()->first;
  }
  changed_.notify_all();
}

OpPtr Engine::find(std::uint64_t seq) {
  const std::lock_guard lock(mutex_);
  const auto found = ops_.find(seq);
  return found == ops_.end() ? nullptr : found->second;
}

HostStage* Engine::stage() {
  const std::lock_guard lock(mutex_);
  return stage_.get();
}

std::vector<OpPtr> Engine::pending_ops() {
  const std::lock_guard lock(mutex_);
  std::vector<OpPtr> ops;
  for (const auto& [seq, op] : ops_) ops.push_back(op);
  return ops;
}

// ---- counters, events, trace ----------------------------------------------------------------------------

std::map<std::string, std::uint64_t> Engine::counters() {
  auto counts = transport_->counters();
  const std::lock_guard lock(mutex_);
  counts.insert(counts_.begin(), counts_.end());
  counts["held_bytes"] = server_ ? server_->held_bytes() : 0;
  return counts;
}

void Engine::note(const std::string& text) {
  std::fprintf(stderr, "shoal: %s\n", text.c_str());
  const std::lock_guard lock(mutex_);
  events_.push_back(text);
}

std::vector<std::string> Engine::take_events() {
  const std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

std::vector<std::string> Engine::lost_helpers() {
  const std::lock_guard lock(mutex_);
  return names_of_lost_;
}

void Engine::traced(const char* what, std::uint64_t begin_ns, std::uint64_t seq, std::uint64_t chunk) {
  if (!tracing_) return;
  const std::lock_guard lock(mutex_);
  events_trace_.push_back({what, begin_ns, now_ns(), seq, chunk});
}

std::vector<TraceEvent> Engine::take_trace() {
  const std::lock_guard lock(mutex_);
  return std::exchange(events_trace_, {});
}

}  // namespace shoal
