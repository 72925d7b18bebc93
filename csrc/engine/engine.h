// One rank's membership in a group of ranks that run collectives together. A process may have any number of engines;
// nothing here is global.
//
// Threads: callers submit and wait. The transport's thread moves chunks, reduces the chunks that this rank serves and
// monitors the peers. Where several ranks share the host, the host stage has its own thread.
#pragma once

#include <unistd.h>

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "engine/host_stage.h"
#include "engine/op.h"
#include "engine/ordered_outbox.h"
#include "engine/outbox.h"
#include "engine/sum_server.h"
#include "engine/topology.h"
#include "transport/open.h"

namespace shoal {

struct EngineOptions {
  int rank = 0;
  int size = 1;
  std::string group;
  Bytes secret;
  std::string address = "127.0.0.1";
  std::size_t chunk_bytes = 32 << 10;         // largest message between hosts
  std::size_t shared_chunk_bytes = 128 << 10;  // largest chunk inside a host
  std::size_t num_slots = 16;
  std::size_t min_window_bytes = 32 << 10;  // flow-control window: minimum, per server;
  std::size_t window_bytes = 8 << 20;         // maximum, for all servers together;
  double target_rtt_s = 0.015;                    // round-trip time to which it adapts
  std::size_t unexpected_bytes = 1 << 20;          // bytes sent to a rank that has not begun the operation
  int connections_per_peer = 1;
  int send_buffer_bytes = 128 << 10;
  std::string fabric;  // libfabric's providers, one per rail, separated by commas; empty: TCP
  std::uint64_t shuffle = 0;  // for tests: seed of a random delivery order of libfabric's messages; 0: none
  double peer_grace_s = 2.0;
  double straggler_s = 1.0;
  bool wide_partials = true;
  bool workers_serve = true;  // ranks take over chunks of lost helpers
};

// Throws std::invalid_argument with the option, its value and its range.
void require_possible(const EngineOptions& options);

struct PeerInfo {
  std::string host;
  std::string address;
  int port = 0;
  int global_rank = 0;
  int pid = 0;
};

struct HelperInfo {
  std::string address;
  int port = 0;
  std::string name;
};

struct TraceEvent {
  std::string what;
  std::uint64_t begin_ns, end_ns, seq, chunk;
};

// The group has failed. The message is meant for users.
class GroupError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Engine : private Sink {
 public:
  // Starts listening. Throws std::runtime_error if it cannot.
  explicit Engine(EngineOptions options);
  ~Engine() override;

  int port() const { return transport_->port(); }

  // Connects to all peers. Throws std::runtime_error with the missing peer and the reason.
  void connect(std::vector<PeerInfo> peers, std::vector<HelperInfo> helpers, std::vector<int> pattern,
               const std::string& segment, double timeout_s);

  // Sets the servers of later operations' chunks. All ranks call it between the same two operations.
  void set_pattern(std::vector<int> pattern);

  // Begins an operation and returns its number. Never waits for peers. Throws GroupError once the group has failed,
  // std::invalid_argument for an invalid operation.
  std::uint64_t submit(OpSpec spec);
  void finish_delegated(std::uint64_t seq);

  // Returns whether the operation has completed within `timeout_s` (negative: no limit). Throws GroupError if it
  // failed.
  bool wait(std::uint64_t seq, double timeout_s);
  bool is_done(std::uint64_t seq);
  void watch(std::uint64_t seq);
  std::vector<std::uint64_t> next_watched(double timeout_s);

  std::string error();
  void abort(const std::string& reason);
  void close();

  std::map<std::string, std::uint64_t> counters();
  void trace(bool on) { tracing_ = on; }
  std::vector<TraceEvent> take_trace();
  std::vector<std::string> take_events();
  std::vector<std::string> lost_helpers();  // names, in the order of the losses

 private:
  using Clock = std::chrono::steady_clock;

  struct PeerState {
    std::uint64_t submitted = 0, completed = 0;
    std::size_t unexpected_bytes = 0;
    std::deque<std::pair<FrameHeader, Payload>> deferred;  // results withheld until it has begun the operation
    bool left = false;
    std::uint64_t last_frame_ns = 0;
  };
  struct Record {  // a recent operation of this rank
    std::uint64_t seq = ~std::uint64_t{0}, signature = 0;
    std::string text;
  };
  struct Announcement {
    int rank;
    std::uint64_t signature;
    std::string text;
  };
  // Flow-control window (bytes in flight). Chunks are sent in the order of the pattern under one window for all
  // servers, which keeps their load balanced at any time.
  struct Window {
    double bytes = 0;          // adapts to the round-trip time
    std::size_t answered = 0;  // bytes answered since the last adaptation
  };
  struct EarlyFrame {
    int peer;
    FrameHeader header;
    Payload payload;
  };
  // A frame that conflicts with another one: its sender, its signature, and the rank that reports it.
  struct Suspicion {
    int rank;
    std::uint64_t signature;
    int reporter;
  };

  // Sink
  int on_identity(const Identity& who, std::string& why_not) override;
  void on_frame(int peer, const FrameHeader& header, Payload payload) override;
  void on_down(int peer, const std::string& why) override;
  void on_tick() override;
  void on_error(const std::string& what) override;

  // engine_start.cc: connecting and closing
  void open_stage(const std::string& segment, double timeout_s);
  void await_all(const std::vector<std::size_t>& wanted, Clock::time_point until, double timeout_s);

