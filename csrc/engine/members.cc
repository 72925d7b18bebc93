#include "engine/members.h"

#include <algorithm>
#include <cstdio>

#include "base/clock.h"

namespace shoal {

namespace {

constexpr std::size_t kNamedRanks = 8;
constexpr int kRanksATick = 64;
constexpr std::uint64_t kGoneTicks = 2;

std::string tenths(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", value);
  return text;
}

double age_of(const Op& op) { return std::chrono::duration<double>(std::chrono::steady_clock::now() - op.begun).count(); }

}  // namespace

std::string Members::name_of(int server) const {
  if (is_helper(server)) {
    const HelperInfo& info = helper(server);
    return "helper " + info.name + " (" + info.address + ":" + std::to_string(info.port) + ")";
  }
  const PeerInfo& info = peer(server);
  return "rank " + std::to_string(info.global_rank) + " (" + info.address + ", pid " + std::to_string(info.pid) + ")";
}

// ---- what is sent to them ----------------------------------------------------------------------------------

void Mailbox::broadcast(const Notice& notice) {
  FrameHeader header;
  header.type = notice.type;
  header.seq = notice.seq;
  header.chunk = notice.chunk;
  header.signature = notice.signature;
  header.root = notice.root;
  const Payload payload = notice.text.empty() ? Payload{} : payload_of(notice.text.substr(0, kMaxText));
  const bool to_helpers = notice.type == FrameType::heartbeat || notice.type == FrameType::goodbye;
  if (notice.type != FrameType::heartbeat) header.server = kToBePassedOn;
  const int count = to_helpers ? members_.num_servers() : members_.size();
  for (int peer = 0; peer < count; ++peer) {
    if (peer != members_.rank) send(peer, header, payload);
  }
}

void Mailbox::beat(int peer, bool to_all) {
  FrameHeader header;
  header.server = to_all ? kToBePassedOn : 0;
  send(peer, header, {});
}

int Mailbox::pass_on(int peer, const FrameHeader& header, const Payload& payload) {
  if (!is_notice(header.type) || header.server == 0 || members_.is_helper(peer)) return peer;
  if (header.server == kToBePassedOn) {
    if (payload.size() <= kMaxText) relay(peer, header, payload);
    return peer;
  }
  const std::uint32_t origin = header.server - kPassedOn;
  if (origin >= static_cast<std::uint32_t>(members_.size())) return -1;
  const auto rank = static_cast<int>(origin);
  return topology_.relay_of(rank) == peer && !topology_.are_neighbours(rank, members_.rank) ? rank : -1;
}

void Mailbox::tell_lost(int peer, const std::string& why) {
  FrameHeader header;
  header.type = FrameType::rank_lost;
  if (!members_.is_helper(peer)) relay(peer, header, payload_of(why.substr(0, kMaxText)));
}

void Mailbox::relay(int origin, FrameHeader header, const Payload& payload) {
  if (topology_.host_of(origin) == topology_.my_host() || topology_.relay_of(origin) != members_.rank) return;
  header.server = kPassedOn + static_cast<std::uint32_t>(origin);
  for (int rank : topology_.my_locals()) {
    if (!topology_.are_neighbours(rank, origin)) sender_.send(rank, header, payload);
  }
}

// ---- lost helpers ------------------------------------------------------------------------------------------

int Router::stand_in(std::uint64_t seq, std::uint64_t index, int server) const {
  const int stand_in = topology_.stand_in(seq, index, lost_, workers_serve_);
  if (stand_in < 0) {
    throw GroupFailure("no server is left: " + members_.name_of(server) + " was lost, and workers do not serve");
  }
  return stand_in;
}

bool Router::lose(int server) {
  if (!members_.is_helper(server) || server >= members_.num_servers() || is_lost(server)) return false;
  lost_[static_cast<std::size_t>(server - members_.size())] = true;
  return true;
}

// ---- progress ----------------------------------------------------------------------------------------------

Liveness::Liveness(const Members& members, const Topology& topology, const Router& router, OpTable& ops,
                   Mailbox& mailbox, Journal& journal, double straggler_s)
    : members_(members),
      topology_(topology),
      router_(router),
      ops_(ops),
      mailbox_(mailbox),
      journal_(journal),
      straggler_s_(straggler_s),
      states_(static_cast<std::size_t>(members.num_servers())) {
  last_tick_ns_ = now_ns();
  for (State& state : states_) state.last_frame_ns = last_tick_ns_;
}

bool Liveness::heard(int peer, const FrameHeader& header) {
  State& state = at(peer);
  state.last_frame_ns = now_ns();
  state.quiet_s = 0;
  if (members_.is_helper(peer)) return false;
  state.completed = std::max(state.completed, header.completed);
  if (header.submitted <= state.submitted) return false;
  state.submitted = header.submitted;
  return true;
}

std::uint64_t Liveness::num_begun_by_all() const {
  std::uint64_t num = ops_.num_submitted();
  for (int rank = 0; rank < members_.size(); ++rank) {
    if (rank != members_.rank) num = std::min(num, at(rank).submitted);
  }
  return num;
}

std::uint64_t Liveness::num_completed_by_all() const {
  std::uint64_t num = ops_.num_completed();
  for (int rank = 0; rank < members_.size(); ++rank) {
    if (rank != members_.rank) num = std::min(num, at(rank).completed);
  }
  return num;
}

bool Liveness::anybody_lacks(std::uint64_t num_completed) const {
  for (int rank = 0; rank < members_.size(); ++rank) {
    if (rank != members_.rank && !at(rank).left && at(rank).completed < num_completed) return true;
  }
  return false;
}

void Liveness::tick(const std::function<void(const Op&)>& announce) {
  beat();
  const std::vector<OpPtr> pending = ops_.pending();
  count_silence(!pending.empty());
  for (const OpPtr& op : pending) check(*op, announce);
  if (pending.empty() || is_message(pending.front()->spec.kind)) return;
  Op& first = *pending.front();  // later operations wait for the same ranks
  const double age_s = age_of(first);
  if (age_s > straggler_s_ && !first.named) first.named = name_stragglers(first, age_s);
}

// One rank of each host monitors the other hosts at every tick. The other pairs of a large group alternate, or
// heartbeats would be most of its traffic: 63,000 per second with 128 ranks. The end of a process is detected at once
// through its connections, independently of heartbeats.
void Liveness::beat() {
  const auto stride = static_cast<std::uint64_t>(std::max(1, members_.size() / kRanksATick));
  for (int peer = 0; peer < members_.num_servers(); ++peer) {
    if (peer == members_.rank) continue;
    const bool speaks = topology_.local_index() == 0 &&
                        (members_.is_helper(peer) || topology_.locals(topology_.host_of(peer))[0] == peer);
    const bool due = (num_ticks_ + static_cast<std::uint64_t>(peer + members_.rank)) % stride == 0;
    if (speaks || due) mailbox_.beat(peer, due);
  }
  ++num_ticks_;
}

// A tick that comes late proves nothing about the others: of each, half a second counts at most.
void Liveness::count_silence(bool waits) {
  const std::uint64_t now = now_ns();
  const double passed_s = std::min(0.5, static_cast<double>(now - std::exchange(last_tick_ns_, now)) * 1e-9);
  for (State& state : states_) state.quiet_s = waits ? state.quiet_s + passed_s : 0;
}

std::vector<int> Liveness::silent_helpers(double patience_s) const {
  std::vector<int> silent;
  for (int server = members_.size(); server < members_.num_servers(); ++server) {
    if (!router_.is_lost(server) && at(server).quiet_s > patience_s) silent.push_back(server);
  }
  return silent;
}

// A message waits for its peer only; one from any rank for all others.
void Liveness::check_message(const Op& op) {
  const int peer = op.spec.root;
  bool somebody = false;
  for (int rank = peer < 0 ? 0 : peer; rank < (peer < 0 ? members_.size() : peer + 1); ++rank) {
    const State& state = at(rank);
    const bool gone = state.gone_at != ~std::uint64_t{0} && num_ticks_ >= state.gone_at + kGoneTicks;
    somebody = somebody || (rank != members_.rank && !gone);
  }
  const std::string name = peer < 0 ? "every other rank" : members_.name_of(peer);
  if (!somebody) throw GroupFailure(name + " has left the group, and " + describe(op.spec) + " waits for it");
  if (op.spec.timeout_s <= 0 || age_of(op) <= op.spec.timeout_s) return;
  throw GroupFailure("the timeout of " + tenths(op.spec.timeout_s) + " s passed for " + describe(op.spec) + ": " +
                     (peer < 0 ? "no rank" : name) + " has" + (peer < 0 ? "" : " not") +
                     (op.spec.kind == Kind::send ? " received it" : " sent it"));
}

void Liveness::check(Op& op, const std::function<void(const Op&)>& announce) {
  if (is_message(op.spec.kind)) return check_message(op);
  for (int rank = 0; rank < members_.size(); ++rank) {
    const State& state = at(rank);
    if (!state.left || state.completed > op.seq) continue;
    throw GroupFailure(members_.name_of(rank) + " has left the group after " + std::to_string(state.completed) +
                       " operations");
  }
  const double age_s = age_of(op);
  if (age_s > straggler_s_ && !op.announced) {
    op.announced = true;
    announce(op);
  }
  if (op.spec.timeout_s <= 0 || age_s <= op.spec.timeout_s) return;
  bool somebody = false;
  throw GroupFailure("the timeout of " + tenths(op.spec.timeout_s) + " s passed for " + numbered(op.seq) + ", " +
                     describe(op.spec) + ": " + missing(op, somebody));
}

double Liveness::silent_s(int peer) const { return static_cast<double>(now_ns() - at(peer).last_frame_ns) * 1e-9; }

// Logs the ranks for which an operation waits; only the lowest waiting rank does. Returns whether there is a
// straggler: the silence of a rank that has begun shows only after a while.
bool Liveness::name_stragglers(const Op& op, double age_s) {
  bool somebody = false;
  const std::string late = missing(op, somebody);
  if (!somebody) return false;
  for (int rank = 0; rank < members_.rank; ++rank) {
    if (at(rank).submitted > op.seq && silent_s(rank) < straggler_s_) return true;
  }
  journal_.note("straggler: " + numbered(op.seq) + ", " + describe(op.spec) + ", has waited " + tenths(age_s) + " s: " + late);
  return true;
}

std::string Liveness::missing(const Op& op, bool& somebody) const {
  std::string text;
  std::size_t count = 0;
  for (int rank = 0; rank < members_.num_servers(); ++rank) {
    if (rank == members_.rank || router_.is_lost(rank)) continue;
    const bool helper = members_.is_helper(rank);
    const bool heard_of = helper || topology_.are_neighbours(rank, members_.rank) || silent_s(topology_.relay_of(rank)) <= straggler_s_;
    if (!heard_of) continue;  // the rank that passes on its heartbeats is silent itself
    const bool silent = silent_s(rank) > straggler_s_, begun = helper || at(rank).submitted > op.seq;
    if ((begun && !silent) || ++count > kNamedRanks) continue;
    const std::string name = helper ? "helper " + members_.helper(rank).name : members_.name_of(rank);
    text += (text.empty() ? "" : "; ") + name + (begun ? "" : " has not begun it") +
            (silent ? std::string(begun ? "" : " and") + " has been silent for " + tenths(silent_s(rank)) + " s" : "");
  }
  somebody = count > 0;
  if (count > kNamedRanks) text += "; and " + std::to_string(count - kNamedRanks) + " more";
  return somebody ? text : "every rank has begun it, but data is still missing";
}

}  // namespace shoal
