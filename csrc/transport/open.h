// Which transport an engine gets, and what this machine has of them.
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
  std::string fabric;                       // libfabric's providers, one a rail, separated by commas; empty: TCP alone
  std::size_t payload_bytes = 64 << 10;     // the most that a message over libfabric carries; more goes over TCP
  std::uint64_t shuffle = 0;                // for tests: seed of the order in which messages are heard; 0: as they come
};

// Listens at once. Throws std::runtime_error that says what cannot be had and why.
std::unique_ptr<Transport> open_transport(TransportOptions options, Sink& sink);

struct FabricProvider {
  std::string name;
  std::string problem;  // empty: an endpoint could be opened
};

struct FabricState {
  bool built = false;  // into this core
  std::string version;  // of the library; empty: it is not found, and `problem` says why
  std::string problem;
  std::vector<FabricProvider> providers;
};

// Opens an endpoint of each provider on the interface with this address, and closes it again.
FabricState look_at_fabric(const std::string& address);

}  // namespace shoal