  // engine.cc: submission, dispatch of received frames, completion
  void require_possible(const OpSpec& spec) const;
  OpPtr make_op(OpSpec spec);
  void prepare_own_part(Op& op);
  std::string check_sender(int peer, const FrameHeader& header) const;
  void finished_one(const OpPtr& op);
  void complete(const OpPtr& op);
  OpPtr find(std::uint64_t seq);
  HostStage* stage();
  std::vector<OpPtr> pending_ops();
  void note(const std::string& text);
  void traced(const char* what, std::uint64_t begin_ns, std::uint64_t seq, std::uint64_t chunk);

  // engine_chunks.cc: the path of a chunk, and flow control
  void begin(const OpPtr& op);
  void push(const OpPtr& op, std::uint64_t index, Payload data, Element input, std::byte* destination);
  void expect(const OpPtr& op, std::uint64_t index, std::byte* destination);
  int route(std::uint64_t seq, std::uint64_t index, int server);
  void send_contribution(const OpPtr& op, std::uint64_t index);
  FrameHeader header_of(const Op& op, std::uint64_t index, FrameType type) const;
  void answer(int peer, const FrameHeader& header, const Payload& payload);
  void send_result(int peer, FrameHeader header, const Payload& payload);
  void send_deferred();
  void deliver(int peer, const FrameHeader& header, Payload payload);
  void on_unexpected_result(int peer, const FrameHeader& header);
  void replay_early(std::uint64_t seq);
  void send(int peer, FrameHeader header, Payload payload);
  std::shared_ptr<const void> hold(const OpPtr& op);
  void pump();
  void set_order();
  void on_order(int peer, const FrameHeader& header);
  std::uint64_t num_begun_by_all() const;
  double min_window() const;
  std::size_t open(const Window& window) const;
  void retire(const Op& op, std::uint64_t index);
  void answered(const Op& op, std::uint64_t index);

  // engine_mismatch.cc: ranks that issue different collectives
  void announce(const Op& op);
  void on_announcement(int rank, const FrameHeader& header, const std::string& text);
  void compare(std::uint64_t seq, const Record& mine, const Announcement& theirs);
  void on_conflict(const SumServer::Conflict& conflict);
  void suspect(std::uint64_t seq, int rank, std::uint64_t signature);
  void on_mismatch(int reporter, const FrameHeader& header);
  void add_suspicion(std::uint64_t seq, const Suspicion& suspicion);
  void diagnose(std::uint64_t seq);
  Record record_of(std::uint64_t seq);

  // engine_faults.cc: failure of the group, heartbeats, stragglers, lost helpers
  void fail(const std::string& cause);
  void broadcast(FrameType type, std::uint64_t seq, std::uint64_t chunk, std::uint64_t signature,
                 const std::string& text);
  void beat();
  void on_progress(int peer, const FrameHeader& header);
  void check_waiting(const OpPtr& op);
  bool name_stragglers(const Op& op, double age_s);
  std::string missing_ranks(const Op& op, bool& somebody);
  double silent_s(int peer) const;
  void malformed(int peer, const std::string& what);
  void helper_lost(int helper, const std::string& why, bool tell);
  void reroute(int server, const OpPtr& op);
  void forget_finished();
  std::string rank_name(int rank) const;
  std::string server_name(int server) const;
  std::string with_pending(const std::string& cause);

  static constexpr std::size_t kRecords = 1024;

  const int pid_ = static_cast<int>(getpid());
  EngineOptions options_;
  std::unique_ptr<Topology> topology_;
  std::string identity_;  // the group's name, made unique
  std::vector<PeerInfo> peers_;
  std::vector<HelperInfo> helpers_;
  BufferPool pool_;

  // Guarded by mutex_; any thread.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t next_seq_ = 0;
  FusedBuffer fused_;
  std::map<std::uint64_t, OpPtr> ops_;
  std::set<std::uint64_t> failed_ops_, watched_;
  std::deque<std::uint64_t> watched_done_;
  std::string error_;
  std::vector<Record> records_;
  std::map<std::uint64_t, std::vector<Announcement>> announced_;
  std::set<std::uint64_t> mismatch_reported_;
  std::map<std::string, std::uint64_t> counts_;
  std::vector<std::string> events_, names_of_lost_;
  std::vector<TraceEvent> events_trace_;
  std::atomic<bool> tracing_{false};
  std::atomic<std::uint64_t> submitted_{0}, completed_{0};
  bool closed_ = false;

  // Transport's thread only.
  std::unique_ptr<SumServer> server_;
  std::vector<PeerState> states_;
  Outbox outbox_;
  OrderedOutbox ordered_;
  Window window_, ordered_window_;
  std::uint64_t num_runs_ = 0;  // of the priority order, set by rank 0
  bool pumping_ = false;
  std::vector<bool> lost_helpers_;
  std::map<std::uint64_t, std::vector<EarlyFrame>> early_frames_;
  std::map<std::uint64_t, OpPtr> retained_;
  bool failed_ = false;
  bool diverged_ = false;  // ranks issued different collectives: nothing completes until the mismatch is diagnosed
  std::map<std::uint64_t, std::vector<Suspicion>> suspicions_;
  std::uint64_t num_ticks_ = 0;

  std::unique_ptr<Transport> transport_;
  std::unique_ptr<HostStage> stage_;
};

}  // namespace shoal
