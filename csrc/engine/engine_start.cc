// Construction, connection and shutdown of an engine, its transport and its host stage.
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

#include "base/clock.h"
#include "engine/engine.h"

namespace shoal {

namespace {

constexpr double kFlushS = 1.0;
constexpr double kSliceS = 0.25;
constexpr double kHelperS = 30.0;  // helpers are started before workers
constexpr std::size_t kSlotsBetweenHosts = 4;               // factor on num_slots: chunks between hosts are smaller
constexpr std::size_t kChunkUnitBytes = 128;                // 16 elements of the widest type
constexpr std::size_t kMaxChunkBytes = kMaxPayload / 2;     // 16-bit elements may be sent as 32-bit ones
constexpr std::size_t kMaxConnections = 64;

}  // namespace

void require_possible(const EngineOptions& options) {
  const auto within = [](const char* name, std::size_t value, std::size_t least, std::size_t most, std::size_t unit) {
    if (least <= value && value <= most && value % unit == 0) return;
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; it is a multiple of " +
                                std::to_string(unit) + " from " + std::to_string(least) + " to " + std::to_string(most));
  };
  within("chunk_bytes", options.chunk_bytes, kChunkUnitBytes, kMaxChunkBytes, kChunkUnitBytes);
  within("shared_chunk_bytes", options.shared_chunk_bytes, kChunkUnitBytes, kMaxChunkBytes, kChunkUnitBytes);
  within("num_slots", options.num_slots, 1, SharedSegment::kSignatures / kSlotsBetweenHosts, 1);
  within("connections_per_peer", static_cast<std::size_t>(options.connections_per_peer), 1, kMaxConnections, 1);
}

Engine::Engine(EngineOptions options) : options_(std::move(options)), records_(kRecords) {
  shoal::require_possible(options_);
  TransportOptions transport;
  transport.tcp.address = options_.address;
  transport.tcp.secret = options_.secret;
  transport.tcp.send_buffer_bytes = options_.send_buffer_bytes;
  transport.tcp.grace_s = options_.peer_grace_s;
  transport.fabric = options_.fabric;
  transport.shuffle = options_.shuffle;
  transport.payload_bytes = std::max(transport.payload_bytes, 2 * options_.chunk_bytes);  // 16-bit elements may be sent as 32-bit ones
  transport_ = open_transport(std::move(transport), *this);
}

Engine::~Engine() {
  if (getpid() != pid_) {  // threads do not survive a fork: nothing to join in the child
    static_cast<void>(stage_.release());
    static_cast<void>(transport_.release());
    return;
  }
  if (transport_) transport_->stop();
  stage_.reset();
  for (PeerState& state : states_) state.deferred.clear();
  transport_.reset();  // releases its queues while the rest of the engine still exists
}

void Engine::connect(std::vector<PeerInfo> peers, std::vector<HelperInfo> helpers, std::vector<int> pattern,
                     const std::string& segment, double timeout_s) {
  std::vector<std::string> hosts;
  for (const PeerInfo& peer : peers) hosts.push_back(peer.host);
  const int num_helpers = static_cast<int>(helpers.size());
  topology_ = std::make_unique<Topology>(options_.rank, std::move(hosts), num_helpers, std::move(pattern));
  // Unique, because a helper may still hold connections of an earlier job whose group had the same name.
  identity_ = (segment + " " + options_.group).substr(0, kMaxGroupName);
  peers_ = std::move(peers);
  helpers_ = std::move(helpers);
  const auto num_servers = static_cast<std::size_t>(options_.size + num_helpers);
  states_.resize(num_servers);
  lost_helpers_.resize(static_cast<std::size_t>(num_helpers));
  for (PeerState& state : states_) state.last_frame_ns = now_ns();
  server_ = std::make_unique<SumServer>(
      pool_, SumServer::Members{topology_->num_hosts(), [this](int rank) { return topology_->host_of(rank); }},
      [this](int peer, const FrameHeader& header, const Payload& payload) { answer(peer, header, payload); },
      [this](const SumServer::Conflict& conflict) { on_conflict(conflict); });
  transport_->start();

  const auto until = Clock::now() + seconds(timeout_s);
  std::vector<std::size_t> wanted(num_servers);
  const auto meet = [&](int index, const std::string& address, int port, int data, bool call) {
    transport_->set_peer(index, address, port);
    wanted[static_cast<std::size_t>(index)] = static_cast<std::size_t>(1 + data);
    if (!call) return;
    Introduction me{{identity_, options_.rank, options_.size, topology_->my_host(), topology_->num_hosts()}, true};
    for (int k = 0; k < 1 + data; ++k) {
      me.control = k == 0;
      try {
        const double left_s = std::chrono::duration<double>(until - Clock::now()).count();
        transport_->call_peer(index, me, topology_->is_helper(index) ? std::min(left_s, kHelperS) : left_s);
      } catch (const std::runtime_error& error) {
        throw std::runtime_error(server_name(index) + ": " + error.what());
      }
    }
  };
  for (int rank = 0; rank < options_.size; ++rank) {
    if (rank == options_.rank) continue;
    const PeerInfo& peer = peers_[static_cast<std::size_t>(rank)];
    const bool same_host = topology_->host_of(rank) == topology_->my_host();
    const int data = same_host || !options_.fabric.empty() ? 0 : options_.connections_per_peer;
    meet(rank, peer.address, peer.port, data, rank < options_.rank);
    if (!options_.fabric.empty()) ++wanted[static_cast<std::size_t>(rank)];  // its fabric addresses
  }
  for (int k = 0; k < num_helpers; ++k) {
    const HelperInfo& helper = helpers_[static_cast<std::size_t>(k)];
    meet(options_.size + k, helper.address, helper.port, options_.connections_per_peer, true);
  }
  await_all(wanted, until, timeout_s);
  open_stage(segment, timeout_s);
}

