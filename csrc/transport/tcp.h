// Frames over TCP: a control connection to each peer and, between hosts, several for data.
//
// The connections are spread over threads, which copy from and to their sockets, compute checksums and write payloads to
// their places at the same time. The protocol is run by one of them at a time, the holder of the NetworkLock: each takes
// it for the frames that it passes on. The first thread has the control connections, accepts, runs tasks and ticks.
//
// Where both processes have several addresses, those at the same place of their lists are a path: connections for data
// are spread over the paths, each from an address to the other. A path that does not answer while another one does is
// given up: its frames that the peer's kernel has not acknowledged go over the others, and the receiver drops those
// that it has, by their number.
//
// A thread serves its connections in rounds. Each connection has a share of a round. Where the peers are of several jobs,
// each job has: of its connections that are ready, each is read up to an equal part of it.
//
// A peer is down when its connections have ended, or when its kernel has acknowledged nothing for `grace_s`. The
// kernel is checked, not the process: it acknowledges heartbeats on the control connection even while the process is
// stopped. When it does not, connection attempts distinguish a reachable host from an unreachable one; TCP itself
// would retry only after seconds.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/mutex.h"
#include "transport/connection.h"
#include "transport/handshake.h"
#include "transport/transport.h"

namespace shoal {

struct TcpOptions {
  std::string address = "127.0.0.1";  // several, separated by commas: one per interface
  int port = 0;
  Bytes secret;
  int send_buffer_bytes = 0;  // 0: the system's
  double grace_s = 2.0;
  double tick_s = 0.25;
  int num_threads = 1;  // with several addresses, whose paths share state: one
  std::size_t job_bytes = 1 << 20;  // read of each of several jobs in a round of a thread
  Protection protection = Protection::checksum;  // of the connections that this process opens
  PrivateKey private_key{};  // for tests: of the process; zeros: a new one

  bool operator==(const TcpOptions&) const = default;
};

// Another event source of the first thread: libfabric's endpoints. All calls come with the NetworkLock; with one there are
// no other threads.
class PollSource {
 public:
  virtual ~PollSource() = default;
  // File descriptors that become readable when there is work.
  virtual std::vector<int> wait_fds() = 0;
  // Longest sleep of the thread: -1 for no limit, 0 for none. Called before each sleep.
  virtual int max_wait_ms() = 0;
  virtual void work() = 0;
  // Mark of what is queued for a peer now; bytes up to a mark that it has not received.
  virtual std::uint64_t mark(int peer) = 0;
  virtual std::size_t unsent_bytes(int peer, std::uint64_t mark) = 0;
};

class TcpTransport : public Transport {
 public:
  // Starts listening. Throws std::runtime_error with the address, the port and the reason.
  TcpTransport(TcpOptions options, Sink& sink);
  ~TcpTransport() override;

  // Before start(); the source outlives stop().
  void add_poll_source(PollSource& source);

  int port() const override { return port_; }
  void start() override;
  void stop() override;

  const PublicKey& public_key() const override { return credentials_.keys.known; }
  void set_peer(int peer, const std::string& address, int port, const PublicKey& key) override;
  void call_peer(int peer, const Introduction& me, double timeout_s, const std::atomic<bool>* stopped = nullptr) override;
  // Returns once the peers' kernels have acknowledged it.
  bool flush(const std::vector<int>& peers, double timeout_s) override;

  void assert_here() const override ASSERT_CAPABILITY(network_thread) { shared_.network.assert_here(); }
  void post(std::function<void()> task) override;
  void send(int peer, FrameHeader header, Payload payload) override;
  void drop(int peer) override;
  void resume(int peer) override;
  void share(const std::vector<std::vector<int>>& jobs) override;
  std::size_t held_bytes(int peer) const override;
  BufferPool& pool() override { return shared_.pool; }
  void drop_data(std::uint32_t group, int peer) override;
  void write_queued() override;
  std::map<std::string, std::uint64_t> counters() const override;

  // For the source, with the NetworkLock: it no longer reaches the peer, which is down unless the peer's own
  // connections end within the grace period; the peer has sent a malformed message.
  void suspect(int peer, const std::string& why);
  void declare_down(int peer, const std::string& why);

 private:
  using Clock = std::chrono::steady_clock;

  // Passes on the frames of peers with several paths, each once, and takes those about the paths.
  class Once : public Sink {
   public:
    explicit Once(TcpTransport& transport) : transport_(transport) {}
    int on_introduction(const Introduction& who, std::string& why_not) override { return to().on_introduction(who, why_not); }
    void on_connected(int peer) override { to().on_connected(peer); }
    std::shared_ptr<std::byte> place_for(int peer, const FrameHeader& header) override { return to().place_for(peer, header); }
    bool admits(int peer, const FrameHeader& header) override { return to().admits(peer, header); }
    void on_frame(int peer, const FrameHeader& header, Payload payload) override;
    void on_down(int peer, const std::string& why) override { to().on_down(peer, why); }
    void on_tick() override { to().on_tick(); }
    void on_error(const std::string& what) override { to().on_error(what); }

   private:
    Sink& to() { return transport_.sink_; }
    TcpTransport& transport_;
  };

  struct Path {
    double silent_s = 0;
    int probe_fd = -1;
    bool lost = false;
  };

  struct Peer {
    std::vector<std::string> addresses;  // none: it connects to us, and is not connected to
    int port = 0;
    PublicKey key{};
    std::vector<Path> paths = std::vector<Path>(1);
    std::uint64_t num_sent = 0;      // frames, where there are several paths
    std::uint64_t seen_below = 1;    // all its frames with lower numbers have come
    std::set<std::uint64_t> seen;    // and these
    bool down = false;
    int job = 0;  // 0: it has none
    std::vector<std::shared_ptr<Connection>> connections;
    std::shared_ptr<Connection> control;
    std::string ended;  // reason for which one of several connections has ended
    double ended_s = 0;
  };

