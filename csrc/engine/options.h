// Settings of an engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "transport/connections.h"

namespace shoal {

struct EngineOptions {
  int rank = 0;
  int size = 1;
  std::string group;
  Bytes secret;
  std::string address = "127.0.0.1";  // several, separated by commas: one per interface
  std::size_t chunk_bytes = 0;                 // largest message between hosts; 0: by operation (Topology::message_bytes)
  std::size_t shared_chunk_bytes = 128 << 10;  // largest chunk inside a host
  std::size_t num_slots = 16;
  std::size_t min_window_bytes = 0;         // flow-control window: minimum, per connection; 0: a message;
  std::size_t window_bytes = 8 << 20;       // maximum, for all servers together;
  double target_rtt_s = 0.01;               // round-trip time to which it adapts
  std::size_t unexpected_bytes = 1 << 20;   // bytes sent to a rank that has not begun the operation
  int connections_per_peer = 1;
  int network_threads = 1;  // that read and write TCP connections
  int send_buffer_bytes = 128 << 10;
  Protection protection = Protection::checksum;  // of frames
  PrivateKey private_key{};   // for tests: of this process; zeros: a new one
  std::string fabric;         // libfabric's providers, one per rail, separated by commas; empty: TCP
  std::uint64_t shuffle = 0;  // for tests: seed of a random delivery order of libfabric's messages; 0: none
  double peer_grace_s = 2.0;
  double straggler_s = 1.0;
  double helper_patience_s = 20.0;  // silence after which a helper's chunks are taken over; 0: never
  bool wide_partials = true;
  bool workers_serve = true;  // ranks take over chunks of lost helpers
  bool share_connections = true;  // with the other groups of this process
  std::optional<std::vector<Place>> returning;  // members that a former group had; see Connections::shared()
  bool ordered_callbacks = false; // operations wait until callbacks of earlier ones have returned
};

// Range of an option, and the number that divides it.
struct OptionRange {
  const char* name;
  std::size_t least, most, unit;
  std::size_t (*value)(const EngineOptions& options);
};
const std::vector<OptionRange>& option_ranges();

// Throws std::invalid_argument with the option, its value and its range.
void require_possible(const EngineOptions& options);

}  // namespace shoal
