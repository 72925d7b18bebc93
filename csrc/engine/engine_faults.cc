// What goes wrong: lost ranks and helpers, stragglers, and ranks that do not ask for the same thing.
#include <algorithm>
#include <cstdio>

#include "base/clock.h"
#include "base/log.h"
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

std::string Engine::who(int rank) const {
  const PeerInfo& peer = peers_[static_cast<std::size_t>(rank)];
  return "rank " + std::to_string(peer.global_rank) + " (" + peer.address + ", pid " + std::to_string(peer.pid) + ")";
}

std::string Engine::server_name(int server) const {
  if (!topology_->is_helper(server)) return who(server);
  const HelperInfo& helper = helpers_[static_cast<std::size_t>(server - options_.size)];
  return "helper " + helper.name + " (" + helper.address + ":" + std::to_string(helper.port) + ")";
}

// ---- the group fails ------------------------------------------------------------------------------------

// Ends every operation with an error and tells the others why; the first cause wins. Nothing of ours touches
// the callers' memory afterwards.
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
  early_.clear();
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
  const std::string me = "group '" + options_.group + "', " + (peers_.empty() ? "" : who(options_.rank)) + ": ";
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

int Engine::on_identity(const Identity& who, std::string& why_not) {
  const bool of_group = who.group == identity_ && who.size == options_.size && who.num_hosts == topology_->num_hosts();
  if (of_group && who.rank > options_.rank && who.rank < who.size && who.host == topology_->host_of(who.rank)) {
    return who.rank;
  }
  why_not = "it is rank " + std::to_string(who.rank) + " of group '" + who.group + "', not of '" + options_.group + "'";
  return -1;
}

void Engine::on_frame(int peer, const FrameHeader& header, Payload payload) {
  heard_progress(peer, header);
  if (failed_) return;
  if (parted_ && carries_data(header.type)) return;
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
    case FrameType::order: return heard_order(peer, header);
    case FrameType::server_down:
      return helper_lost(static_cast<int>(header.chunk), printable(text_of(payload)), false);
    case FrameType::announce:
      if (topology_->is_helper(peer)) return malformed(peer, "a helper asks for nothing");
      return heard_announcement(peer, header, printable(text_of(payload)));
    case FrameType::tell: return heard_suspicion(peer, header);
    case FrameType::fail:
      return fail((topology_->is_helper(peer) ? server_name(peer) + " reports: " : "") + printable(text_of(payload)));
    case FrameType::goodbye:
      if (!topology_->is_helper(peer)) states_[static_cast<std::size_t>(peer)].left = true;
      return;
    case FrameType::fabric: return;  // a helper's, for those who have libfabric
  }
}

// What SumServer cannot know: who takes part, and where the result goes.
std::string Engine::check_sender(int peer, const FrameHeader& header) const {
  if (topology_->is_helper(peer)) return "a helper contributes nothing";
  const auto kind = static_cast<Kind>(header.kind);
  const bool rooted = kind == Kind::broadcast || kind == Kind::reduce;
  if (rooted && (header.root < 0 || header.root >= options_.size)) return "there is no rank " + std::to_string(header.root);
  return "";
}

void Engine::on_error(const std::string& what) { fail("an error of " + who(options_.rank) + " itself: " + what); }

void Engine::malformed(int peer, const std::string& what) {
  if (!topology_->is_helper(peer)) return fail(who(peer) + " sent a malformed frame: " + what);
  transport_->drop(peer);
  on_down(peer, "it sent a malformed frame: " + what);
}

void Engine::on_down(int peer, const std::string& why) {
  if (failed_) return;
  if (topology_->is_helper(peer)) return helper_lost(peer - options_.size, why, true);
  if (!states_[static_cast<std::size_t>(peer)].left) return fail(who(peer) + " was lost: " + why);
  on_tick();
}

void Engine::heard_progress(int peer, const FrameHeader& header) {
  PeerState& state = states_[static_cast<std::size_t>(peer)];
  state.heard_ns = now_ns();
  if (topology_->is_helper(peer)) return;
  state.completed = std::max(state.completed, header.completed);
  if (header.submitted <= state.submitted) return;
  state.submitted = header.submitted;
  state.eager = 0;
  std::deque<std::pair<FrameHeader, Payload>> deferred;
  deferred.swap(state.deferred);
  for (auto& [held, payload] : deferred) send_result(peer, held, payload);
}

// ---- stragglers and deadlines ---------------------------------------------------------------------------

// One rank of each host watches the other hosts at every tick. The other pairs of a large group take turns, or
// heartbeats would be most of what it sends: 63,000 a second with 128 ranks. A process that ends is noticed by its
// connections at once, whoever watches.
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
  Op& first = *pending.front();  // what comes after waits for the same ranks
  const double age_s = std::chrono::duration<double>(Clock::now() - first.begun).count();
  if (age_s > options_.straggler_s && !first.named) first.named = name_stragglers(first, age_s);
}

void Engine::check_waiting(const OpPtr& op) {
  for (int rank = 0; rank < options_.size; ++rank) {
    const PeerState& state = states_[static_cast<std::size_t>(rank)];
    if (state.left && state.completed <= op->seq) {
      return fail(who(rank) + " has left the group after " + std::to_string(state.completed) + " operations");
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
  return static_cast<double>(now_ns() - states_[static_cast<std::size_t>(peer)].heard_ns) * 1e-9;
}

// The lowest rank that waits speaks for all. Returns whether there is a straggler: one that fell silent after it
// had begun shows only some time later.
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
    const std::string name = helper ? "helper " + helpers_[static_cast<std::size_t>(rank - options_.size)].name : who(rank);
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

}  // namespace shoal
