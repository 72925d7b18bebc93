#include "transport/open.h"

#include <stdexcept>
#include <utility>

#ifdef SHOAL_HAS_LIBFABRIC
#include "transport/libfabric.h"
#include "transport/ofi.h"
#endif

namespace shoal {

#ifdef SHOAL_HAS_LIBFABRIC

std::unique_ptr<Transport> open_transport(TransportOptions options, Sink& sink) {
  if (options.fabric.empty()) return std::make_unique<TcpTransport>(std::move(options.tcp), sink);
  if (options.tcp.protection == Protection::encrypt) {
    throw std::runtime_error("transport ofi:" + options.fabric + " does not encrypt what it carries; use transport tcp");
  }
  return std::make_unique<OfiTransport>(std::move(options), sink);
}

FabricState look_at_fabric(const std::string& address) {
  FabricState state;
  state.built = true;
  const Libfabric* library = find_libfabric(state.problem);
  if (!library) return state;
  state.version = version_of(*library);
  for (const std::string& name : provider_names(*library)) state.providers.push_back({name, try_rail(name, address)});
  return state;
}

#else

std::unique_ptr<Transport> open_transport(TransportOptions options, Sink& sink) {
  if (options.fabric.empty()) return std::make_unique<TcpTransport>(std::move(options.tcp), sink);
  throw std::runtime_error("transport ofi:" + options.fabric +
                           ": this shoal was built where libfabric's headers were not found; install them "
                           "(libfabric-dev) and build it again, or use transport tcp");
}

FabricState look_at_fabric(const std::string&) { return {}; }

#endif

}  // namespace shoal
