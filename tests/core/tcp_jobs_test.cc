// A thread that reads the connections of several jobs: in a round, each job has as much of it as another one.
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "check.h"
#include "engine_group.h"

namespace tcp_jobs_test {

using namespace shoal_test;
using shoal::FrameHeader;
using shoal::Payload;
using shoal::TcpOptions;
using shoal::TcpTransport;

constexpr std::size_t kJobBytes = 32 << 10;    // less than a socket holds
constexpr std::size_t kFrameBytes = 1 << 10;
constexpr std::size_t kFrames = 8192;

class Deaf : public shoal::Sink {
 public:
  int on_introduction(const shoal::Introduction&, std::string&) override { return -1; }
  void on_connected(int) override {}
  void on_frame(int, const FrameHeader&, Payload) override {}
  void on_down(int, const std::string&) override {}
  void on_tick() override {}
  void on_error(const std::string& what) override { check::fail(__FILE__, __LINE__, what); }
};

// Its loop stands still but for the rounds that the test asks for.
class Server : private Deaf {
 public:
  Server() : transport_({.secret = kSecret, .grace_s = kDeadlineS, .job_bytes = kJobBytes}, *this) { transport_.start(); }
  ~Server() override {
    ++goes_on_;
    transport_.stop();
  }

  int port() const { return transport_.port(); }

  void stand_still() {
    const int number = num_stops_;
    transport_.post([this, next = goes_on_ + 1] {
      ++num_stops_;
      while (goes_on_ < next) std::this_thread::yield();
    });
    await([&] { return num_stops_ > number; }, "the loop stands still");
  }

  // Of a loop that stands still, until it does again.
  void run_round() {
    const int number = num_stops_;
    transport_.post([this, next = goes_on_ + 2] {
      ++num_stops_;
      while (goes_on_ < next) std::this_thread::yield();
    });
    ++goes_on_;
    await([&] { return num_stops_ > number; }, "a round has ended");
  }

  void share(const std::vector<std::vector<int>>& jobs) {
    transport_.post([this, jobs]() SHOAL_NO_ANALYSIS { transport_.share(jobs); });
  }

  // Payloads of whole frames from a process.
  std::size_t served_bytes(int peer) { return served_[static_cast<std::size_t>(peer)]; }
  std::size_t num_jobs() const { return count_of(transport_.counters(), "jobs"); }

 private:
  int on_introduction(const shoal::Introduction& who, std::string&) override { return std::stoi(who.name); }
  void on_frame(int peer, const FrameHeader&, Payload payload) override { served_[static_cast<std::size_t>(peer)] += payload.size(); }

  std::atomic<int> num_stops_{0}, goes_on_{0};
  std::array<std::atomic<std::size_t>, 2> served_{};
  TcpTransport transport_;
};

// A process that sends more than its connections take.
class Flood {
 public:
  Flood(Server& server, int number, int num_data) : transport_({.secret = kSecret, .grace_s = kDeadlineS}, sink_) {
    transport_.start();
    transport_.set_peer(0, "127.0.0.1", server.port(), {});
    for (int k = 0; k <= num_data; ++k) transport_.call_peer(0, {std::to_string(number), k == 0}, kDeadlineS);
  }
  ~Flood() { transport_.stop(); }

  void begin() {
    transport_.post([this]() SHOAL_NO_ANALYSIS {
      FrameHeader header;
      header.type = shoal::FrameType::push;
      for (std::size_t k = 0; k < kFrames; ++k) transport_.send(0, header, {bytes_.data(), bytes_.size()});
    });
  }

  // Until the kernel takes no more.
  void fill() {
    std::uint64_t before = 0, now = 0;
    do {
      before = now;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      now = count_of(transport_.counters(), "bytes_sent");
    } while (now == 0 || now != before);
  }

 private:
  const std::vector<std::byte> bytes_ = std::vector<std::byte>(kFrameBytes);
  Deaf sink_;
  TcpTransport transport_;
};

// Bytes that a job of eight connections and one of one connection are served in some rounds.
std::vector<std::vector<std::size_t>> served_in_rounds(const std::vector<std::vector<int>>& jobs, int num_rounds) {
  Server server;
  Flood many(server, 0, 8), one(server, 1, 1);
  server.share(jobs);
  server.stand_still();
  CHECK_EQ(server.num_jobs(), jobs.size());
  for (Flood* each : {&many, &one}) each->begin();
  std::vector<std::vector<std::size_t>> served;
  for (int round = 0; round < num_rounds; ++round) {
    for (Flood* each : {&many, &one}) each->fill();
    server.run_round();
    served.push_back({server.served_bytes(0), server.served_bytes(1)});
  }
  return served;
}

// The job of one connection may have less, where its socket holds less.
TEST(tcp_jobs_have_the_same_part_of_every_round) {
  std::size_t most = 0;
  for (const auto& served : served_in_rounds({{0}, {1}}, 12)) {
    most += kJobBytes;
    for (const std::size_t bytes : served) CHECK(bytes <= most && 2 * bytes >= most);
  }
}

// Of one job, all that its connections have is read at once.
TEST(tcp_jobs_of_which_there_is_one_share_nothing) {
  const auto served = served_in_rounds({{0, 1}}, 1).front();
  CHECK(served[0] > 2 * kJobBytes);
}

}  // namespace tcp_jobs_test
