// Settings of an engine, and the members of its group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "transport/connections.h"

namespace shoal {

struct EngineOptions {
  int rank = 0;
  int size = 1;
  std::string group;
  Bytes secret;
  std::string address = "127.0.0.1";
  std::size_t chunk_bytes = 0;                 // largest message between hosts; 0: by operation (Topology::message_bytes)
  std::size_t shared_chunk_bytes = 128 << 10;  // largest chunk inside a host
  std::size_t num_slots = 16;
  std::size_t min_window_bytes = 0;         // flow-control window: minimum, per connection; 0: a message;
  std::size_t window_bytes = 8 << 20;       // maximum, for all servers together;
  double target_rtt_s = 0.015;              // round-trip time to which it adapts
  std::size_t unexpected_bytes = 1 << 20;   // bytes sent to a rank that has not begun the operation
  int connections_per_peer = 1;
  int send_buffer_bytes = 128 << 10;
  std::string fabric;         // libfabric's providers, one per rail, separated by commas; empty: TCP
  std::uint64_t shuffle = 0;  // for tests: seed of a random delivery order of libfabric's messages; 0: none
  double peer_grace_s = 2.0;
  double straggler_s = 1.0;
  bool wide_partials = true;
  bool workers_serve = true;  // ranks take over chunks of lost helpers
  bool share_connections = true;  // with the other groups of this process
};

// Throws std::invalid_argument with the option, its value and its range.
void require_possible(const EngineOptions& options);

struct PeerInfo {
  std::string host;
  std::string address;
  int port = 0;
  int global_rank = 0;
  int pid = 0;

  Place place() const { return {address, port, pid}; }
};

struct HelperInfo {
  std::string address;
  int port = 0;
  std::string name;

  Place place() const { return {address, port}; }
};

// The group's ranks and helpers, and their names in messages. Servers are numbered: ranks first, then helpers.
struct Members {
  std::string group;
  int rank = 0;
  std::vector<PeerInfo> peers;      // by rank
  std::vector<HelperInfo> helpers;

  int size() const { return static_cast<int>(peers.size()); }
  int num_servers() const { return static_cast<int>(peers.size() + helpers.size()); }
  bool is_helper(int server) const { return server >= size(); }
  const PeerInfo& peer(int rank_of) const { return peers[static_cast<std::size_t>(rank_of)]; }
  const HelperInfo& helper(int server) const { return helpers[static_cast<std::size_t>(server - size())]; }

  // "rank 3 (10.0.0.4, pid 812)", with the rank in the whole job; "helper h1 (10.0.1.7:4000)".
  std::string name_of(int server) const;
};

}  // namespace shoal
