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
#include <condition_variable>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/log.h"
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
};

// Another event source on the transport's thread: libfabric's endpoints. All calls come on that thread.
class PollSource {
 public:
  virtual ~PollSource() = default;
  // File descriptors that become readable when there is work.
  virtual std::vector<int> wait_fds() = 0;
  // Longest sleep of the thread: -1 for no limit, 0 for none. Called before each sleep.
  virtual int max_wait_ms() = 0;
  virtual void work() = 0;
  // Bytes that peers have not received.
  virtual std::size_t unsent_bytes() = 0;
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
  bool wait_for_connections(const std::vector<std::size_t>& wanted, double timeout_s) override;
  std::size_t connections_of(int peer) override;
  // Returns once the peers' kernels have acknowledged everything.
  bool flush(double timeout_s) override;

  void post(std::function<void()> task) override;
  void send(int peer, FrameHeader header, Payload payload) override;
  void drop(int peer) override;
  void drop_data() override;
  std::map<std::string, std::uint64_t> counters() const override;

  // For the source, on the transport's thread: it reaches the peer too, which counts as a connection; it no longer
  // does, and unless the peer's own connections end within the grace period the peer is down; the peer has sent a
  // malformed message.
  void count_connection(int peer);
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

  void run();
  void run_tasks();
  void accept_all();
  void hear_newcomer(int fd);
  void forget_newcomer(int fd, const std::string& why);
  void adopt(int fd, int peer, bool control);
  void serve(const std::shared_ptr<Connection>& connection, std::uint32_t events);
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

  std::mutex tasks_mutex_;
  std::vector<std::function<void()>> tasks_;

  std::map<int, Peer> peers_;
  std::map<int, std::shared_ptr<Connection>> connections_;  // by socket
  std::map<int, Newcomer> newcomers_;
  std::vector<std::shared_ptr<Connection>> dirty_;

  std::mutex established_mutex_;
  std::condition_variable established_changed_;
  std::map<int, std::size_t> established_;  // by peer

  std::atomic<std::uint64_t> bytes_sent_{0}, bytes_received_{0}, frames_sent_{0},
      frames_received_{0}, strangers_{0};
};

}  // namespace shoal
