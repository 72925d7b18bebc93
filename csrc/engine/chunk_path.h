// The path of a chunk: from the tensor to its server, and the result back. On the network thread.
//
//   push()     the chunk's contribution is ready: queue it            (begin(), or the host stage)
//   send       when flow control lets it: to another server, or to this rank's own
//   answer()   this rank's server has reduced a chunk: results to those that need them
//   deliver()  a result, or the confirmation of a contribution: copy it out, and the chunk is done
//
// Every step may throw GroupFailure, or ProtocolError for what a peer has sent.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include "engine/flow_control.h"
#include "engine/mismatch_detector.h"

namespace shoal {

// Chunks that a server of another host has answered, and the nanoseconds from sending to result, of all of them together.
struct ServerTime {
  std::uint64_t chunks = 0, ns = 0;
};

class ChunkPath {
 public:
  struct Parts {
    const EngineOptions& options;
    const Members& members;
    const Topology& topology;
    Router& router;
    OpTable& ops;
    Mailbox& mailbox;
    Liveness& liveness;
    MismatchDetector& mismatch;
    Journal& journal;
    BufferPool& pool;
    // Continues a chunk on the host stage once its result is there; none: the rank is alone on its host.
    std::function<void(const Op&, std::uint64_t index)> finish_on_host;
    // Runs a step of the protocol later on this thread.
    std::function<void(std::function<void()>)> post;
  };

  explicit ChunkPath(Parts parts);

  // Begins an operation on a rank that is alone on its host. Elsewhere the host stage calls push() and expect().
  void begin(const OpPtr& op) REQUIRES(network_thread);
  // The contribution to a chunk that this rank owns on its host; the result goes to `destination`, if any.
  void push(const OpPtr& op, std::uint64_t index, Payload data, Element input, std::byte* destination)
      REQUIRES(network_thread);
  // The result of a chunk to which this rank contributes nothing goes to `destination`.
  void expect(const OpPtr& op, std::uint64_t index, std::byte* destination) REQUIRES(network_thread);

  void on_push(int peer, const FrameHeader& header, Payload payload) REQUIRES(network_thread);
  void on_supply(int peer, const FrameHeader& header, Payload payload) REQUIRES(network_thread);
  void on_copy(int peer, const FrameHeader& header, Payload payload) REQUIRES(network_thread);
  void deliver(int peer, const FrameHeader& header, Payload payload) REQUIRES(network_thread);
  // Returns where a result that begins to arrive goes, or null if it has to pass through a buffer.
  std::shared_ptr<std::byte> place_for(int peer, const FrameHeader& header) REQUIRES(network_thread);
  void on_order(int peer, const FrameHeader& header) REQUIRES(network_thread);

  // The rank has begun further operations: sends it the results that were withheld.
  void on_begun(int rank) REQUIRES(network_thread) {
    if (withheld_[static_cast<std::size_t>(rank)].any()) resume(rank);
  }
  // On shutdown: sends all withheld results.
  void send_withheld() REQUIRES(network_thread);
  // A helper is lost: its chunks go to stand-ins.
  void reroute(int server) REQUIRES(network_thread);

  void forget_below(std::uint64_t seq) REQUIRES(network_thread);
  void clear() REQUIRES(network_thread);
  std::size_t held_bytes() const { return server_.held_bytes(); }  // any thread
  // Returns, for each server, the chunks of sums that it has answered and the time that they took together. Any thread.
  std::vector<ServerTime> server_times() const;

 private:
  struct EarlyFrame {
    int peer;
    FrameHeader header;
    Payload payload;
  };
  struct Withheld {
    std::size_t sent_bytes = 0;  // of results of operations that the rank has not begun
    std::deque<std::pair<FrameHeader, Payload>> results;

    bool any() const { return sent_bytes || !results.empty(); }
  };

  void pump() REQUIRES(network_thread);
  void resume(int rank) REQUIRES(network_thread);
  void send_contribution(const OpPtr& op, std::uint64_t index) REQUIRES(network_thread);
  int route(const Op& op, std::uint64_t index, int server) const REQUIRES(network_thread);
  FrameHeader header_of(const Op& op, std::uint64_t index, FrameType type) const;
  void check_sender(int peer, const FrameHeader& header) const;
  void check_push(int peer, const FrameHeader& header, std::size_t bytes) REQUIRES(network_thread);
  std::string refusal_of(const Op& op, const FrameHeader& header) const;
  [[noreturn]] void refuse_result(int peer, const FrameHeader& header, const std::string& what) const;
  void answer(int peer, const FrameHeader& header, const Payload& payload) REQUIRES(network_thread);
  void forward(int peer, const FrameHeader& header, const Payload& payload) REQUIRES(network_thread);
  void send_result(int peer, FrameHeader header, const Payload& payload) REQUIRES(network_thread);
  void replay_early(std::uint64_t seq) REQUIRES(network_thread);
  void check_result(int peer, const FrameHeader& header, const Op& op, std::size_t bytes) REQUIRES(network_thread);
  void finish(const OpPtr& op, std::uint64_t index, Payload payload) REQUIRES(network_thread);
  std::shared_ptr<std::byte> place_for_sum(const OpPtr& op, std::uint64_t index) const;
  void reroute(int server, const OpPtr& op) REQUIRES(network_thread);

  struct Answered {
    std::atomic<std::uint64_t> chunks{0}, ns{0};
  };

  Parts with_;
  const int me_;
  std::vector<Answered> answered_;  // by server
  FlowControl flow_;
  WeightBudget budget_;
  SumServer server_;
  bool pumping_ GUARDED_BY(network_thread) = false;
  std::vector<Withheld> withheld_ GUARDED_BY(network_thread);  // by rank
  std::map<std::uint64_t, std::vector<EarlyFrame>> early_ GUARDED_BY(network_thread);  // results that came too soon
  std::map<std::uint64_t, OpPtr> retained_ GUARDED_BY(network_thread);  // with results of helpers
};

}  // namespace shoal
