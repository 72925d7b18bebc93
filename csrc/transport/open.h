// Construction of a process's transport, and the transports available on this machine.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "transport/tcp.h"
#include "transport/transport.h"

namespace shoal {

struct TransportOptions {
  TcpOptions tcp;
  std::string fabric;                       // libfabric's providers, one per rail, separated by commas; empty: TCP only
  std::size_t payload_bytes = 64 << 10;     // largest payload over libfabric; larger ones use TCP
  std::uint64_t shuffle = 0;                // for tests: seed of a random delivery order; 0: none

  bool operator==(const TransportOptions&) const = default;
};

// Starts listening. Throws std::runtime_error with what is not available and why.
std::unique_ptr<Transport> open_transport(TransportOptions options, Sink& sink);

struct FabricProvider {
  std::string name;
  std::string problem;  // empty: an endpoint was opened
};

struct FabricState {
  bool built = false;  // compiled into this core
  std::string version;  // of the library; empty if not found, with the reason in `problem`
  std::string problem;
  std::vector<FabricProvider> providers;
};

// Opens and closes an endpoint of each provider on the interface with this address.
FabricState look_at_fabric(const std::string& address);

}  // namespace shoal
