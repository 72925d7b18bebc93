// What goes wrong: lost ranks and helpers, stragglers, and ranks that do not ask for the same thing.
#include <algorithm>
#include <cstdio>

#include "base/clock.h"
#include "engine/engine.h"

namespace shoal {

namespace {

constexpr std::size_t kNamedRanks = 8;
constexpr std::uint64_t kRecords = 1024;

std::string tenths(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

std::string number(std::uint64_t seq) { return "operation #" + std::to_string(seq); }

}  // namespace

std::string Engine::who(int rank) const {
  const PeerInfo& peer = peers_[static_cast<std::size_t>(rank)];
  return "rank " + std::to_string(peer.global_rank) + " (" + peer.address + ", pid " + std::to_string(peer.pid) + ")";
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
  for (Outbox& box : outboxes_) box = {};
  for (PeerState& state : states_) state.deferred.clear();
  if (server_) server_->clear();
  early_.clear();
  retained_.clear();
  if (stage_) stage_->stop();
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
  return me + cause + "; under way here: " + number(first.seq) + ", " + describe(first.spec) +
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
  if (who.group == options_.group && who.size == options_.size && who.rank > options_.rank && who.rank < who.size) {
    return who.rank;
  }
  why_not = "it is rank " + std::to_string(who.rank) + " of group '" + who.group + "', not of '" + options_.group + "'";
  return -1;
}

void Engine::on_frame(int peer, const FrameHeader& header, Payload payload) {
  heard_progress(peer, header);
  if (failed_) return;
  switch (header.type) {
    case FrameType::push: {
      const std::string wrong = server_->contribute(peer, header, std::move(payload));
      if (!wrong.empty()) fail("a frame of " + (topology_->is_helper(peer) ? "a helper" : who(peer)) + " is malformed: " + wrong);
      return;
    }
    case FrameType::result: return deliver(header, std::move(payload));
    case FrameType::supply: return server_->supply(header, std::move(payload));
    case FrameType::heartbeat: return;
    case FrameType::server_down:
      return helper_lost(static_cast<int>(header.chunk), text_of(payload), false);
    case FrameType::announce: return heard_announcement(peer, header, text_of(payload));
    case FrameType::tell: return disagree(header.seq);
    case FrameType::fail: return fail(text_of(payload));
    case FrameType::goodbye:
      if (!topology_->is_helper(peer)) states_[static_cast<std::size_t>(peer)].left = true;
      return;
  }
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

void Engine::on_tick() {
  if (!topology_) return;
  broadcast(FrameType::heartbeat, 0, 0, 0, "");
  for (const OpPtr& op : pending_ops()) {
    if (!failed_) check_waiting(op);
  }
  forget_finished();
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
    name_stragglers(*op, age_s);
  }
  if (op->spec.timeout_s <= 0 || age_s <= op->spec.timeout_s) return;
  bool somebody = false;
  const std::string missing = missing_ranks(*op, somebody);
  fail("the deadline of " + tenths(op->spec.timeout_s) + " s passed for " + number(op->seq) + ", " +
       describe(op->spec) + ": " + missing);
}

// The lowest rank that waits speaks for all.
void Engine::name_stragglers(const Op& op, double age_s) {
  bool somebody = false;
  const std::string missing = missing_ranks(op, somebody);
  if (!somebody) return;
  for (int rank = 0; rank < options_.rank; ++rank) {
    if (states_[static_cast<std::size_t>(rank)].submitted > op.seq) return;
  }
  note("straggler: " + number(op.seq) + ", " + describe(op.spec) + ", has waited " + tenths(age_s) + " s: " + missing);
}

std::string Engine::missing_ranks(const Op& op, bool& somebody) {
  std::string text;
  std::size_t count = 0;
  const std::uint64_t now = now_ns();
  for (int rank = 0; rank < options_.size + topology_->num_helpers(); ++rank) {
    if (rank == options_.rank) continue;
    const PeerState& state = states_[static_cast<std::size_t>(rank)];
    const double silent_s = static_cast<double>(now - state.heard_ns) * 1e-9;
    const bool helper = topology_->is_helper(rank);
    if (helper && lost_helpers_[static_cast<std::size_t>(rank - options_.size)]) continue;
    const bool late = helper ? silent_s > options_.straggler_s : state.submitted <= op.seq;
    if (!late || ++count > kNamedRanks) continue;
    const std::string name = helper ? "helper " + helpers_[static_cast<std::size_t>(rank - options_.size)].name : who(rank);
    text += (text.empty() ? "" : "; ") + name + (helper ? "" : " has not begun it") +
            (silent_s > 2 * options_.straggler_s || helper ? " and has been silent for " + tenths(silent_s) + " s" : "");
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
}

// ---- ranks that ask for different things ----------------------------------------------------------------

void Engine::announce(const Op& op) {
  broadcast(FrameType::announce, op.seq, 0, op.signature, describe(op.spec));
}

void Engine::heard_announcement(int rank, const FrameHeader& header, const std::string& text) {
  const Announcement theirs{rank, header.signature, text};
  Record mine;
  {
    const std::lock_guard lock(mutex_);
    if (header.seq >= next_seq_) {
      announced_[header.seq].push_back(theirs);
      return;
    }
    mine = records_[header.seq % kRecords];
  }
  compare(header.seq, mine, theirs);
}

void Engine::compare(std::uint64_t seq, const Record& mine, const Announcement& theirs) {
  if (mine.seq != seq || mine.signature == theirs.signature) return;
  const bool first = options_.rank < theirs.rank;  // so that all ranks tell the same story
  const std::string a = who(options_.rank) + " asks for " + mine.text;
  const std::string b = who(theirs.rank) + " asks for " + theirs.text;
  fail("the ranks do not agree about " + number(seq) + ": " + (first ? a : b) + ", " + (first ? b : a));
}

// Two contributions to one chunk do not match: everybody says what it asks for.
void Engine::disagree(std::uint64_t seq) {
  Record mine;
  {
    const std::lock_guard lock(mutex_);
    if (seq >= next_seq_) {
      told_.insert(seq);
    } else {
      mine = records_[seq % kRecords];
    }
  }
  if (mine.seq != seq) return;
  const bool fresh = last_told_ != seq;
  last_told_ = seq;
  if (!fresh) return;
  broadcast(FrameType::tell, seq, 0, 0, "");
  broadcast(FrameType::announce, seq, 0, mine.signature, mine.text);
}

// ---- lost helpers ---------------------------------------------------------------------------------------

int Engine::route(std::uint64_t seq, std::uint64_t index, int server) {
  if (!topology_->is_helper(server) || !lost_helpers_[static_cast<std::size_t>(server - options_.size)]) return server;
  return topology_->stand_in(seq, index, lost_helpers_, options_.serve_beside_workers);
}

// Chunks that a lost helper has not answered go to their stand-ins: the same sums in the same order.
void Engine::helper_lost(int helper, const std::string& why, bool tell) {
  if (helper < 0 || helper >= topology_->num_helpers() || lost_helpers_[static_cast<std::size_t>(helper)]) return;
  lost_helpers_[static_cast<std::size_t>(helper)] = true;
  const int server = options_.size + helper;
  transport_->drop(server);
  const std::string& name = helpers_[static_cast<std::size_t>(helper)].name;
  if (tell) broadcast(FrameType::server_down, 0, static_cast<std::uint64_t>(helper), 0, why);
  note("helper " + name + " was lost (" + why + "); the others take over its chunks");
  outboxes_[static_cast<std::size_t>(server)] = {};
  std::map<std::uint64_t, OpPtr> affected = retained_;
  for (const OpPtr& op : pending_ops()) affected[op->seq] = op;
  for (const auto& [seq, op] : affected) {
    if (!failed_) move_to_stand_ins(server, op);
  }
}

void Engine::move_to_stand_ins(int server, const OpPtr& op) {
  for (std::uint64_t index = 0; index < op->parts.size(); ++index) {
    Op::Part& part = op->parts[index];
    if (part.step == Op::Step::idle || part.server != server) continue;
    part.server = route(op->seq, index, server);
    if (part.server < 0) {
      return fail("no server is left: helper " + helpers_[static_cast<std::size_t>(server - options_.size)].name +
                  " was the last one and workers do not serve");
    }
    if (part.step == Op::Step::waiting) {
      outboxes_[static_cast<std::size_t>(part.server)].waiting.emplace_back(op, index);
      pump(part.server);
      continue;
    }
    const auto held = op->retained.find(index);
    if (held == op->retained.end()) continue;
    const FrameHeader header = header_of(*op, index, FrameType::supply);
    if (part.server == options_.rank) server_->supply(header, held->second);
    else send(part.server, header, held->second);
  }
}

}  // namespace shoal
