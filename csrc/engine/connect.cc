// Connects an engine to its group: connections to every peer and helper, then the host's shared memory.
#include <algorithm>
#include <exception>
#include <stdexcept>
#include <thread>

#include "base/clock.h"
#include "engine/engine.h"
#include "transport/address.h"

namespace shoal {

namespace {

constexpr double kSliceS = 0.25;
constexpr int kCallers = 8;  // calls of a rank at the same time: each waits for another process most of its time

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
  join_group();
  started_ = true;

  const auto until = Clock::now() + seconds(timeout_s);
  try {
    call_all(until);
    await_all(until, timeout_s);
  } catch (const std::runtime_error& error) {  // those that are no neighbours of who is missing have met all of theirs
    abort(error.what());
    throw;
  }
  if (topology_->my_locals().size() > 1) open_stage(segment, timeout_s);
  met_ = true;
  ops_.open();
}

// Whether a server is connected from the beginning: a helper, or a neighbour. Others are with the first message between
// them, or what a helper leaves when it is lost.
bool Engine::meets(int server) const {
  return members_.is_helper(server) || topology_->are_neighbours(options_.rank, server);
}

// Opens the channel to the others: between hosts with connections for data, unless libfabric carries it.
void Engine::join_group() {
  const std::size_t mine = addresses_of(options_.address).size();
  std::vector<Channel::Member> members;
  for (int server = 0; server < members_.num_servers(); ++server) {
    const bool helper = members_.is_helper(server);
    const bool same_host = !helper && topology_->host_of(server) == topology_->my_host();
    const bool fabric = !helper && !options_.fabric.empty();
    const std::size_t paths = helper ? 1 : std::min(mine, addresses_of(members_.peer(server).address).size());
    const int most = same_host || fabric ? 0 : options_.connections_per_peer * static_cast<int>(paths);
    members.push_back({helper ? members_.helper(server).place() : members_.peer(server).place(), meets(server) ? most : 0, most, !meets(server)});
  }
  std::string marks;
  for (const PeerInfo& peer : members_.peers) marks += is_known(peer.key) ? mark_of(peer.key) : "";
  if (marks.size() < kMarkBytes * members_.peers.size()) marks.clear();
  const Identity me{identity_, options_.rank, options_.size, topology_->my_host(), topology_->num_hosts(), marks};
  channel_->open(me, options_.rank, members, *this);
}

// Connects to all servers that this process calls, to several at once. Each rank begins behind itself, so that not all
// call the same one. Throws std::runtime_error with the first server that was not reached, and the reason.
void Engine::call_all(Clock::time_point until) {
  const int count = members_.num_servers();
  std::atomic<int> next{1};
  std::atomic<bool> stopped{false};
  Mutex mutex;
  std::string problem;
  const auto work = [&] {
    for (int k = next++; k < count && !stopped; k = next++) {
      try {
        if (const int server = (options_.rank + k) % count; meets(server)) call(server, until, stopped);
      } catch (const std::exception& error) {
        const MutexLock lock(mutex);
        if (!stopped.exchange(true)) problem = error.what();
      }
    }
  };
  std::vector<std::thread> others;
  for (int k = 1; k < std::min(kCallers, count - 1); ++k) others.emplace_back(work);
  work();
  for (std::thread& each : others) each.join();
  if (stopped) throw std::runtime_error(problem);
}

// Connects to a server if this process is to. Throws std::runtime_error with the server and the reason.
void Engine::call(int server, Clock::time_point until, const std::atomic<bool>& stopped) {
  const double left_s = std::chrono::duration<double>(until - Clock::now()).count();
  try {
    channel_->call(server, left_s, &stopped);
  } catch (const std::runtime_error& error) {
    throw std::runtime_error(members_.name_of(server) + ": " + error.what());
  }
}

// Waits until every server has joined. Throws std::runtime_error with the missing ones.
void Engine::await_all(Clock::time_point until, double timeout_s) {
  for (std::vector<int> missing; !(missing = channel_->await_members(kSliceS)).empty();) {
    if (const std::string why = error(); !why.empty()) throw std::runtime_error(why);
    if (Clock::now() < until) continue;
    std::string names;
    for (int server : missing) names += (names.empty() ? "" : ", ") + members_.name_of(server);
    const auto strangers = channel_->counters().at("strangers_dropped");
    throw std::runtime_error(names + " did not connect to " + members_.name_of(options_.rank) + " within " +
                             std::to_string(static_cast<int>(timeout_s)) + " s" +
                             (strangers ? "; rejected connections: " + std::to_string(strangers) +
                                              " (do all ranks have the same secret?)"
                                        : ""));
  }
  if (const std::string why = error(); !why.empty()) throw std::runtime_error(why);
}

std::string Engine::on_join(int peer, const Identity& who) {
  const bool expected = who.size == options_.size && who.num_hosts == topology_->num_hosts() &&
                        (members_.is_helper(peer) || (who.rank == peer && who.host == topology_->host_of(peer)));
  if (expected) return "";
  return members_.name_of(options_.rank) + " knows group '" + options_.group + "' otherwise: it takes " +
         members_.name_of(peer) + " not for rank " + std::to_string(who.rank) + " of " + std::to_string(who.size) +
         " on host " + std::to_string(who.host) + " of " + std::to_string(who.num_hosts);
}

// Opens the shared memory of the ranks of this host. Its calls come from the stage's thread or a waiting caller's.
void Engine::open_stage(const std::string& segment, double timeout_s) {
  StageHooks hooks;
  hooks.push = [this](const OpPtr& op, std::uint64_t index, const std::byte* data, Element input, std::byte* to) {
    ops_.hold(*op);
    const std::size_t bytes = op->bytes_of(index) / op->width() * size_of(input);
    post([=, this]() SHOAL_NO_ANALYSIS { protocol_->path.push(op, index, {data, bytes}, input, to); });
  };
  hooks.expect = [this](const OpPtr& op, std::uint64_t index, std::byte* to) {
    ops_.hold(*op);
    post([=, this]() SHOAL_NO_ANALYSIS { protocol_->path.expect(op, index, to); });
  };
  hooks.done = [this](const OpPtr& op) { ops_.release(op); };
  hooks.report_mismatch = [this](std::uint64_t seq, int rank, std::uint64_t signature) {
    post([=, this]() SHOAL_NO_ANALYSIS { protocol_->mismatch.suspect(seq, rank, signature); });
  };
  hooks.report_misfit = [this](const OpPtr& op, int rank, std::size_t bytes, std::size_t expected) {
    post([=, this]() SHOAL_NO_ANALYSIS { protocol_->messages.check_fit(*op, rank, bytes, op->spec.element, expected); });
  };
  hooks.error = [this](const std::string& what) {
    channel_->post([=, this] { on_error(what); });
  };
  hooks.trace = [this](const char* what, std::uint64_t begin, std::uint64_t seq, std::uint64_t chunk) {
    journal_.traced(what, begin, seq, chunk);
  };
  const std::string on_host = segment + "-" + std::to_string(topology_->my_host());
  auto stage = std::make_unique<HostStage>(*topology_, on_host, options_, timeout_s, std::move(hooks));
  const auto slots = std::make_shared<SharedSegment>(on_host + "-messages", topology_->local_index(),
                                                     message_layout(*topology_), timeout_s);
  post([this, slots]() SHOAL_NO_ANALYSIS { protocol_->messages.use(slots); });
  const MutexLock lock(mutex_);  // the network thread already runs, and a peer may have failed
  stage_ = std::move(stage);
}

}  // namespace shoal
