// Failure of the group: lost ranks and helpers, heartbeats, stragglers.
#include <algorithm>
#include <cstdio>

#include "base/clock.h"
#include "engine/engine.h"

namespace shoal {

namespace {

constexpr std::size_t kNamedRanks = 8;
constexpr int kRanksATick = 64;

std::string tenths(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}


}  // namespace

std::string Engine::rank_name(int rank) const {
  const PeerInfo& peer = peers_[static_cast<std::size_t>(rank)];
  return "rank " + std::to_string(peer.global_rank) + " (" + peer.address + ", pid " + std::to_string(peer.pid) + ")";
}

std::string Engine::server_name(int server) const {
  if (!topology_->is_helper(server)) return rank_name(server);
  const HelperInfo& helper = helpers_[static_cast<std::size_t>(server - options_.size)];
  return "helper " + helper.name + " (" + helper.address + ":" + std::to_string(helper.port) + ")";
}

// ---- the group fails ------------------------------------------------------------------------------------

// Fails every operation and notifies the others; the first cause wins. The engine does not access callers' memory
// afterwards.
void Engine::fail(const std::string& cause) {
  if (failed_) return;
  failed_ = true;
  const std::string message = with_pending(cause);
  broadcast(FrameType::fail, 0, 0, 0, cause);
  transport_->drop_data();
  outbox_ = {};
  ordered_ = {};
  for (PeerState& state : states_) state.deferred.clear();
  if (server_) server_->clear();
  early_frames_.clear();
  retained_.clear();
  if (HostStage* stage = this->stage()) stage->stop();
  {
    const std::lock_guard lock(mutex_);
    error_ = message;
    for (const auto& [seq, op] : ops_) {
      failed_ops_.insert(seq);
      if (watched_.erase(seq)) watched_done_.push_back(seq);
    }
    ops_.clear();
  }
  changed_.notify_all();
}

std::string Engine::with_pending(const std::string& cause) {
  const std::vector<OpPtr> pending = pending_ops();
  const std::string me = "group '" + options_.group + "', " + (peers_.empty() ? "" : rank_name(options_.rank)) + ": ";
  if (pending.empty()) return me + cause;
  const Op& first = *pending.front();
  return me + cause + "; under way here: " + numbered(first.seq) + ", " + describe(first.spec) +
         (pending.size() > 1 ? " and " + std::to_string(pending.size() - 1) + " more" : "");
}

void Engine::broadcast(FrameType type, std::uint64_t seq, std::uint64_t chunk, std::uint64_t signature,
                       const std::string& text) {
  FrameHeader header;
  header.type = type;
  header.seq = seq;
  header.chunk = chunk;
  header.signature = signature;
  Payload payload = text.empty() ? Payload{} : payload_of(text.substr(0, 4096));
  const bool to_helpers = type == FrameType::heartbeat || type == FrameType::goodbye;
  const std::size_t count = to_helpers ? states_.size() : static_cast<std::size_t>(options_.size);
  for (std::size_t peer = 0; peer < count; ++peer) {
    if (static_cast<int>(peer) != options_.rank) send(static_cast<int>(peer), header, payload);
  }
}

// ---- frames and peers -----------------------------------------------------------------------------------

void Engine::on_error(const std::string& what) { fail("an error of " + rank_name(options_.rank) + " itself: " + what); }

void Engine::malformed(int peer, const std::string& what) {
  if (!topology_->is_helper(peer)) return fail(rank_name(peer) + " sent a malformed frame: " + what);
  transport_->drop(peer);
  on_down(peer, "it sent a malformed frame: " + what);
}

void Engine::on_down(int peer, const std::string& why) {
  if (failed_) return;
  if (topology_->is_helper(peer)) return helper_lost(peer - options_.size, why, true);
  if (!states_[static_cast<std::size_t>(peer)].left) return fail(rank_name(peer) + " was lost: " + why);
  on_tick();
}

void Engine::on_progress(int peer, const FrameHeader& header) {
  PeerState& state = states_[static_cast<std::size_t>(peer)];
  state.last_frame_ns = now_ns();
  if (topology_->is_helper(peer)) return;
  state.completed = std::max(state.completed, header.completed);
  if (header.submitted <= state.submitted) return;
  state.submitted = header.submitted;
  state.unexpected_bytes = 0;
  std::deque<std::pair<FrameHeader, Payload>> deferred;
  deferred.swap(state.deferred);
  for (auto& [held, payload] : deferred) send_result(peer, held, payload);
}

// ---- stragglers and deadlines ---------------------------------------------------------------------------

// Sends heartbeats. One rank of each host monitors the other hosts at every tick. The other pairs of a large group
// alternate, or heartbeats would be most of its traffic: 63,000 per second with 128 ranks. The end of a process is
// detected at once through its connections, independently of heartbeats.
void Engine::beat() {
  FrameHeader header;
  header.type = FrameType::heartbeat;
  const auto stride = static_cast<std::uint64_t>(std::max(1, options_.size / kRanksATick));
  for (int peer = 0; peer < static_cast<int>(states_.size()); ++peer) {
    if (peer == options_.rank) continue;
    const bool speaks = topology_->local_index() == 0 &&
                        (topology_->is_helper(peer) || topology_->locals(topology_->host_of(peer))[0] == peer);
    if (speaks || (num_ticks_ + static_cast<std::uint64_t>(peer + options_.rank)) % stride == 0) send(peer, header, {});
  }
  ++num_ticks_;
}

void Engine::on_tick() {
  if (!topology_) return;
  beat();
  const std::vector<OpPtr> pending = pending_ops();
  for (const OpPtr& op : pending) {
    if (!failed_) check_waiting(op);
  }
  forget_finished();
  if (failed_ || pending.empty()) return;
  Op& first = *pending.front();  // later operations wait for the same ranks
  const double age_s = std::chrono::duration<double>(Clock::now() - first.begun).count();
  if (age_s > options_.straggler_s && !first.named) first.named = name_stragglers(first, age_s);
}

void Engine::check_waiting(const OpPtr& op) {
  for (int rank = 0; rank < options_.size; ++rank) {
    const PeerState& state = states_[static_cast<std::size_t>(rank)];
    if (state.left && state.completed <= op->seq) {
      return fail(rank_name(rank) + " has left the group after " + std::to_string(state.completed) + " operations");
    }
  }
  const double age_s = std::chrono::duration<double>(Clock::now() - op->begun).count();
  if (age_s > options_.straggler_s && !op->announced) {
    op->announced = true;
    announce(*op);
  }
  if (op->spec.timeout_s <= 0 || age_s <= op->spec.timeout_s) return;
  bool somebody = false;
  const std::string missing = missing_ranks(*op, somebody);
  fail("the timeout of " + tenths(op->spec.timeout_s) + " s passed for " + numbered(op->seq) + ", " +
       describe(op->spec) + ": " + missing);
}

double Engine::silent_s(int peer) const {
  return static_cast<double>(now_ns() - states_[static_cast<std::size_t>(peer)].last_frame_ns) * 1e-9;
}

// Logs the ranks for which an operation waits; only the lowest waiting rank does. Returns whether there is a
// straggler: the silence of a rank that has begun shows only after a while.
bool Engine::name_stragglers(const Op& op, double age_s) {
  bool somebody = false;
  const std::string missing = missing_ranks(op, somebody);
  if (!somebody) return false;
  for (int rank = 0; rank < options_.rank; ++rank) {
    if (states_[static_cast<std::size_t>(rank)].submitted > op.seq && silent_s(rank) < options_.straggler_s) return true;
  }
  note("straggler: " + numbered(op.seq) + ", " + describe(op.spec) + ", has waited " + tenths(age_s) + " s: " + missing);
  return true;
}

std::string Engine::missing_ranks(const Op& op, bool& somebody) {
  std::string text;
  std::size_t count = 0;
  for (int rank = 0; rank < options_.size + topology_->num_helpers(); ++rank) {
    if (rank == options_.rank) continue;
    const PeerState& state = states_[static_cast<std::size_t>(rank)];
    const bool silent = silent_s(rank) > options_.straggler_s, begun = state.submitted > op.seq;
    const bool helper = topology_->is_helper(rank);
    if (helper && lost_helpers_[static_cast<std::size_t>(rank - options_.size)]) continue;
    const bool late = silent || (!helper && !begun);
    if (!late || ++count > kNamedRanks) continue;
    const std::string name = helper ? "helper " + helpers_[static_cast<std::size_t>(rank - options_.size)].name : rank_name(rank);
    text += (text.empty() ? "" : "; ") + name + (helper || begun ? "" : " has not begun it") +
            (silent ? std::string(helper || begun ? "" : " and") + " has been silent for " + tenths(silent_s(rank)) + " s" : "");
  }
  somebody = count > 0;
  if (count > kNamedRanks) text += "; and " + std::to_string(count - kNamedRanks) + " more";
  return somebody ? text : "every rank has begun it, but data is still missing";
}

void Engine::forget_finished() {
  std::uint64_t everywhere = completed_;
  for (int rank = 0; rank < options_.size; ++rank) {
    if (rank != options_.rank) everywhere = std::min(everywhere, states_[static_cast<std::size_t>(rank)].completed);
  }
  retained_.erase(retained_.begin(), retained_.lower_bound(everywhere));
  server_->forget_below(everywhere);
  const std::lock_guard lock(mutex_);
  announced_.erase(announced_.begin(), announced_.lower_bound(everywhere));
  suspicions_.erase(suspicions_.begin(), suspicions_.lower_bound(everywhere));
}

// ---- lost helpers ---------------------------------------------------------------------------------------

// Sends chunks that a lost helper has not answered to their stand-ins, which reduce them in the same order. They
// bypass the window: queued behind it, two ranks could each have a window full of chunks that the other holds back.
void Engine::helper_lost(int helper, const std::string& why, bool tell) {
  if (helper < 0 || helper >= topology_->num_helpers() || lost_helpers_[static_cast<std::size_t>(helper)]) return;
  lost_helpers_[static_cast<std::size_t>(helper)] = true;
  const int server = options_.size + helper;
  transport_->drop(server);
  const std::string& name = helpers_[static_cast<std::size_t>(helper)].name;
  if (tell) broadcast(FrameType::server_down, 0, static_cast<std::uint64_t>(helper), 0, why);
  {
    const std::lock_guard lock(mutex_);
    names_of_lost_.push_back(name);
  }
  note("helper " + name + " was lost (" + why + "); the others take over its chunks");
  std::map<std::uint64_t, OpPtr> affected = retained_;
  for (const OpPtr& op : pending_ops()) affected[op->seq] = op;
  for (const auto& [seq, op] : affected) {
    if (!failed_) reroute(server, op);
  }
  if (!failed_) pump();
}

void Engine::reroute(int server, const OpPtr& op) {
  for (std::uint64_t index = 0; index < op->parts.size(); ++index) {
    Op::Part& part = op->parts[index];
    if (part.step == Op::Step::idle || part.server != server) continue;
    part.server = route(op->seq, index, server);
    if (part.server < 0) {
      return fail("no server is left: helper " + helpers_[static_cast<std::size_t>(server - options_.size)].name +
                  " was the last one and workers do not serve");
    }
    if (part.step == Op::Step::waiting) {
      if (part.sent_ns == 0) continue;  // still in the outbox, which sends it to the stand-in
      if (part.server == options_.rank) retire(*op, index);
      send_contribution(op, index);
      if (failed_) return;
      continue;
    }
    const auto held = op->retained.find(index);
    if (held == op->retained.end()) continue;
    const FrameHeader header = header_of(*op, index, FrameType::supply);
    if (part.server != options_.rank) {
      send(part.server, header, held->second);
      continue;
    }
    const std::string wrong = server_->supply(options_.rank, header, held->second);
    if (!wrong.empty()) return fail(rank_name(options_.rank) + " supplied a malformed result: " + wrong);
  }
}

}  // namespace shoal
