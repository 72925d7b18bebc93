#include "engine/helper.h"

#include <algorithm>

namespace shoal {

namespace {

constexpr int kMaxRanks = 65535;

}  // namespace

HelperServer::HelperServer(const std::string& address, int port, Bytes secret, int send_buffer_bytes,
                           const std::string& fabric, std::uint64_t shuffle) {
  TransportOptions options;
  options.tcp.address = address;
  options.tcp.port = port;
  options.tcp.secret = std::move(secret);
  options.tcp.send_buffer_bytes = send_buffer_bytes;
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
  return counts;
}

int HelperServer::on_identity(const Identity& who, std::string& why_not) {
  const bool possible = 0 <= who.rank && who.rank < who.size && who.size <= kMaxRanks && 0 <= who.host &&
                        who.host < who.num_hosts && who.num_hosts <= who.size && !who.group.empty();
  if (!possible) {
    why_not = "rank " + std::to_string(who.rank) + " of " + std::to_string(who.size) + ", host " +
              std::to_string(who.host) + " of " + std::to_string(who.num_hosts) + ", in group '" + who.group + "'";
    return -1;
  }
  Group& group = open_group(who);
  if (group.size != who.size || group.num_hosts != who.num_hosts) {
    why_not = "group '" + who.group + "' has " + std::to_string(group.size) + " ranks on " +
              std::to_string(group.num_hosts) + " hosts, not " + std::to_string(who.size) + " on " +
              std::to_string(who.num_hosts);
    return -1;
  }
  const auto [found, fresh] = group.peer_of.try_emplace(who.rank, next_peer_);
  if (fresh) members_[next_peer_++] = {who.group, who.rank, who.host};
  if (members_[found->second].host != who.host) {
    why_not = "rank " + std::to_string(who.rank) + " of group '" + who.group + "' is on host " +
              std::to_string(members_[found->second].host) + ", not " + std::to_string(who.host);
    return -1;
  }
  return found->second;
}

HelperServer::Group& HelperServer::open_group(const Identity& who) {
  Group& group = groups_[who.group];
  if (group.server) return group;
  group.size = who.size;
  group.num_hosts = who.num_hosts;
  group.server = std::make_unique<SumServer>(
      pool_, SumServer::Members{who.num_hosts, [this](int peer) { return members_.at(peer).host; }},
      [this](int peer, const FrameHeader& header, const Payload& payload) { transport_->send(peer, header, payload); },
      [this, name = who.group](const SumServer::Conflict& conflict) { report_conflict(name, conflict); });
  num_groups_ = groups_.size();
  return group;
}

// The ranks diagnose the conflict: they know what each of them issued.
void HelperServer::report_conflict(const std::string& group, const SumServer::Conflict& conflict) {
  FrameHeader header;
  header.seq = conflict.seq;
  const auto rank_of = [this](int peer) { return members_.count(peer) ? members_[peer].rank : -1; };
  if (conflict.first.signature == conflict.second.signature) {
    header.type = FrameType::fail;
    return tell_group(group, header,
                      "ranks " + std::to_string(rank_of(conflict.first.peer)) + " and " +
                          std::to_string(rank_of(conflict.second.peer)) + " of the group sent a helper chunk " +
                          std::to_string(conflict.chunk) + " of " + numbered(conflict.seq) + " as " +
                          conflict.first.sent + " and as " + conflict.second.sent);
  }
  header.type = FrameType::mismatch;
  for (const SumServer::Sender& each : {conflict.first, conflict.second}) {
    header.chunk = static_cast<std::uint64_t>(rank_of(each.peer));
    header.signature = each.signature;
    tell_group(group, header, "");
  }
}

void HelperServer::tell_group(const std::string& group, FrameHeader header, const std::string& text) {
  for (const auto& [rank, peer] : groups_.at(group).peer_of) {
    transport_->send(peer, header, text.empty() ? Payload{} : payload_of(text));
  }
}

void HelperServer::log(const std::string& line) { lines_.write("shoal serve: " + line); }

void HelperServer::on_error(const std::string& what) { log("an error of its own: " + what); }

void HelperServer::on_frame(int peer, const FrameHeader& header, Payload payload) {
  const auto member = members_.find(peer);
  if (member == members_.end()) return;
  Group& group = groups_[member->second.group];
  std::string wrong;
  const std::uint64_t summed_before = group.server->num_summed();
  if (header.type == FrameType::push) wrong = group.server->contribute(peer, header, std::move(payload));
  if (header.type == FrameType::supply) wrong = group.server->supply(peer, header, std::move(payload));
  num_summed_ += group.server->num_summed() - summed_before;  // of all groups, those that ended too
  if (!wrong.empty()) {  // frames arrive intact, so the sender is broken: the group must not continue with it
    FrameHeader fail;
    fail.type = FrameType::fail;
    tell_group(member->second.group, fail,
               "rank " + std::to_string(member->second.rank) + " of the group sent a helper a malformed frame: " + wrong);
    transport_->drop(peer);
    return on_down(peer, "a malformed frame: " + wrong);
  }
  if (header.type == FrameType::goodbye) member->second.left = true;
  group.completed[member->second.rank] = std::max(group.completed[member->second.rank], header.completed);
}

void HelperServer::on_down(int peer, const std::string& why) {
  const auto member = members_.find(peer);
  if (member == members_.end()) return;
  if (!member->second.left) {
    log("rank " + std::to_string(member->second.rank) + " of group '" + member->second.group + "' is gone: " + why);
  }
  const auto group = groups_.find(member->second.group);
  group->second.peer_of.erase(member->second.rank);
  members_.erase(member);
  if (group->second.peer_of.empty()) groups_.erase(group);
  num_groups_ = groups_.size();
}

// Sends heartbeats, and drops state that all ranks of a group have passed.
void HelperServer::on_tick() {
  lines_.tick();
  FrameHeader beat;
  beat.type = FrameType::heartbeat;
  for (const auto& [peer, member] : members_) transport_->send(peer, beat, {});
  std::size_t held = 0;
  for (const auto& [name, group] : groups_) held += group.server->held_bytes();
  held_bytes_ = held;
  for (auto& [name, group] : groups_) {
    if (static_cast<int>(group.completed.size()) < group.size) continue;
    std::uint64_t everywhere = ~std::uint64_t{0};
    for (const auto& [rank, completed] : group.completed) everywhere = std::min(everywhere, completed);
    group.server->forget_below(everywhere);
  }
}

}  // namespace shoal
