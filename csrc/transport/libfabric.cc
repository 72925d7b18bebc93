#include "transport/libfabric.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>

namespace shoal {

namespace {

const std::uint32_t kVersion = FI_VERSION(1, 9);  // of the API, supported by EFA's and Debian's libraries

struct Loaded {
  Libfabric library{};
  std::string problem;
};

// Messages above a buffer of ofi_rxm go by a handshake, behind what is queued for the peer: half the rate of a link. So
// a chunk of 32 KiB with its header fits. Fewer buffers, 64 for each connection, keep an endpoint's memory below 60 MB.
constexpr const char* kRxmBufferBytes = "36864";
constexpr const char* kRxmBuffers = "64";
// Messages that one look at its queue completes. With its own 1, each message costs three signals from one part of the
// library to another through a pair of sockets, and its bytes are fetched alone.
constexpr const char* kRxmMessages = "64";

Loaded load() {
  setenv("FI_OFI_RXM_BUFFER_SIZE", kRxmBufferBytes, 0);
  setenv("FI_OFI_RXM_MSG_RX_SIZE", kRxmBuffers, 0);
  setenv("FI_OFI_RXM_COMP_PER_PROGRESS", kRxmMessages, 0);
  Loaded loaded;
  void* const handle = dlopen("libfabric.so.1", RTLD_NOW | RTLD_LOCAL);  // never closed: its threads may outlive the caller
  if (!handle) {
    loaded.problem = dlerror();
    return loaded;
  }
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (!function) loaded.problem = std::string("libfabric.so.1 has no ") + name;
  };
  find(loaded.library.getinfo, "fi_getinfo");
  find(loaded.library.freeinfo, "fi_freeinfo");
  find(loaded.library.dupinfo, "fi_dupinfo");
  find(loaded.library.fabric, "fi_fabric");
  find(loaded.library.strerror, "fi_strerror");
  find(loaded.library.version, "fi_version");
  return loaded;
}

const Loaded& loaded() {
  static const Loaded once = load();
  return once;
}

// Reliable unordered datagrams to any peer. A completion means that the other end has the message, so that a process
// may exit once it has all of its completions.
Info make_hints(const Libfabric& library, const std::string& provider) {
  Info hints(library.dupinfo(nullptr));
  if (!hints) throw std::bad_alloc();
  hints->caps = FI_MSG;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
  hints->domain_attr->threading = FI_THREAD_DOMAIN;
  hints->domain_attr->control_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  hints->domain_attr->resource_mgmt = FI_RM_ENABLED;
  hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
  if (!provider.empty()) hints->fabric_attr->prov_name = strdup(provider.c_str());
  return hints;
}

Info ask(const Libfabric& library, const std::string& provider, const char* node, long& result) {
  const Info hints = make_hints(library, provider);
  fi_info* found = nullptr;
  result = library.getinfo(kVersion, node, nullptr, node ? FI_SOURCE : 0, hints.get(), &found);
  return Info(result == 0 ? found : nullptr);
}

// Returns the first offer of this provider: a filter "tcp" also matches "tcp;ofi_rxm".
Info exactly(const Libfabric& library, const Info& offers, const std::string& provider) {
  for (const fi_info* each = offers.get(); each; each = each->next) {
    if (each->fabric_attr->prov_name == provider) return Info(library.dupinfo(each));
  }
  return nullptr;
}

}  // namespace

void FreeInfo::operator()(fi_info* info) const { loaded().library.freeinfo(info); }

const Libfabric* find_libfabric(std::string& problem) {
  problem = loaded().problem;
  return problem.empty() ? &loaded().library : nullptr;
}

std::string version_of(const Libfabric& library) {
  const std::uint32_t version = library.version();
  return std::to_string(FI_MAJOR(version)) + "." + std::to_string(FI_MINOR(version));
}

void require_success(const Libfabric& library, long result, const std::string& what) {
  if (result >= 0) return;
  throw std::runtime_error(what + ": " + library.strerror(static_cast<int>(-result)));
}

Info offer_of(const Libfabric& library, const std::string& provider, const std::string& address) {
  const std::string what = "libfabric's provider " + provider;
  long result = 0;
  Info offer = exactly(library, ask(library, provider, nullptr, result), provider);
  if (result == -FI_ENODATA || (result == 0 && !offer)) {
    throw std::runtime_error(what + " is not here or has no reliable datagrams; `shoal doctor` lists what can be used");
  }
  require_success(library, result, what);
  const auto format = offer->addr_format;
  if (format != FI_SOCKADDR && format != FI_SOCKADDR_IN && format != FI_SOCKADDR_IN6) return offer;
  offer = exactly(library, ask(library, provider, address.c_str(), result), provider);
  require_success(library, result, what + " at " + address);
  if (!offer) throw std::runtime_error(what + " cannot be bound to " + address);
  return offer;
}

std::vector<std::string> provider_names(const Libfabric& library) {
  long result = 0;
  const Info all = ask(library, "", nullptr, result);
  std::vector<std::string> names;
  for (const fi_info* each = all.get(); each; each = each->next) {
    const std::string name = each->fabric_attr->prov_name;
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

}  // namespace shoal
