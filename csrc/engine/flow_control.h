// Chooses the chunk that this rank sends next, and when: queues of chunks and the windows that bound the bytes in
// flight. On the network thread.
//
// Chunks are sent in the order of the pattern under one window for all servers, which keeps their load balanced at
// any time. Each queue has its own window: with a shared one, the chunks that fill it could wait for an operation
// that another rank begins only after one that is held back here.
#pragma once

#include <cstdint>
#include <optional>

#include "engine/liveness.h"
#include "engine/ordered_outbox.h"
#include "engine/outbox.h"

namespace shoal {

class FlowControl {
 public:
  FlowControl(const EngineOptions& options, const Topology& topology, const Liveness& liveness, Mailbox& mailbox);

  void add(const OpPtr& op, std::uint64_t index) REQUIRES(network_thread);
  // Removes and returns the next chunk, or nothing while the windows are full. Chunks served by this rank need none.
  std::optional<Outgoing> next() REQUIRES(network_thread);

  // The chunk's result has arrived: adapts the window.
  void answered(const Op& op, std::uint64_t index) REQUIRES(network_thread);
  // The chunk is no longer in flight: this rank has become its server.
  void retire(const Op& op, std::uint64_t index) REQUIRES(network_thread);

  // Rank 0 has set the next run of chunks. Throws ProtocolError if another rank has.
  void on_order(int peer, const FrameHeader& header) REQUIRES(network_thread);
  void clear() REQUIRES(network_thread);

 private:
  struct Window {
    double bytes = 0;          // adapts to the round-trip time
    std::size_t answered = 0;  // bytes answered since the last adaptation
  };

  std::size_t room(const Window& window) const REQUIRES(network_thread);
  void set_order() REQUIRES(network_thread);

  const EngineOptions& options_;
  const Liveness& liveness_;
  Mailbox& mailbox_;
  const int num_paths_;            // connections to all servers
  const std::size_t least_bytes_;  // of the window, for each of them
  double min_window_ GUARDED_BY(network_thread) = 0;  // a chunk on each path
  Outbox outbox_ GUARDED_BY(network_thread);
  OrderedOutbox ordered_ GUARDED_BY(network_thread);
  Window window_ GUARDED_BY(network_thread), ordered_window_ GUARDED_BY(network_thread);
  std::uint64_t num_runs_ GUARDED_BY(network_thread) = 0;  // of the priority order, set by rank 0
};

}  // namespace shoal
