// Sends chunks over libfabric and all other frames over TCP.
//
// The TCP control connections remain: over them peers authenticate, send heartbeats, report failures and leave, and
// lost peers are detected, as without libfabric. Once a connection stands, each side sends the other the addresses of
// its rails and the 16 random bytes with which messages to it must begin; other messages are dropped as strangers'.
// From then on, frames with elements are spread over the rails. No order of messages is assumed. A peer that has sent
// no addresses (a helper without libfabric) gets everything over TCP.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "transport/ofi_rail.h"
#include "transport/open.h"
#include "transport/tcp.h"

namespace shoal {

class OfiTransport : public Transport, private Sink, private PollSource {
 public:
  // Throws std::runtime_error with the provider and the reason.
  OfiTransport(TransportOptions options, Sink& sink);
  ~OfiTransport() override;

  int port() const override { return tcp_.port(); }
  void start() override { tcp_.start(); }
  void stop() override;
  const PublicKey& public_key() const override { return tcp_.public_key(); }
  void set_peer(int peer, const std::string& address, int port, const PublicKey& key) override { tcp_.set_peer(peer, address, port, key); }
  void call_peer(int peer, const Introduction& me, double timeout_s, const std::atomic<bool>* stopped = nullptr) override {
    tcp_.call_peer(peer, me, timeout_s, stopped);
  }
  bool flush(const std::vector<int>& peers, double timeout_s) override { return tcp_.flush(peers, timeout_s); }

  void assert_here() const override ASSERT_CAPABILITY(network_thread) { tcp_.assert_here(); }
  void post(std::function<void()> task) override { tcp_.post(std::move(task)); }
  void send(int peer, FrameHeader header, Payload payload) override;
  void drop(int peer) override;
  void resume(int peer) override { tcp_.resume(peer); }
  void share(const std::vector<std::vector<int>>& jobs) override { tcp_.share(jobs); }
  std::size_t held_bytes(int peer) const override;
  BufferPool& pool() override { return tcp_.pool(); }
  void drop_data(std::uint32_t group, int peer) override;
  void write_queued() override { tcp_.write_queued(); }
  std::map<std::string, std::uint64_t> counters() const override;

 private:
  using Token = std::array<std::uint8_t, 16>;

  struct Outgoing {
    FrameHeader header;
    Payload payload;
    std::uint64_t number;  // of the messages to this peer
  };

  struct Link {                 // to one peer
    Token ours{};               // token of its messages to this process
    bool announced = false;          // it has received our addresses
    bool down = false;
    std::vector<fi_addr_t> at;  // its rails; empty until received
    Token theirs{};
    std::size_t most_bytes = 0;   // largest message it accepts
    std::deque<Outgoing> queue;
    Rail::Slot* refused = nullptr;  // filled, but rail `next` was full
    std::size_t refused_bytes = 0;
    std::size_t next = 0;         // rail
    std::set<std::uint64_t> in_flight;  // numbers of messages
    std::uint64_t num_queued = 0;       // since the beginning; those of the queue are the last ones
  };

  // Sink of TCP
  int on_introduction(const Introduction& who, std::string& why_not) override {
    return sink_.on_introduction(who, why_not);
  }
  void on_connected(int peer) override;
  std::shared_ptr<std::byte> place_for(int peer, const FrameHeader& header) override {
    return sink_.place_for(peer, header);
  }
  bool admits(int peer, const FrameHeader& header) override { return sink_.admits(peer, header); }
  void on_frame(int peer, const FrameHeader& header, Payload payload) override;
  void on_down(int peer, const std::string& why) override;
  void on_tick() override;
  void on_error(const std::string& what) override { sink_.on_error(what); }

  // PollSource of TCP's thread
  std::vector<int> wait_fds() override;
  int max_wait_ms() override;
  void work() override;
  std::uint64_t mark(int peer) override { return links_[peer].num_queued; }
  std::size_t unsent_bytes(int peer, std::uint64_t mark) override;

  void announce(int peer);
  std::string learn(Link& link, const Payload& payload);
  void pump(int peer, Link& link);
  std::size_t fill(Rail::Slot& slot, const Link& link, const Outgoing& frame) const;
  void forget(int peer);
  void lose(int peer, const std::string& why);
  void read(bool all);
  bool read_once(bool all);
  void ended(std::size_t rail, const Rail::Completion& completion);
  int sender_of(const Rail::Completion& completion) const;
  void hear(std::size_t rail, const Rail::Completion& completion);
  void shuffle(std::vector<std::pair<std::size_t, Rail::Completion>>& batch, bool all);
  void stranger(const char* what);

  TransportOptions options_;
  Sink& sink_;
  TcpTransport tcp_;
  BufferPool pool_;
  std::size_t message_bytes_;
  std::vector<std::unique_ptr<Rail>> rails_;
  std::map<int, Link> links_;
  std::map<Token, int> peer_of_;
  std::vector<std::pair<std::size_t, Rail::Completion>> kept_;  // delayed, when completions are shuffled
  std::mt19937_64 random_;
  std::uint64_t busy_ns_ = 0;  // time of the last event on a rail that must be polled
  std::atomic<std::uint64_t> bytes_sent_{0}, bytes_received_{0}, frames_sent_{0}, frames_received_{0}, strangers_{0};
};

// Opens and closes a rail of the provider at this address. Returns an empty string, or the reason of failure.
std::string try_rail(const std::string& provider, const std::string& address);

}  // namespace shoal
