// An endpoint of a libfabric provider: fixed-size messages in registered memory, to any peer, in any order.
//
// Messages are copied into and out of the rail's own memory. That is 32 KiB which the checksum has just brought into
// the cache; registering callers' tensors would cost more, or need a registration cache, which is incorrect when
// memory is freed and mapped again. And nothing in flight points into memory that may be released.
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
  // Buffer of one message. The provider owns it from post() or the receive until its completion.
  struct Slot {
    fi_context2 context;  // first member: a completion returns its address
    std::byte* data;
    void* descriptor;
    bool receives;
    int peer;
    std::uint64_t number;  // of the messages to this peer
  };

  struct Completion {
    Slot* slot;
    std::size_t bytes;    // of a received message
    std::string problem;  // empty: success
  };

  // Opens the endpoint and posts its receives. Throws std::runtime_error with the provider and the reason.
  Rail(const std::string& provider, const std::string& address, std::size_t message_bytes);

  const std::string& provider() const { return provider_; }
  Bytes address() const;
  fi_addr_t insert(const Bytes& address);  // adds a peer's rail; throws std::runtime_error

  Slot* take();  // for sending; allocates if none is free
  void give_back(Slot* slot) { free_.push_back(slot); }
  // Returns false if the provider is busy. Throws std::runtime_error if the peer is unreachable.
  bool post(Slot* slot, fi_addr_t to, std::size_t bytes);

  // Returns new completions. A received slot goes back with receive_again().
  void read(std::vector<Completion>& ended);
  void receive_again(Slot* slot);

  int wait_fd() const { return wait_fd_; }  // -1: must be polled
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
  // In order of creation; destroyed in reverse.
  Fid<fid_fabric> fabric_;
  Fid<fid_domain> domain_;
  Fid<fid_av> peers_;
  Fid<fid_cq> queue_;
  std::vector<Slab> slabs_;
  Fid<fid_ep> endpoint_;
  std::vector<Slot*> free_;
  std::vector<Slot*> to_receive_;  // the provider's receive queue was full
  int wait_fd_ = -1;
};

}  // namespace shoal
