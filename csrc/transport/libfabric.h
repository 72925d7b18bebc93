// libfabric, loaded on first use. Most of its functions are calls through tables in its objects; these few are
// symbols.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <rdma/fabric.h>

namespace shoal {

struct Libfabric {
  decltype(&fi_getinfo) getinfo;
  decltype(&fi_freeinfo) freeinfo;
  decltype(&fi_dupinfo) dupinfo;
  decltype(&fi_fabric) fabric;
  decltype(&fi_strerror) strerror;
  decltype(&fi_version) version;
};

// Returns null if the library is not found, with the reason in `problem`.
const Libfabric* find_libfabric(std::string& problem);

std::string version_of(const Libfabric& library);  // "1.17"

struct FreeInfo {
  void operator()(fi_info* info) const;
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

// Returns the best offer of a provider that a rail can use, bound to the interface with this IPv4 address if the
// provider has such addresses. Throws std::runtime_error with the provider and the reason.
Info offer_of(const Libfabric& library, const std::string& provider, const std::string& address);

// Returns the providers that a rail can use, best first. They may still fail to open.
std::vector<std::string> provider_names(const Libfabric& library);

// Throws std::runtime_error for a negative `result` of libfabric; `what` names the request.
void require_success(const Libfabric& library, long result, const std::string& what);

}  // namespace shoal
