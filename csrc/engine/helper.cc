#include "engine/helper.h"

#include <malloc.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "engine/errors.h"

namespace shoal {

namespace {

constexpr int kMaxRanks = 65535;

}  // namespace

HelperServer::HelperServer(const std::string& address, int port, Bytes secret, int send_buffer_bytes,
                           const std::string& fabric, std::uint64_t shuffle, std::size_t max_groups,
                           std::size_t max_weight_bytes, int num_threads, std::size_t max_sum_bytes)
    : max_groups_(max_groups), budget_(max_weight_bytes), memory_(max_sum_bytes) {
  TransportOptions options;
  options.tcp.address = address;
  options.tcp.port = port;
  options.tcp.secret = std::move(secret);
  options.tcp.send_buffer_bytes = send_buffer_bytes;
  options.tcp.num_threads = num_threads;
  options.fabric = fabric;
  options.shuffle = shuffle;
  transport_ = open_transport(std::move(options), *this);
}

HelperServer::~HelperServer() {
  stop();
  transport_.reset();
}

void HelperServer::stop() { transport_->stop(); }

std::map<std::string, std::uint64_t> HelperServer::counters() {
  auto counts = transport_->counters();
  counts["groups"] = num_groups_;
  counts["chunks_summed"] = num_summed_;
  counts["held_bytes"] = held_bytes_;  // as of the last tick
  counts["weight_bytes"] = budget_.used_bytes;
  return counts;
}

// ---- processes and members ------------------------------------------------------------------------------

int HelperServer::on_introduction(const Introduction& who, std::string& why_not) {
  return processes_.introduce(who, why_not);
}

// Answers with a join of its own, which lets the member send.
void HelperServer::on_join(int peer, const FrameHeader& header, const Payload& payload) {
  Identity who;
  try {
    who = read_join(header, payload);
  } catch (const std::runtime_error& error) {
    return drop_peer(peer, error.what());
  }
  FrameHeader answer;
  answer.type = FrameType::join;
  const std::string why_not = admit(peer, header.group, who);
  who.marks.clear();
  if (why_not.empty()) return send(peer, header.group, answer, join_payload(who));
  log("refused " + name_of(peer) + ": " + why_not);
  answer.type = FrameType::leave;
  send(peer, header.group, answer, payload_of("it refused: " + why_not));
}

// Returns an empty string, or why the process does not become that member.
std::string HelperServer::admit(int peer, std::uint32_t number, const Identity& who) {
  const bool possible = 0 <= who.rank && who.rank < who.size && who.size <= kMaxRanks && 0 <= who.host &&
                        who.host < who.num_hosts && who.num_hosts <= who.size && !who.group.empty();
  if (!possible) {
    return "rank " + std::to_string(who.rank) + " of " + std::to_string(who.size) + ", host " + std::to_string(who.host) +
           " of " + std::to_string(who.num_hosts) + ", in group '" + who.group + "'";
  }
  if (!memory().has_room_for(peer)) {
    return "it has memory for the sums of " + std::to_string(memory_.most_processes()) +
           " processes and no more; start another helper, or give this one more (shoal serve --sums-mib)";
  }
  const std::string mark = mark_of(processes_.find(peer)->key);
  if (!who.marks.empty() && who.marks.compare(static_cast<std::size_t>(who.rank) * kMarkBytes, kMarkBytes, mark) != 0) {
    return "rank " + std::to_string(who.rank) + " of group '" + who.group + "' has another public key";
  }
  if (!groups_.count(number)) {
    if (groups_.size() >= max_groups_) return "it serves " + std::to_string(max_groups_) + " groups and no more; start another helper";
    open_group(number, who);
  }
  Group& group = groups_[number];
  if (group.name != who.group) {
    return "group '" + who.group + "' has the same number as group '" + group.name + "' here; give it another name";
  }
  if (group.size != who.size || group.num_hosts != who.num_hosts) {
    return "group '" + who.group + "' has " + std::to_string(group.size) + " ranks on " + std::to_string(group.num_hosts) +
           " hosts, not " + std::to_string(who.size) + " on " + std::to_string(who.num_hosts);
  }
  if (group.marks != who.marks) {
    return "group '" + who.group + "' has ranks with other public keys here than " + name_of(peer) + " knows";
  }
  std::erase_if(group.members, [&](const auto& each) { return each.second.left && each.second.rank == who.rank; });
  for (const auto& [other, member] : group.members) {
    if ((other == peer) == (member.rank == who.rank) && (other != peer || member.host == who.host)) continue;
    return "in group '" + who.group + "', " + name_of(other) + " is rank " + std::to_string(member.rank) + " on host " +
           std::to_string(member.host) + ", and " + name_of(peer) + " wants to be rank " + std::to_string(who.rank) +
           " on host " + std::to_string(who.host);
  }
  group.members.try_emplace(peer, Member{who.rank, who.host});
  members_changed_ = true;
  return "";
}

void HelperServer::open_group(std::uint32_t number, const Identity& who) {
  Group& group = groups_[number];
  group.name = who.group;
  group.size = who.size;
  group.num_hosts = who.num_hosts;
  group.marks = who.marks;
  group.server = std::make_unique<SumServer>(
      transport_->pool(), budget_, who.num_hosts,
      [this, number](int peer, const FrameHeader& header, const Payload& payload) { send(peer, number, header, payload); },
      [this, number](const SumServer::Conflict& conflict) { report_conflict(number, conflict); },
      [this, number](const FrameHeader& header, const Payload& sum) { return send_copy(number, header, sum); });
  num_groups_ = groups_.size();
}

// A member that leaves is kept until all have left: what it sent before may come later, on another connection.
void HelperServer::leave(Groups::iterator group, int peer, const std::string& why) {
  auto& [number, of_group] = *group;
  const auto member = of_group.members.find(peer);
  if (member == of_group.members.end()) return;
  if (!std::exchange(member->second.left, true) && !member->second.said_goodbye) {
    log("rank " + std::to_string(member->second.rank) + " of group '" + of_group.name + "' is gone: " + why);
  }
  const bool all_left = std::ranges::all_of(of_group.members, [](const auto& each) { return each.second.left; });
  if (!all_left) return;
  left_.add(number);
  groups_.erase(group);
  num_groups_ = groups_.size();
  group_ended_ = members_changed_ = true;
}

// What a group has kept goes back to the system: a helper may stay for weeks, on a host that others use.
void HelperServer::give_memory_back() {
  if (!std::exchange(group_ended_, false)) return;
  transport_->pool().clear();
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

std::string HelperServer::name_of(int peer) {
  const Process* const process = processes_.find(peer);
  return process ? process->name : "a process that is gone";
}

void HelperServer::drop_peer(int peer, const std::string& why) {
  transport_->drop(peer);
  on_down(peer, why);
}

void HelperServer::on_down(int peer, const std::string& why) {
  if (!processes_.remove(peer)) return;
  memory_.forget(peer);
  stalled_.erase(peer);
  std::erase_if(awaits_, [peer](const auto& each) { return each.second == peer; });
  for (auto group = groups_.begin(); group != groups_.end();) {
    const auto next = std::next(group);
    leave(group, peer, why);
    group = next;
  }
}

// ---- memory ---------------------------------------------------------------------------------------------

SumMemory& HelperServer::memory() {
  if (!std::exchange(members_changed_, false)) return memory_;
  std::vector<std::vector<int>> groups;
  for (const auto& [number, group] : groups_) {
    groups.emplace_back();
    for (const auto& [peer, member] : group.members) groups.back().push_back(peer);
  }
  memory_.share(groups);
  transport_->share(memory_.jobs());
  return memory_;
}

// Always: what a dropped peer has sent, since nothing of it is kept, small notices, contributions to chunks that others
// have begun, and results of a lost helper, for which others wait in any order.
bool HelperServer::admits(int peer, const FrameHeader& header) {
  const bool pushes = header.type == FrameType::push;
  if (!processes_.find(peer) || header.type == FrameType::supply || (!pushes && header.payload_bytes <= kMaxText)) return true;
  const auto group = groups_.find(header.group);
  const std::size_t to_begin = group == groups_.end() ? 0 : group->second.server->bytes_to_begin(header);
  const std::size_t on_its_way = transport_->held_bytes(peer) + header.payload_bytes, most = memory().most_bytes(peer),
                    bytes = memory_.held_bytes(peer) + on_its_way + to_begin;
  const bool is_begun = pushes && group != groups_.end() && to_begin == 0;
  if (bytes <= memory_.usual_bytes(peer) || (is_begun && on_its_way <= most)) return true;
  if (bytes <= most && may_add_.erase(peer)) return true;
  stalled_.insert(peer);
  awaits_.emplace(ChunkKey{header.group, header.seq, header.chunk}, peer);
  return false;
}

// Results of a lost helper, and chunks over libfabric, are taken at once: nothing but an end of the group bounds them.
void HelperServer::require_memory(int peer) {
  if (!memory().exceeds(peer)) return;
  throw GroupFailure(name_of(peer) + " and the others of its job have sent a helper " + std::to_string(memory_.job_bytes(peer) >> 20) +
                     " MiB for sums that others have not added to, its part of the helper's memory; use more helpers, or give "
                     "them more (shoal serve --sums-mib)");
}

void HelperServer::resume(int peer) {
  stalled_.erase(peer);
  std::erase_if(awaits_, [peer](const auto& each) { return each.second == peer; });
  transport_->resume(peer);
}

// Once there is a contribution to this chunk: who waits for it, and who holds less now.
void HelperServer::resume_stalled(const ChunkKey& begun) {
  std::vector<int> peers;
  const auto [first, last] = awaits_.equal_range(begun);
  for (auto each = first; each != last; ++each) peers.push_back(each->second);
  for (int peer : stalled_) {
    if (memory_.held_bytes(peer) + transport_->held_bytes(peer) < memory().usual_bytes(peer) / 2) peers.push_back(peer);
  }
  for (int peer : peers) resume(peer);
}

// ---- frames ---------------------------------------------------------------------------------------------

void HelperServer::on_frame(int peer, const FrameHeader& header, Payload payload) {
  if (!processes_.find(peer)) return;  // the rest of what a dropped peer has sent
  if (header.type == FrameType::fabric) return;  // of a process with libfabric; this one has none
  if (header.type == FrameType::join) return on_join(peer, header, payload);
  const auto group = groups_.find(header.group);
  if (group == groups_.end() && left_.has(header.group)) return;
  if (group == groups_.end() || !group->second.members.count(peer)) {
    return drop_peer(peer, "it sent a frame of a group that it has not joined");
  }
  if (header.type == FrameType::leave) return leave(group, peer, text_of(payload).substr(0, kMaxText));
  Member& member = group->second.members.at(peer);
  if (member.left && !member.said_goodbye) return;
  if (header.type == FrameType::goodbye) member.said_goodbye = true;
  std::uint64_t& completed = group->second.completed[member.rank];
  completed = std::max(completed, header.completed);
  if (carries_data(header.type) || header.type == FrameType::copied) on_data(peer, header, std::move(payload));
}

void HelperServer::on_data(int peer, const FrameHeader& header, Payload payload) {
  Group& group = groups_.at(header.group);
  const SumServer::Contributor from{peer, group.members.at(peer).host};
  const std::size_t to_begin = group.server->bytes_to_begin(header);
  if (header.type != FrameType::copied) payload = memory_.charged(peer, to_begin, payload);
  std::string wrong;
  const std::uint64_t summed_before = group.server->num_summed();
  try {
    require_memory(peer);
    if (header.type == FrameType::push) wrong = group.server->contribute(from, header, std::move(payload));
    if (header.type == FrameType::supply) wrong = group.server->supply(from, header, std::move(payload));
    if (header.type == FrameType::copied) wrong = group.server->confirm_copy(peer, header);
  } catch (const GroupFailure& full) {
    FrameHeader fail;
    fail.type = FrameType::fail;
    tell_group(header.group, fail, full.what());
    return leave(groups_.find(header.group), peer, full.what());
  }
  num_summed_ += group.server->num_summed() - summed_before;  // of all groups, those that ended too
  if (wrong.empty()) return resume_stalled({header.group, header.seq, header.chunk});
  // frames arrive intact, so the sender is broken: the group must not continue with it
  FrameHeader fail;
  fail.type = FrameType::fail;
  tell_group(header.group, fail,
             "rank " + std::to_string(group.members.at(peer).rank) + " of the group sent a helper a malformed frame: " + wrong);
  leave(groups_.find(header.group), peer, "a malformed frame: " + wrong);
}

// Sends to a member, or answers a process that wants to be one.
void HelperServer::send(int peer, std::uint32_t number, FrameHeader header, const Payload& payload) {
  const auto group = groups_.find(number);
  if (group != groups_.end()) {
    const auto member = group->second.members.find(peer);
    if (member != group->second.members.end() && member->second.left) return;
  }
  header.group = number;
  transport_->send(peer, header, payload);
}

// Returns the peer that has the copy, or -1.
int HelperServer::send_copy(std::uint32_t number, FrameHeader header, const Payload& sum) {
  const Group& group = groups_.at(number);
  const int buddy = buddy_of(header.table, header.chunk, group.size);
  header.type = FrameType::copy;
  for (const auto& [peer, member] : group.members) {
    if (member.rank != buddy || member.left) continue;
    send(peer, number, header, sum);
    return peer;
  }
  return -1;
}

// The ranks diagnose the conflict: they know what each of them issued.
void HelperServer::report_conflict(std::uint32_t number, const SumServer::Conflict& conflict) {
  FrameHeader header;
  header.seq = conflict.seq;
  const auto& members = groups_.at(number).members;
  const auto rank_of = [&members](int peer) { return members.count(peer) ? members.at(peer).rank : -1; };
  if (conflict.first.signature == conflict.second.signature) {
    header.type = FrameType::fail;
    return tell_group(number, header,
                      "ranks " + std::to_string(rank_of(conflict.first.peer)) + " and " +
                          std::to_string(rank_of(conflict.second.peer)) + " of the group sent a helper chunk " +
                          std::to_string(conflict.chunk) + " of " + numbered(conflict.seq) + " as " +
                          conflict.first.sent + " and as " + conflict.second.sent);
  }
  header.type = FrameType::mismatch;
  for (const SumServer::Sender& each : {conflict.first, conflict.second}) {
    header.chunk = static_cast<std::uint64_t>(rank_of(each.peer));
    header.signature = each.signature;
    tell_group(number, header, "");
  }
}

void HelperServer::tell_group(std::uint32_t number, FrameHeader header, const std::string& text) {
  for (const auto& [peer, member] : groups_.at(number).members) {
    send(peer, number, header, text.empty() ? Payload{} : payload_of(text));
  }
}

// ---- the rest -------------------------------------------------------------------------------------------

void HelperServer::log(const std::string& line) { lines_.write("shoal serve: " + line); }

void HelperServer::on_error(const std::string& what) { log("an error of its own: " + what); }

// Sends heartbeats, and drops state that all ranks of a group have passed.
void HelperServer::on_tick() {
  lines_.tick();
  give_memory_back();
  FrameHeader beat;
  beat.type = FrameType::heartbeat;
  std::size_t held = 0;
  for (auto& [number, group] : groups_) {
    for (const auto& [peer, member] : group.members) send(peer, number, beat, {});
    held += group.server->held_bytes();
    if (static_cast<int>(group.completed.size()) < group.size) continue;
    std::uint64_t everywhere = ~std::uint64_t{0};
    for (const auto& [rank, completed] : group.completed) everywhere = std::min(everywhere, completed);
    group.server->forget_below(everywhere);
  }
  held_bytes_ = held;
  may_add_ = stalled_;
  for (int peer : std::set<int>(stalled_)) resume(peer);
}

}  // namespace shoal
