// One endpoint of one libfabric provider: fixed messages out of registered memory to any peer, in any order.
//
// Messages are copied into the rail's own memory and out of it. That is 32 KiB which the checksum has just brought
// into the cache; registering the caller's tensors would cost more, or need a cache of registrations that goes wrong
// when memory is freed and mapped anew. And nothing that is under way points into memory which is about to go.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <rdma/fabric.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>

#include "transport/handshake.h"
#include "transport/libfabric.h"

namespace shoal {

struct CloseFid {
  template <class T>
  void operator()(T* object) const {
    fi_close(&object->fid);
  }
};
template <class T>
using Fid = std::unique_ptr<T, CloseFid>;

class Rail {
 public:
  // Room for one message. The provider owns it between post() or the receive and its completion.
  struct Slot {
    fi_context2 context;  // first: a completion brings its address
    std::byte* data;
    void* descriptor;
    bool receives;
    int peer;
  };

  struct Completion {
    Slot* slot;
    std::size_t bytes;    // of a message that has come
    std::string problem;  // empty: it went well
  };

  // Opens the endpoint and posts its receives. Throws std::runtime_error that names the provider and the reason.
  Rail(const std::string& provider, const std::string& address, std::size_t message_bytes);

  const std::string& provider() const { return provider_; }
  Bytes address() const;
  fi_addr_t insert(const Bytes& address);  // of a peer's rail; throws std::runtime_error

  Slot* take();  // for sending; makes more where none is free
  void give_back(Slot* slot) { free_.push_back(slot); }
  // False: not now, try again. Throws std::runtime_error where the peer cannot be reached.
  bool post(Slot* slot, fi_addr_t to, std::size_t bytes);

  // What has ended since. A slot that was received into goes back with receive_again().
  void read(std::vector<Completion>& ended);
  void receive_again(Slot* slot);

  int wait_fd() const { return wait_fd_; }  // -1: it must be polled
  bool may_sleep();

 private:
  struct Slab {
    std::unique_ptr<std::byte[]> memory;
    std::vector<Slot> slots;
    Fid<fid_mr> registration;  // closed first
  };

  Slab& add_slab(std::size_t num_slots, bool receives);
  void open_queue();

  const Libfabric& library_;
  std::string provider_;
  std::size_t message_bytes_;
  Info info_;
  // In the order in which they are made; closed in the reverse one.
  Fid<fid_fabric> fabric_;
  Fid<fid_domain> domain_;
  Fid<fid_av> peers_;
  Fid<fid_cq> queue_;
  std::vector<Slab> slabs_;
  Fid<fid_ep> endpoint_;
  std::vector<Slot*> free_;
  std::vector<Slot*> to_receive_;  // the provider took no more receives
  int wait_fd_ = -1;
};

}  // namespace shoal
