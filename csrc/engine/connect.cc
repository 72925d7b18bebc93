// How an engine meets its group: connections to every peer and helper, then the host's shared memory.
#include <algorithm>
#include <stdexcept>

#include "base/clock.h"
#include "engine/engine.h"

namespace shoal {

namespace {

constexpr double kSliceS = 0.25;
constexpr double kHelperS = 30.0;  // helpers are started before workers

}  // namespace

void Engine::connect(std::vector<PeerInfo> peers, std::vector<HelperInfo> helpers, std::vector<int> pattern,
                     const std::string& segment, double timeout_s) {
  std::vector<std::string> hosts;
  for (const PeerInfo& peer : peers) hosts.push_back(peer.host);
  topology_ = std::make_unique<Topology>(options_.rank, std::move(hosts), static_cast<int>(helpers.size()), std::move(pattern));
  // Unique, because a helper may still hold connections of an earlier job whose group had the same name.
  identity_ = (segment + " " + options_.group).substr(0, kMaxGroupName);
  members_ = {options_.group, options_.rank, std::move(peers), std::move(helpers)};
  protocol_ = std::make_unique<Protocol>(*this);
  transport_->start();
  started_ = true;

  const auto until = Clock::now() + seconds(timeout_s);
  const bool fabric = !options_.fabric.empty();
  std::vector<std::size_t> wanted(static_cast<std::size_t>(members_.num_servers()));
  for (int server = 0; server < members_.num_servers(); ++server) {
    if (server == options_.rank) continue;
    std::size_t& connections = wanted[static_cast<std::size_t>(server)];
    if (members_.is_helper(server)) {
      const HelperInfo& helper = members_.helper(server);
      meet(server, helper.address, helper.port, options_.connections_per_peer, true, until);
      connections = static_cast<std::size_t>(1 + options_.connections_per_peer);
      continue;
    }
    const PeerInfo& peer = members_.peer(server);
    const bool same_host = topology_->host_of(server) == topology_->my_host();
    const int num_data = same_host || fabric ? 0 : options_.connections_per_peer;
    meet(server, peer.address, peer.port, num_data, server < options_.rank, until);
    connections = static_cast<std::size_t>(1 + num_data + (fabric ? 1 : 0));  // fabric addresses count as one
  }
  await_all(wanted, until, timeout_s);
  if (topology_->my_locals().size() > 1) open_stage(segment, timeout_s);
  ops_.open();
}

// Tells the transport where a server is and, for those that this rank calls, connects: once for control, and
// `num_data` times for data. Throws std::runtime_error with the server and the reason.
void Engine::meet(int server, const std::string& address, int port, int num_data, bool call, Clock::time_point until) {
  transport_->set_peer(server, address, port);
  if (!call) return;
  Introduction me{{identity_, options_.rank, options_.size, topology_->my_host(), topology_->num_hosts()}, true};
  for (int k = 0; k < 1 + num_data; ++k) {
    me.control = k == 0;
    const double left_s = std::chrono::duration<double>(until - Clock::now()).count();
    try {
      transport_->call_peer(server, me, members_.is_helper(server) ? std::min(left_s, kHelperS) : left_s);
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(members_.name_of(server) + ": " + error.what());
    }
  }
}

// Waits for the connections of each peer. Throws std::runtime_error with the missing peers.
void Engine::await_all(const std::vector<std::size_t>& wanted, Clock::time_point until, double timeout_s) {
  while (!transport_->wait_for_connections(wanted, kSliceS)) {
    if (const std::string why = error(); !why.empty()) throw std::runtime_error(why);
    if (Clock::now() < until) continue;
    std::string missing;
    for (std::size_t peer = 0; peer < wanted.size(); ++peer) {
      if (transport_->connections_of(static_cast<int>(peer)) >= wanted[peer]) continue;
      missing += (missing.empty() ? "" : ", ") + members_.name_of(static_cast<int>(peer));
    }
    const auto strangers = transport_->counters().at("strangers_dropped");
    throw std::runtime_error(missing + " did not connect to " + members_.name_of(options_.rank) + " within " +
                             std::to_string(static_cast<int>(timeout_s)) + " s" +
                             (strangers ? "; rejected connections: " + std::to_string(strangers) +
                                              " (do all ranks have the same secret?)"
                                        : ""));
  }
}

int Engine::on_identity(const Identity& who, std::string& why_not) {
  const bool of_group = who.group == identity_ && who.size == options_.size && who.num_hosts == topology_->num_hosts();
  if (of_group && who.rank > options_.rank && who.rank < who.size && who.host == topology_->host_of(who.rank)) {
    return who.rank;
  }
  why_not = "it is rank " + std::to_string(who.rank) + " of group '" + who.group + "', not of '" + options_.group + "'";
  return -1;
}

// Opens the shared memory of the ranks of this host. Its calls come from the stage's thread or a waiting caller's.
void Engine::open_stage(const std::string& segment, double timeout_s) {
  StageHooks hooks;
  hooks.push = [this](const OpPtr& op, std::uint64_t index, const std::byte* data, Element input, std::byte* to) {
    ops_.hold(*op);
    const std::size_t bytes = op->chunks[index].count * size_of(input);
    post([=, this]() SHOAL_NO_ANALYSIS { protocol_->path.push(op, index, {data, bytes, nullptr, 0, false}, input, to); });
  };
  hooks.expect = [this](const OpPtr& op, std::uint64_t index, std::byte* to) {
    ops_.hold(*op);
    post([=, this]() SHOAL_NO_ANALYSIS { protocol_->path.expect(op, index, to); });
  };
  hooks.done = [this](const OpPtr& op) { ops_.release(op); };
  hooks.report_mismatch = [this](std::uint64_t seq, int rank, std::uint64_t signature) {
    post([=, this]() SHOAL_NO_ANALYSIS { protocol_->mismatch.suspect(seq, rank, signature); });
  };
  hooks.error = [this](const std::string& what) {
    transport_->post([=, this] { on_error(what); });
  };
  hooks.trace = [this](const char* what, std::uint64_t begin, std::uint64_t seq, std::uint64_t chunk) {
    journal_.traced(what, begin, seq, chunk);
  };
  auto stage = std::make_unique<HostStage>(*topology_, segment + "-" + std::to_string(topology_->my_host()),
                                           options_, timeout_s, std::move(hooks));
  const MutexLock lock(mutex_);  // the transport's thread already runs, and a peer may have failed
  stage_ = std::move(stage);
}

}  // namespace shoal
