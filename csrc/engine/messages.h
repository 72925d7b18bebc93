// Messages between two ranks: send and recv, and what consists of them: all_to_all, gather and scatter, but for groups on
// one host (block_exchange.h). On the network thread.
//
//   offer    the sender opens message number n of its stream to the receiver. A small one is in the offer, within
//            the bytes that a rank may send unasked; `room` gives them back
//   accept   the receiver has posted a receive for a larger one
//   part     the sender sends it in parts: between hosts in frames, inside a host through slots of shared memory,
//            whose headers go as frames; `room` gives a slot back
//
// A message belongs to an operation, by its number, or to a tag. Offers may overtake each other on the way; they are
// considered in the order of their numbers, so that messages of one tag arrive in order.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "engine/journal.h"
#include "engine/mismatch_detector.h"
#include "engine/options.h"
#include "engine/topology.h"
#include "transport/shm.h"

namespace shoal {

// Throws std::invalid_argument for an operation by messages whose peer or blocks are not possible.
void require_blocks(const OpSpec& spec, int rank, int size);
// Copies what this rank gives to itself.
void copy_own_block(const OpSpec& spec, int rank);
// Of the slots for messages inside a host; the same on all its ranks.
ShmLayout message_layout(const Topology& topology);

class Messages {
 public:
  struct Parts {
    const EngineOptions& options;
    const Members& members;
    const Topology& topology;
    OpTable& ops;
    Mailbox& mailbox;
    MismatchDetector& mismatch;
    Journal& journal;
    // Runs a step of the protocol later on this thread.
    std::function<void(std::function<void()>)> post;
  };

  explicit Messages(Parts parts);

  // Messages to ranks of this host go through these slots.
  void use(std::shared_ptr<SharedSegment> slots) REQUIRES(network_thread);

  void begin(const OpPtr& op) REQUIRES(network_thread);

  // All throw ProtocolError for what no correct peer sends, and GroupFailure for messages that do not fit.
  void on_offer(int peer, const FrameHeader& header, Payload payload) REQUIRES(network_thread);
  void on_accept(int peer, const FrameHeader& header) REQUIRES(network_thread);
  void on_part(int peer, const FrameHeader& header, const Payload& payload) REQUIRES(network_thread);
  void on_room(int peer, const FrameHeader& header) REQUIRES(network_thread);

  // Throws GroupFailure if what rank `peer` sends is not what this rank expects for the operation.
  void check_fit(const Op& op, int peer, std::size_t bytes, Element element, std::size_t expected_bytes) const;

  void clear() REQUIRES(network_thread);

 private:
  struct Offer {
    int peer = -1;
    FrameHeader header;
    Payload payload;
    std::size_t bytes = 0;  // of the message
    bool whole() const { return !header.redo; }
  };
  struct Receive {
    OpPtr op;
    int peer = -1;  // any
    std::byte* data = nullptr;
    std::size_t bytes = 0;
  };
  struct Incoming {  // accepted
    Receive receive;
    std::vector<bool> has;  // by part
    std::size_t num_missing = 0;
  };
  struct Outgoing {  // offered without its data
    OpPtr op;
    const std::byte* data = nullptr;
    std::size_t bytes = 0, num_parts = 0, next_part = 0;
    int num_runs = 0;  // queued in the transport
    bool accepted = false;
  };
  struct Peer {
    std::uint64_t num_offered = 0, num_considered = 0;
    std::size_t unasked_bytes = 0;            // sent, as far as is known not taken
    std::size_t held_bytes = 0;               // received unasked, not taken
    std::size_t taken_bytes = 0;              // not yet given back
    std::map<std::uint64_t, Outgoing> going;  // by number, as are the next two
    std::map<std::uint64_t, Incoming> coming;
    std::map<std::uint64_t, Offer> overtaking;
    std::size_t num_waiting = 0;  // offers in offers_
  };

  bool by_slots(int peer) const REQUIRES(network_thread);
  std::size_t part_bytes(int peer) const REQUIRES(network_thread);
  std::size_t num_parts(int peer, std::size_t bytes) const REQUIRES(network_thread);
  void send(const OpPtr& op, int peer, const std::byte* data, std::uint64_t count) REQUIRES(network_thread);
  void receive(Receive receive) REQUIRES(network_thread);
  void consider(Offer offer) REQUIRES(network_thread);
  bool is_due(const Offer& offer) REQUIRES(network_thread);
  void take(const Offer& offer, Receive receive) REQUIRES(network_thread);
  void received(const Receive& receive, std::uint64_t number) REQUIRES(network_thread);
  void send_runs(int peer, std::uint64_t number) REQUIRES(network_thread);
  void fill_slots() REQUIRES(network_thread);
  Peer& at(int peer) REQUIRES(network_thread) { return peers_[static_cast<std::size_t>(peer)]; }

  const Parts with_;
  const int me_;
  const std::size_t frame_bytes_;  // of a message at most
  std::vector<Peer> peers_ GUARDED_BY(network_thread);
  std::list<Offer> offers_ GUARDED_BY(network_thread);      // that no receive has taken, in their order
  std::list<Receive> receives_ GUARDED_BY(network_thread);  // that no offer has met, in their order

  std::shared_ptr<SharedSegment> slots_ GUARDED_BY(network_thread);
  std::vector<std::uint64_t> free_slots_ GUARDED_BY(network_thread);
  std::vector<int> holder_ GUARDED_BY(network_thread);  // of each slot; -1: nobody
  std::deque<std::pair<int, std::uint64_t>> to_slots_ GUARDED_BY(network_thread);  // peers and messages, by turns
};

}  // namespace shoal