// Opens the shared memory of the ranks of this host, if there are several.
void Engine::open_stage(const std::string& segment, double timeout_s) {
  const auto num_locals = topology_->my_locals().size();
  if (num_locals < 2) return;
  const bool alone = topology_->num_hosts() == 1;
  ShmLayout layout;
  layout.num_ranks = static_cast<int>(num_locals);
  layout.slot_bytes = alone ? options_.shared_chunk_bytes : options_.chunk_bytes;
  layout.result_bytes = alone ? layout.slot_bytes : 2 * layout.slot_bytes;
  layout.num_slots = alone ? options_.num_slots : kSlotsBetweenHosts * options_.num_slots;
  StageHooks hooks;
  hooks.push = [this](const OpPtr& op, std::uint64_t index, const std::byte* data, Element input, std::byte* to) {
    op->pending.fetch_add(1);
    const std::size_t bytes = op->chunks[index].count * size_of(input);
    transport_->post([=, this] { push(op, index, {data, bytes, nullptr, 0, false}, input, to); });
  };
  hooks.expect = [this](const OpPtr& op, std::uint64_t index, std::byte* to) {
    op->pending.fetch_add(1);
    transport_->post([=, this] { expect(op, index, to); });
  };
  hooks.done = [this](const OpPtr& op) { finished_one(op); };
  hooks.report_mismatch = [this](std::uint64_t seq, int rank, std::uint64_t signature) {
    transport_->post([=, this] { suspect(seq, rank, signature); });
  };
  hooks.error = [this](const std::string& what) { transport_->post([=, this] { on_error(what); }); };
  hooks.trace = [this](const char* what, std::uint64_t begin, std::uint64_t seq, std::uint64_t chunk) {
    traced(what, begin, seq, chunk);
  };
  auto stage = std::make_unique<HostStage>(*topology_, segment + "-" + std::to_string(topology_->my_host()), layout,
                                       options_.wide_partials, timeout_s, std::move(hooks));
  const std::lock_guard lock(mutex_);  // the transport's thread already runs, and a peer may have failed
  stage_ = std::move(stage);
}

int Engine::on_identity(const Identity& who, std::string& why_not) {
  const bool of_group = who.group == identity_ && who.size == options_.size && who.num_hosts == topology_->num_hosts();
  if (of_group && who.rank > options_.rank && who.rank < who.size && who.host == topology_->host_of(who.rank)) {
    return who.rank;
  }
  why_not = "it is rank " + std::to_string(who.rank) + " of group '" + who.group + "', not of '" + options_.group + "'";
  return -1;
}

// Waits for the connections of each peer. Throws std::runtime_error with the missing peers.
void Engine::await_all(const std::vector<std::size_t>& wanted, Clock::time_point until, double timeout_s) {
  while (!transport_->wait_for_connections(wanted, kSliceS)) {
    if (const std::string why = error(); !why.empty()) throw std::runtime_error(why);
    if (Clock::now() < until) continue;
    std::string missing;
    for (std::size_t peer = 0; peer < wanted.size(); ++peer) {
      if (transport_->connections_of(static_cast<int>(peer)) >= wanted[peer]) continue;
      missing += (missing.empty() ? "" : ", ") + server_name(static_cast<int>(peer));
    }
    const auto strangers = transport_->counters().at("strangers_dropped");
    throw std::runtime_error(missing + " did not connect to " + rank_name(options_.rank) + " within " +
                             std::to_string(static_cast<int>(timeout_s)) + " s" +
                             (strangers ? "; rejected connections: " + std::to_string(strangers) +
                                              " (do all ranks have the same secret?)"
                                        : ""));
  }
}

void Engine::close() {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  if (!topology_) return;
  transport_->post([this] {
    send_deferred();
    broadcast(FrameType::goodbye, 0, 0, 0, "");
  });
  transport_->flush(kFlushS);
  if (stage_) stage_->stop();
  transport_->stop();
  const std::lock_guard lock(mutex_);
  if (error_.empty()) error_ = "group '" + options_.group + "' was closed";
  for (const auto& [seq, op] : ops_) {
    failed_ops_.insert(seq);
    if (watched_.erase(seq)) watched_done_.push_back(seq);
  }
  ops_.clear();
  changed_.notify_all();
}

}  // namespace shoal
