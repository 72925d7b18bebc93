// Tests what is particular to libfabric; every test of engines runs over it too (carriers() in engine_group.h).
#ifdef SHOAL_HAS_LIBFABRIC

#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "engine_group.h"
#include "transport/ofi.h"

// For the leak checker: libfabric 1.17 forgets what it knows of a peer that connects while an endpoint is closed.
extern "C" const char* __lsan_default_suppressions() { return "leak:libfabric.so"; }

namespace ofi_test {

using namespace shoal_test;
using shoal::Engine;
using shoal::Kind;

void sums_are_right(Group& group, const std::vector<std::string>& hosts, std::size_t count) {
  std::vector<std::vector<float>> inputs;
  for (int rank = 0; rank < group.size(); ++rank) inputs.push_back(values<float>(count, static_cast<std::uint64_t>(rank)));
  const auto sum = in_promised_order(hosts, inputs, [](float a, float b) { return a + b; });
  group.each([&](int rank, Engine& engine) {
    auto x = inputs[static_cast<std::size_t>(rank)];
    run(engine, Kind::all_reduce, x.data(), x.data(), x.size());
    CHECK(x == sum);
  });
}

// Providers that need no hardware. The library may lack some of them; what it lacks is said, not failed.
TEST(ofi_every_provider_that_is_here) {
  int tried = 0;
  for (const std::string name : {"tcp;ofi_rxm", "tcp", "sockets", "udp;ofi_rxd", "shm"}) {
    shoal::EngineOptions options;
    options.size = 2;
    options.fabric = name;
    try {
      Engine engine(options);
    } catch (const std::runtime_error& error) {
      CHECK(contains(error.what(), "is not here"));
      std::printf("(without %s) ", name.c_str());
      continue;
    }
    ++tried;
    const std::vector<std::string> hosts{"a", "b", "c"};
    Group group({"", hosts}, [&](shoal::EngineOptions& options) { options.fabric = name; });
    for (std::size_t count : {1, 1000, 200'003}) sums_are_right(group, hosts, count);
    CHECK(group.engine(0).counters().at("fabric_bytes_sent") > 4 * 200'000u);
    group.close();
  }
  CHECK(tried > 0);
}

// Every chunk between hosts goes over libfabric, by turns over the rails; heartbeats and the like do not.
TEST(ofi_carries_the_chunks_and_nothing_else) {
  Group group({"", {"a", "b"}}, [](shoal::EngineOptions& options) {
    options.fabric = "tcp;ofi_rxm,tcp;ofi_rxm";
    options.shuffle = 3;
  });
  const std::size_t count = 1 << 20;
  group.each([&](int, Engine& engine) {
    std::vector<float> x(count, 1.0f);
    run(engine, Kind::all_reduce, x.data(), x.data(), x.size());
    CHECK_EQ(x[5], 2.0f);
  });
  for (int rank : {0, 1}) {  // all have their sums: all was sent
    const auto counts = group.engine(rank).counters();
    const std::uint64_t half = count * sizeof(float) / 2;  // pushed to the other, and the other's sums
    const std::uint64_t frames = counts.at("fabric_frames_sent");
    CHECK(frames >= 2 * half / (32 << 10));
    CHECK(counts.at("fabric_bytes_sent") >= 2 * half);
    CHECK(counts.at("fabric_bytes_sent") <= 2 * half + frames * (16 + sizeof(shoal::FrameHeader)));
    CHECK(counts.at("bytes_sent") - counts.at("fabric_bytes_sent") < 16 << 10);
  }
  group.close();
}

// A process with one peer. Payloads are written to `place`, if there is one.
struct Process final : shoal::Sink {
  Process() {
    shoal::TransportOptions options;
    options.fabric = "tcp;ofi_rxm";
    options.tcp.secret = kSecret;
    transport = std::make_unique<shoal::OfiTransport>(options, *this);
    transport->start();
  }
  ~Process() override { transport->stop(); }

  int on_introduction(const shoal::Introduction&, std::string&) override { return 0; }
  void on_connected(int) override { ++connected; }
  std::shared_ptr<std::byte> place_for(int, const shoal::FrameHeader&) override { return {place, place.get()}; }
  void on_frame(int, const shoal::FrameHeader&, shoal::Payload payload) override {
    in_place = payload.data() == place.get();
    ++received;
  }
  void on_down(int, const std::string&) override {}
  void on_tick() override {}
  void on_error(const std::string&) override {}

  std::shared_ptr<std::byte> place;
  std::atomic<int> connected{0}, received{0};
  std::atomic<bool> in_place{false};
  std::unique_ptr<shoal::OfiTransport> transport;
};

void wait_until(const std::function<bool()>& holds) {
  const auto until = std::chrono::steady_clock::now() + shoal::seconds(kDeadlineS);
  while (!holds() && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  CHECK(holds());
}

// A sum is copied once, from the rail's memory to where the operation wants it; what has no place, to a buffer.
TEST(ofi_payloads_are_written_to_their_place) {
  constexpr std::size_t kBytes = 20'000;
  const std::vector<std::byte> sent(kBytes, std::byte{7});
  Process from, to;
  const std::shared_ptr<std::byte> place(new std::byte[kBytes]{}, std::default_delete<std::byte[]>());
  from.transport->set_peer(0, "127.0.0.1", to.transport->port(), {});
  from.transport->call_peer(0, {"from", true}, kDeadlineS);
  wait_until([&] { return from.connected == 2 && to.connected == 2; });  // the connection stands; the rails are known
  for (const bool placed : {true, false}) {
    to.transport->post([&, placed] { to.place = placed ? place : nullptr; });
    from.transport->post([&] {
      from.transport->assert_here();
      shoal::FrameHeader header;
      header.type = shoal::FrameType::result;
      from.transport->send(0, header, shoal::Payload(sent.data(), sent.size()));
    });
    const int expected = placed ? 1 : 2;
    wait_until([&] { return to.received == expected; });
    CHECK_EQ(to.in_place.load(), placed);
    CHECK(std::memcmp(place.get(), sent.data(), kBytes) == 0);
    CHECK(from.transport->counters().at("fabric_frames_sent") == static_cast<std::uint64_t>(expected));
  }
}

// A helper without libfabric, and frames larger than a message of it, take TCP.
TEST(ofi_falls_back_to_tcp) {
  const std::vector<std::string> hosts{"a", "b", "c"};
  Group group({"", hosts, 1}, [](shoal::EngineOptions& options) { options.fabric = "tcp;ofi_rxm"; });
  sums_are_right(group, hosts, 300'001);
  CHECK(group.helpers[0]->counters().at("bytes_received") > 100'000u);
  CHECK_EQ(group.helpers[0]->counters().count("fabric_bytes_sent"), 0u);
  CHECK(group.engine(1).counters().at("fabric_bytes_sent") > 100'000u);
  group.close();
}

TEST(ofi_helpers_of_other_message_sizes) {
  const Over over({"", "tcp;ofi_rxm"});
  const std::vector<std::string> hosts{"a", "b"};
  Group group({"", hosts, 1}, [](shoal::EngineOptions& options) { options.chunk_bytes = 256 << 10; });  // the helper's: 64 KiB
  sums_are_right(group, hosts, 500'001);
  CHECK(group.helpers[0]->counters().at("bytes_received") > 500'000u);
  group.close();
}

TEST(ofi_what_cannot_be_had_is_one_clear_error) {
  shoal::EngineOptions options;
  options.size = 2;
  options.fabric = "nonesuch";
  CHECK(contains(CHECK_THROWS(std::runtime_error, Engine(options)), "libfabric's provider nonesuch is not here"));
}

TEST(ofi_ranks_with_other_providers_are_named) {
  shoal::EngineOptions options;
  options.size = 2;
  options.group = "g";
  options.secret = kSecret;
  options.fabric = "tcp;ofi_rxm";
  Engine first(options);
  options.rank = 1;
  options.fabric = "tcp;ofi_rxm,tcp;ofi_rxm";
  Engine second(options);
  const std::vector<shoal::PeerInfo> peers{{"a", "127.0.0.1", first.port(), 0, 1}, {"b", "127.0.0.1", second.port(), 1, 2}};
  std::atomic<int> named{0};
  on_threads(2, [&](int rank) {
    const std::string why = CHECK_THROWS(std::runtime_error, (rank ? second : first).connect(peers, {}, {0, 1}, "unused", 5.0));
    if (contains(why, "its libfabric providers are")) ++named;  // who hears it second may only see the first one go
  });
  CHECK(named >= 1);
}

}  // namespace ofi_test

#endif
