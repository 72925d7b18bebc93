// One rank's membership in a group of ranks that run collectives together. A process may have any number of engines,
// which share its connections.
//
// Three threads meet here. Callers submit and wait: OpTable numbers and ends operations. The network thread runs the
// protocol: ChunkPath moves chunks, FlowControl decides which goes next, Router where it goes, Messages transfers data
// between two ranks, Liveness watches the peers, MismatchDetector compares the operations that ranks issue. Where several
// ranks share the host, HostStage reduces inside it, on its own thread or on that of a caller that waits.
#pragma once

#include <unistd.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/chunk_path.h"
#include "engine/completer.h"
#include "engine/host_stage.h"
#include "engine/messages.h"
#include "transport/connections.h"

namespace shoal {

class Engine : private ChannelEvents, public std::enable_shared_from_this<Engine> {
 public:
  // Starts listening. Throws std::runtime_error if it cannot, std::invalid_argument for an option out of range.
  explicit Engine(EngineOptions options);
  ~Engine() override;

  int port() const { return channel_->port(); }
  const PublicKey& public_key() const { return channel_->public_key(); }

  // Connects to all peers. Throws std::runtime_error with the missing peer and the reason.
  void connect(std::vector<PeerInfo> peers, std::vector<HelperInfo> helpers, std::vector<int> pattern,
               const std::string& segment, double timeout_s);

  // Sets the servers of later operations' chunks. All ranks call it between the same two operations.
  void set_pattern(std::vector<int> pattern);

  // Begins an operation and returns its number. Never waits for peers. Throws GroupError once the group has failed,
  // std::invalid_argument for an invalid operation, OrderError as Completer::begin().
  std::uint64_t submit(OpSpec spec);
  // Begins all operations, in this order, or throws and begins none. Those that pass through the network thread reach
  // it together, so that their chunks share frames' system calls.
  std::vector<std::uint64_t> submit_all(std::vector<OpSpec> specs);
  void finish_delegated(std::uint64_t seq);

  // Returns whether the operation has completed within `timeout_s` (negative: no limit). Throws GroupError if it
  // failed.
  bool wait(std::uint64_t seq, double timeout_s);
  bool is_done(std::uint64_t seq);

  // Calls `then` once the operation has ended, at once if it has: on the thread that ends it, and without a lock.
  void on_end(std::uint64_t seq, std::function<void()> then);
  // Calls `then` once the operation has ended, or this rank leaves the group: on a thread of the Completer, in the order
  // of the operations. It may submit operations and wait for any, keeps the engine alive, and does not throw.
  void then(std::uint64_t seq, std::function<void()> then) { completer_.add(seq, std::move(then)); }

  // Collectives that this rank has begun; messages do not count.
  std::uint64_t num_submitted() const { return ops_.num_submitted(); }

  std::string error() { return ops_.error(); }
  void abort(const std::string& reason);
  void close();

  std::map<std::string, std::uint64_t> counters();
  void trace(bool on) { journal_.trace(on); }
  std::vector<TraceEvent> take_trace() { return journal_.take_trace(); }
  std::vector<std::string> take_events() { return journal_.take_events(); }
  std::vector<ServerTime> server_times() const { return protocol_ ? protocol_->path.server_times() : std::vector<ServerTime>{}; }
  std::vector<std::string> lost_helpers();  // names, in the order of the losses
  std::vector<int> lost_ranks();            // of this group, also after it has failed

  // Throws std::invalid_argument if an operation on weights has no server here that could keep them, or is none.
  void require_servers(const OpSpec& spec) const;

 private:
  using Clock = std::chrono::steady_clock;

  // The protocol of a connected group: what lives on the network thread.
  struct Protocol {
    Protocol(Engine& engine);

    Mailbox mailbox;
    Router router;
    Liveness liveness;
    MismatchDetector mismatch;
    ChunkPath path;
    Messages messages;
  };

  // ChannelEvents
  std::string on_join(int peer, const Identity& who) override;
  std::shared_ptr<std::byte> place_for(int peer, const FrameHeader& header) override;
  void on_frame(int peer, const FrameHeader& header, Payload payload) override;
  void on_down(int peer, const std::string& why) override;
  void on_tick() override;
  void on_error(const std::string& what) override;

  // connect.cc
  void join_group();
  bool meets(int server) const;
  void call_all(Clock::time_point until);
  void call(int server, Clock::time_point until, const std::atomic<bool>& stopped);
  void await_all(Clock::time_point until, double timeout_s);
  void open_stage(const std::string& segment, double timeout_s);

  // Runs a step of the protocol, or nothing once the group has failed, and turns its errors into that failure.
  template <class Step>
  void guarded(const Step& step) REQUIRES(network_thread);
  void post(std::function<void()> step);  // guarded, on the network thread
  void dispatch(int peer, const FrameHeader& header, Payload payload) REQUIRES(network_thread);
  void replace_silent_helpers() REQUIRES(network_thread);
  void lose_helper(int server, const std::string& why, bool tell) REQUIRES(network_thread);
  void note_lost(int peer) REQUIRES(network_thread);
  void linger();
  bool is_needed() REQUIRES(network_thread);
  void fail(const std::string& cause) REQUIRES(network_thread);

  void require_possible(const OpSpec& spec) const;
  void await_callbacks(const std::vector<OpSpec>& specs);
  bool has_ended(std::uint64_t seq, double timeout_s);
  OpPtr make_op(OpSpec spec) REQUIRES(submit_mutex_);
  void begin(const OpPtr& op, std::vector<std::function<void()>>& steps) REQUIRES(submit_mutex_);
  std::string with_pending(const std::string& cause);
  HostStage* stage();
  std::function<void(const Op&, std::uint64_t index)> finish_on_host();

  const int pid_ = static_cast<int>(getpid());
  const EngineOptions options_;
  OpTable ops_;
  Journal journal_;
  BufferPool pool_;
  std::string identity_;  // the group's name, made unique; set by connect(), as are the next three
  Members members_;
  std::unique_ptr<Topology> topology_;
  std::unique_ptr<Protocol> protocol_;
  std::atomic<bool> started_{false};
  std::atomic<bool> met_{false};  // connected to all
  std::atomic<bool> keeps_weights_{false};  // the servers keep weights of this group
  std::atomic<bool> keeps_single_{false};   // and of some there is no copy

  Mutex submit_mutex_;  // one caller at a time: operations reach the host stage and the transport in their order
  FusedBuffer fused_ GUARDED_BY(submit_mutex_);
  Mutex mutex_;
  std::unique_ptr<HostStage> stage_ GUARDED_BY(mutex_);
  std::vector<std::string> lost_helpers_ GUARDED_BY(mutex_);
  std::vector<int> lost_ranks_ GUARDED_BY(mutex_);
  bool failed_ GUARDED_BY(network_thread) = false;

  std::shared_ptr<Channel> channel_;
  Completer completer_;
};

}  // namespace shoal
