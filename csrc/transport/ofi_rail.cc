#include "transport/ofi_rail.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include <rdma/fi_cm.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>

namespace shoal {

namespace {

constexpr std::size_t kReceiveBytes = 4 << 20;  // receives posted: bytes,
constexpr std::size_t kLeastReceives = 16;      // and minimum number of messages
constexpr std::size_t kSlabSlots = 16;
constexpr std::size_t kQueueEntries = 1024;
constexpr std::size_t kMaxAddress = 256;
constexpr std::size_t kReadAtOnce = 32;

const Libfabric& require_libfabric() {
  std::string problem;
  const Libfabric* library = find_libfabric(problem);
  if (!library) throw std::runtime_error("libfabric cannot be loaded: " + problem);
  return *library;
}

}  // namespace

Rail::Rail(const std::string& provider, const std::string& address, std::size_t message_bytes)
    : library_(require_libfabric()),
      provider_(provider),
      message_bytes_(message_bytes),
      info_(offer_of(library_, provider, address)) {
  const auto require = [&](long result, const char* what) {
    require_success(library_, result, "libfabric's provider " + provider_ + ", " + what);
  };
  if (info_->ep_attr->max_msg_size < message_bytes_) {
    throw std::runtime_error("libfabric's provider " + provider_ + " carries " +
                             std::to_string(info_->ep_attr->max_msg_size) + " bytes per message; chunks need " +
                             std::to_string(message_bytes_));
  }
  fid_fabric* fabric = nullptr;
  require(library_.fabric(info_->fabric_attr, &fabric, nullptr), "fi_fabric");
  fabric_.reset(fabric);
  fid_domain* domain = nullptr;
  require(fi_domain(fabric, info_.get(), &domain, nullptr), "fi_domain");
  domain_.reset(domain);
  fi_av_attr table{};
  table.type = info_->domain_attr->av_type;
  fid_av* peers = nullptr;
  require(fi_av_open(domain, &table, &peers, nullptr), "fi_av_open");
  peers_.reset(peers);
  open_queue();
  fid_ep* endpoint = nullptr;
  require(fi_endpoint(domain, info_.get(), &endpoint, nullptr), "fi_endpoint");
  endpoint_.reset(endpoint);
  require(fi_ep_bind(endpoint, &peers->fid, 0), "fi_ep_bind");
  require(fi_ep_bind(endpoint, &queue_->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
  require(fi_enable(endpoint), "fi_enable");
  const std::size_t num_receives = std::max(kReceiveBytes / message_bytes_, kLeastReceives);
  Slab& receives = add_slab(std::min(num_receives, std::max<std::size_t>(info_->rx_attr->size, 1)), true);
  for (Slot& slot : receives.slots) receive_again(&slot);
}

// Opens a completion queue that wakes a sleeping thread if the provider has one, else one that must be polled.
void Rail::open_queue() {
  fi_cq_attr attributes{};
  attributes.size = kQueueEntries;
  attributes.format = FI_CQ_FORMAT_MSG;
  attributes.wait_obj = FI_WAIT_FD;
  fid_cq* queue = nullptr;
  if (fi_cq_open(domain_.get(), &attributes, &queue, nullptr) < 0) {
    attributes.wait_obj = FI_WAIT_NONE;
    require_success(library_, fi_cq_open(domain_.get(), &attributes, &queue, nullptr), provider_ + ", fi_cq_open");
  }
  queue_.reset(queue);
  if (attributes.wait_obj == FI_WAIT_FD && fi_control(&queue->fid, FI_GETWAIT, &wait_fd_) < 0) wait_fd_ = -1;
}

Rail::Slab& Rail::add_slab(std::size_t num_slots, bool receives) {
  const std::size_t bytes = num_slots * message_bytes_;
  Slab slab{std::unique_ptr<std::byte[]>(new std::byte[bytes]), std::vector<Slot>(num_slots), nullptr};
  void* descriptor = nullptr;
  if (info_->domain_attr->mr_mode & FI_MR_LOCAL) {
    fid_mr* registration = nullptr;
    const auto access = static_cast<std::uint64_t>(receives ? FI_RECV : FI_SEND);
    require_success(library_, fi_mr_reg(domain_.get(), slab.memory.get(), bytes, access, 0, slabs_.size(), 0, &registration, nullptr),
                    provider_ + ", registering " + std::to_string(bytes) + " bytes");
    slab.registration.reset(registration);
    descriptor = fi_mr_desc(registration);
  }
  for (std::size_t k = 0; k < num_slots; ++k) {
    slab.slots[k] = {{}, slab.memory.get() + k * message_bytes_, descriptor, receives, -1, 0};
  }
  slabs_.push_back(std::move(slab));
  return slabs_.back();
}

Bytes Rail::address() const {
  Bytes name(kMaxAddress);
  std::size_t size = name.size();
  require_success(library_, fi_getname(&endpoint_->fid, name.data(), &size), provider_ + ", fi_getname");
  name.resize(size);
  return name;
}

fi_addr_t Rail::insert(const Bytes& address) {
  fi_addr_t inserted = FI_ADDR_UNSPEC;
  if (fi_av_insert(peers_.get(), address.data(), 1, &inserted, 0, nullptr) != 1) {
    throw std::runtime_error(provider_ + " does not accept such an address");
  }
  return inserted;
}

Rail::Slot* Rail::take() {
  if (free_.empty()) {
    for (Slot& slot : add_slab(kSlabSlots, false).slots) free_.push_back(&slot);
  }
  Slot* const slot = free_.back();
  free_.pop_back();
  return slot;
}

bool Rail::post(Slot* slot, fi_addr_t to, std::size_t bytes) {
  const long result = fi_send(endpoint_.get(), slot->data, bytes, slot->descriptor, to, &slot->context);
  if (result == -FI_EAGAIN) return false;
  require_success(library_, result, provider_);
  return true;
}

void Rail::receive_again(Slot* slot) {
  const long result = fi_recv(endpoint_.get(), slot->data, message_bytes_, slot->descriptor, FI_ADDR_UNSPEC, &slot->context);
  if (result == -FI_EAGAIN) to_receive_.push_back(slot);
  else require_success(library_, result, provider_ + ", fi_recv");
}

void Rail::read(std::vector<Completion>& ended) {
  std::array<fi_cq_msg_entry, kReadAtOnce> entries;
  long count = fi_cq_read(queue_.get(), entries.data(), entries.size());
  if (count == -FI_EAVAIL) {
    fi_cq_err_entry error{};
    if (fi_cq_readerr(queue_.get(), &error, 0) > 0 && error.op_context) {
      ended.push_back({static_cast<Slot*>(error.op_context), 0, provider_ + ": " + library_.strerror(error.err)});
    }
  } else if (count != -FI_EAGAIN) {
    require_success(library_, count, provider_ + ", fi_cq_read");
  }
  for (long k = 0; k < count; ++k) {
    const fi_cq_msg_entry& entry = entries[static_cast<std::size_t>(k)];
    ended.push_back({static_cast<Slot*>(entry.op_context), entry.len, ""});
  }
  for (Slot* slot : std::exchange(to_receive_, {})) receive_again(slot);
}

bool Rail::may_sleep() {
  fid* const queue = &queue_->fid;
  fid* waits[1] = {queue};
  return to_receive_.empty() && fi_trywait(fabric_.get(), waits, 1) == 0;
}

}  // namespace shoal
