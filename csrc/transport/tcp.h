// Frames over TCP: a control connection to each peer and, between hosts, several for data.
//
// A peer is down when its connections have ended, or when its kernel has acknowledged nothing for `grace_s`. The
// kernel is checked, not the process: it acknowledges heartbeats on the control connection even while the process is
// stopped. When it does not, connection attempts distinguish a reachable host from an unreachable one; TCP itself
// would retry only after seconds.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <string>
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
  std::string address = "127.0.0.1";
  int port = 0;
  Bytes secret;
  int send_buffer_bytes = 0;  // 0: the system's
  double grace_s = 2.0;
  double tick_s = 0.25;

  bool operator==(const TcpOptions&) const = default;
};

// Another event source on the network thread: libfabric's endpoints. All calls come on that thread.
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

  void set_peer(int peer, const std::string& address, int port) override;
  void call_peer(int peer, const Introduction& me, double timeout_s) override;
  // Returns once the peers' kernels have acknowledged it.
  bool flush(const std::vector<int>& peers, double timeout_s) override;

  void post(std::function<void()> task) override;
  void send(int peer, FrameHeader header, Payload payload) override;
  void drop(int peer) override;
  void drop_data(std::uint32_t group) override;
  void write_queued() override;
  std::map<std::string, std::uint64_t> counters() const override;

  // For the source, on the network thread: it no longer reaches the peer, which is down unless the peer's own
  // connections end within the grace period; the peer has sent a malformed message.
  void suspect(int peer, const std::string& why);
  void declare_down(int peer, const std::string& why);

 private:
  using Clock = std::chrono::steady_clock;

  struct Peer {
    std::string address;  // empty: it connects to us, and is not connected to
    int port = 0;
    bool down = false;
    std::vector<std::shared_ptr<Connection>> connections;
    std::shared_ptr<Connection> control;
    double silent_s = 0;
    bool sent_control = false;  // and not yet acknowledged
    std::string ended;  // reason for which one of several connections has ended
    double ended_s = 0;
    int probe_fd = -1;
  };

  struct Newcomer {  // an inbound socket that is not authenticated yet
    Bytes received, caller, listener;
    Clock::time_point deadline;
  };

  // What is queued for peers at one moment: on each connection, and at the source.
  struct Marks {
    std::vector<std::pair<std::shared_ptr<Connection>, std::uint64_t>> connections;
    std::vector<std::pair<int, std::uint64_t>> source;
  };

  Marks marks_of(const std::vector<int>& peers);
  std::size_t unsent_bytes(const Marks& marks);
  void run();
  void run_tasks();
  void accept_all();
  void hear_newcomer(int fd);
  void forget_newcomer(int fd, const std::string& why);
  void adopt(int fd, int peer, bool control);
  void serve(const std::shared_ptr<Connection>& connection, std::uint32_t events);
  void forget(Connection& connection);
  void end_connection(const std::shared_ptr<Connection>& connection, const std::string& why);
  void flush_dirty();
  void write(const std::shared_ptr<Connection>& connection);
  void watch(Connection& connection, bool writable);
  void tick(double elapsed_s);
  void check_peer(int index, Peer& peer, double elapsed_s);
  bool check_ended(int index, Peer& peer, double elapsed_s);
  bool probe_answers(Peer& peer);
  void stop_probe(Peer& peer);
  Peer& peer_at(int index);

  TcpOptions options_;
  Sink& sink_;
  BufferPool pool_;
  LineLimit lines_;
  PollSource* poll_source_ = nullptr;
  int port_ = 0;
  int listen_fd_ = -1, epoll_fd_ = -1, wake_fd_ = -1;
  std::thread thread_;
  std::atomic<bool> stopping_{false};

  Mutex tasks_mutex_;
  std::vector<std::function<void()>> tasks_ GUARDED_BY(tasks_mutex_);

  std::map<int, Peer> peers_;
  std::map<int, std::shared_ptr<Connection>> connections_;  // by socket
  std::map<int, Newcomer> newcomers_;
  std::vector<std::shared_ptr<Connection>> dirty_;

  std::atomic<std::uint64_t> bytes_sent_{0}, bytes_received_{0}, frames_sent_{0}, frames_received_{0}, strangers_{0},
      num_connections_{0};
};

}  // namespace shoal
