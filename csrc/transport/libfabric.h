// libfabric, loaded when it is first asked for. Its functions are mostly calls through tables of the objects that it
// makes; these few are the symbols themselves.
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

// Null where the library is not found; `problem` then says why.
const Libfabric* find_libfabric(std::string& problem);

std::string version_of(const Libfabric& library);  // "1.17"

struct FreeInfo {
  void operator()(fi_info* info) const;
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

// The best that a provider offers of what a rail needs, bound to the interface with this IPv4 address where the
// provider has such addresses. Throws std::runtime_error that names the provider and the reason.
Info offer_of(const Libfabric& library, const std::string& provider, const std::string& address);

// Providers that offer what a rail needs, best first. They may still fail to open.
std::vector<std::string> provider_names(const Libfabric& library);

// Throws std::runtime_error for a negative `result` of libfabric: `what` it was asked for, and why not.
void require_success(const Libfabric& library, long result, const std::string& what);

}  // namespace shoal
