#include "engine/helper.h"

#include <algorithm>
#include <cstdio>
#include <stdexcept>

namespace shoal {

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
  if (who.rank < 0 || who.rank >= who.size || who.group.empty()) {
    why_not = "rank " + std::to_string(who.rank) + " of " + std::to_string(who.size) + " in group '" + who.group + "'";
    return -1;
  }
  Group& group = open_group(who);
  if (group.size != who.size) {
    why_not = "group '" + who.group + "' has " + std::to_string(group.size) + " ranks, not " + std::to_string(who.size);
    return -1;
  }
  const auto [found, fresh] = group.peer_of.try_emplace(who.rank, next_peer_);
  if (fresh) members_[next_peer_++] = {who.group, who.rank};
  return found->second;
}

HelperServer::Group& HelperServer::open_group(const Identity& who) {
  Group& group = groups_[who.group];
  if (group.server) return group;
  group.size = who.size;
  group.server = std::make_unique<SumServer>(
      pool_,
      [this](int peer, const FrameHeader& header, const Payload& payload) { transport_->send(peer, header, payload); },
      [this, name = who.group](std::uint64_t seq) {
        FrameHeader tell;
        tell.type = FrameType::tell;
        tell.seq = seq;
        for (const auto& [rank, peer] : groups_[name].peer_of) transport_->send(peer, tell, {});
      });
  num_groups_ = groups_.size();
  return group;
}

void HelperServer::on_frame(int peer, const FrameHeader& header, Payload payload) {
  const auto member = members_.find(peer);
  if (member == members_.end()) return;
  Group& group = groups_[member->second.group];
  std::string wrong;
  try {
    if (header.type == FrameType::push) wrong = group.server->contribute(peer, header, std::move(payload));
    if (header.type == FrameType::supply) group.server->supply(header, std::move(payload));
  } catch (const std::invalid_argument& error) {
    wrong = error.what();
  }
  num_summed_ = group.server->num_summed();
  if (!wrong.empty()) {
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
    std::fprintf(stderr, "shoal serve: rank %d of group '%s' is gone: %s\n", member->second.rank,
                 member->second.group.c_str(), why.c_str());
  }
  const auto group = groups_.find(member->second.group);
  group->second.peer_of.erase(member->second.rank);
  members_.erase(member);
  if (group->second.peer_of.empty()) groups_.erase(group);
  num_groups_ = groups_.size();
}

// Tells everybody that this process runs, and forgets what all ranks of a group have behind them.
void HelperServer::on_tick() {
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