  struct Newcomer {  // an inbound socket that is not authenticated yet
    Listener listener;
    std::uint64_t number;
    Clock::time_point deadline;
    std::string from;
    Bytes received = {};
    bool knows_secret = false;
  };

  // What is queued for peers at one moment: on each connection, and at the source.
  struct Marks {
    std::vector<std::pair<std::shared_ptr<Connection>, std::uint64_t>> connections;
    std::vector<std::pair<int, std::uint64_t>> source;
  };

  // A thread, and the connections that it reads and writes.
  struct Loop {
    int epoll_fd = -1, wake_fd = -1;
    std::thread thread;
    std::vector<epoll_event> events = std::vector<epoll_event>(64);
    Mutex mutex;
    std::map<int, std::shared_ptr<Connection>> connections GUARDED_BY(mutex);  // by socket
    std::vector<std::shared_ptr<Connection>> dirty GUARDED_BY(mutex);          // have frames to write
    std::vector<std::shared_ptr<Connection>> resumed GUARDED_BY(mutex);        // have frames that were not admitted
  };

  Marks marks_of(const std::vector<int>& peers) REQUIRES(network_thread);
  std::size_t unsent_bytes(const Marks& marks) REQUIRES(network_thread);
  void run_first();
  void run_other(Loop& loop);
  void serve_round(Loop& loop, int wait_ms) EXCLUDES(network_thread);
  // What is read of a connection of each job in a round; empty: its own share.
  using Parts = std::map<int, std::size_t>;
  Parts parts_of(std::span<const std::shared_ptr<Connection>> ready) const;
  Parts parts_of(Loop& loop, std::span<const epoll_event> events) const;
  void handle(Loop& loop, const epoll_event& event, const Parts& parts) EXCLUDES(network_thread);
  void run_tasks() EXCLUDES(network_thread);
  void wake(Loop& loop);
  static void await_input(int epoll_fd, int fd);
  void accept_all(int listen_fd) REQUIRES(network_thread);
  void hear_newcomer(int fd) REQUIRES(network_thread);
  void pause_accepting() REQUIRES(network_thread);
  Newcomer take_newcomer(int fd) REQUIRES(network_thread);
  void forget_newcomer(int fd, const std::string& why) REQUIRES(network_thread);
  void answer_newcomer(int fd, Newcomer& newcomer, const Bytes& message) REQUIRES(network_thread);
  void admit(int fd, Newcomer& newcomer, const Bytes& identity) REQUIRES(network_thread);
  void adopt(int fd, int peer, bool control, const Session& session) REQUIRES(network_thread);
  std::size_t path_of(int fd) const;
  Destination destination_of(const Peer& peer, bool control) const;
  std::shared_ptr<Connection> connection_for(Peer& peer, std::size_t bytes, bool data);
  void serve(const std::shared_ptr<Connection>& connection, std::uint32_t events, const Parts& parts) EXCLUDES(network_thread);
  void forget(Connection& connection) REQUIRES(network_thread);
  void end_connection(const std::shared_ptr<Connection>& connection, const std::string& why) REQUIRES(network_thread);
  void end_broken(const std::shared_ptr<Connection>& connection, const std::system_error& error) REQUIRES(network_thread);
  void enqueue(const std::shared_ptr<Connection>& connection, const FrameHeader& header, Payload payload)
      REQUIRES(network_thread);
  void read_resumed(Loop& loop) EXCLUDES(network_thread);
  void flush_dirty(Loop& loop) EXCLUDES(network_thread);
  void write(const std::shared_ptr<Connection>& connection) EXCLUDES(network_thread);
  void tick(double elapsed_s) REQUIRES(network_thread);
  void check_peer(int index, Peer& peer, double elapsed_s) REQUIRES(network_thread);
  bool answers(const Peer& peer, std::size_t path) const;
  void lose_path(int index, std::size_t path, bool tell) REQUIRES(network_thread);
  void resend(Peer& peer, std::vector<Connection::Outgoing> frames) REQUIRES(network_thread);
  bool check_ended(int index, Peer& peer, double elapsed_s) REQUIRES(network_thread);
  bool probe_answers(const Peer& peer, std::size_t path, Path& state);
  void stop_probes(Peer& peer);
  Peer& peer_at(int index) REQUIRES(network_thread);

  TcpOptions options_;
  const Credentials credentials_;
  std::vector<std::string> addresses_;  // of this process
  Sink& sink_;
  Once once_{*this};
  Connection::Shared shared_;
  LineLimit lines_;
  PollSource* poll_source_ = nullptr;
  int port_ = 0;
  std::vector<int> listen_fds_;
  std::vector<std::unique_ptr<Loop>> loops_;
  std::atomic<bool> stopping_{false};

  Mutex tasks_mutex_;
  std::vector<std::function<void()>> tasks_ GUARDED_BY(tasks_mutex_);

  std::map<int, Peer> peers_ GUARDED_BY(network_thread);
  bool accepts_ GUARDED_BY(network_thread) = true;
  std::map<int, Newcomer> newcomers_ GUARDED_BY(network_thread);
  std::map<std::uint64_t, int> arrivals_ GUARDED_BY(network_thread);  // of newcomers, the oldest first
  std::uint64_t num_arrivals_ GUARDED_BY(network_thread) = 0;
  std::size_t num_data_ GUARDED_BY(network_thread) = 0;  // connections so far: their threads in turn

  std::atomic<std::uint64_t> frames_sent_{0}, strangers_{0}, num_connections_{0}, paths_lost_{0}, num_jobs_{0};
};

}  // namespace shoal
