// Several groups of the same processes.
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <sys/socket.h>
#include <unistd.h>

#include "check.h"
#include "engine_group.h"

namespace engine_groups_test {

using namespace shoal_test;
using shoal::Engine;
using shoal::GroupError;
using shoal::Kind;

shoal::KeyPair keys_of(int rank) {
  shoal::PrivateKey own;
  own.fill(static_cast<std::uint8_t>(1 + rank));
  return {own, shoal::public_key_of(own)};
}

// The engines of several groups over `n` processes, played by one: rank r of every group is on the same connections.
struct Engines {
  using Of = std::vector<std::unique_ptr<Engine>>;

  explicit Engines(std::vector<std::string> hosts) : hosts(std::move(hosts)) {}

  Of make(const std::string& name, const std::vector<int>& ranks, bool share = true) {
    Of engines;
    for (std::size_t k = 0; k < ranks.size(); ++k) {
      shoal::EngineOptions options;
      options.rank = static_cast<int>(k);
      options.size = static_cast<int>(ranks.size());
      options.group = name;
      options.secret = kSecret;
      options.network_threads = carrier.threads;
      options.fabric = carrier.fabric;
      options.share_connections = share;
      options.address = "127.0.0." + std::to_string(1 + ranks[k]);
      options.private_key = keys_of(ranks[k]).own;
      engines.push_back(std::make_unique<Engine>(options));
    }
    return engines;
  }
  void connect(Of& engines, const std::vector<int>& ranks, const std::string& segment) {
    std::vector<shoal::PeerInfo> peers;
    std::vector<int> pattern;
    for (std::size_t k = 0; k < ranks.size(); ++k) {
      const auto& host = hosts[static_cast<std::size_t>(ranks[k])];
      peers.push_back({host, "127.0.0." + std::to_string(1 + ranks[k]), engines[k]->port(), ranks[k], 1000 + ranks[k], engines[k]->public_key()});
      pattern.push_back(static_cast<int>(k));
    }
    on_threads(static_cast<int>(ranks.size()), [&](int k) {
      engines[static_cast<std::size_t>(k)]->connect(peers, {}, pattern, segment, kDeadlineS);
    });
  }
  Of group(const std::string& name, const std::vector<int>& ranks) {
    Of engines = make(name, ranks);
    connect(engines, ranks, "test-" + std::to_string(getpid()) + "-" + name);
    return engines;
  }

  std::vector<std::string> hosts;
};

void each(Engines::Of& engines, const std::function<void(int, Engine&)>& call) {
  on_threads(static_cast<int>(engines.size()), [&](int k) { call(k, *engines[static_cast<std::size_t>(k)]); });
}

void sums_are_right(Engines::Of& engines, const std::vector<std::string>& hosts, std::size_t count) {
  std::vector<std::vector<float>> inputs;
  for (std::size_t k = 0; k < engines.size(); ++k) inputs.push_back(values<float>(count, k));
  const auto sum = in_promised_order(hosts, inputs, [](float a, float b) { return a + b; });
  each(engines, [&](int k, Engine& engine) {
    auto x = inputs[static_cast<std::size_t>(k)];
    run(engine, Kind::all_reduce, x.data(), x.data(), x.size());
    CHECK(x == sum);
  });
}

TEST_OVER_EACH(engine_groups_of_a_process_share_its_connections) {
  Engines made({"a", "b", "c"});
  auto world = made.group("world", {0, 1, 2});
  const auto before = world[0]->counters().at("connections");
  CHECK_EQ(before, carrier.fabric.empty() ? 4u : 2u);  // to two others: control, and data unless over libfabric
  auto pair = made.group("pair", {2, 0});
  auto again = made.group("again", {0, 1, 2});
  CHECK_EQ(count_of(world[0]->counters(), "connections"), before);
  CHECK_EQ(again[1]->port(), world[1]->port());
  sums_are_right(world, {"a", "b", "c"}, 100'000);
  sums_are_right(pair, {"c", "a"}, 100'000);
  sums_are_right(again, {"a", "b", "c"}, 100'000);
  CHECK(pair[0]->counters().at("bytes_sent") < world[0]->counters().at("bytes_sent"));
  each(world, [](int, Engine& engine) { engine.close(); });
  sums_are_right(again, {"a", "b", "c"}, 100'000);
  each(again, [](int, Engine& engine) { engine.close(); });
  each(pair, [](int, Engine& engine) { engine.close(); });
  auto fresh = made.group("world", {0, 1, 2});  // after all others
  sums_are_right(fresh, {"a", "b", "c"}, 100'000);
  each(fresh, [](int, Engine& engine) { engine.close(); });
}

TEST(engine_ranks_of_a_group_in_one_process_have_connections_of_their_own) {
  Group group({"", {"a", "b"}});
  CHECK(group.engine(0).port() != group.engine(1).port());
  group.close();
}

TEST(engine_connections_are_not_shared_where_that_is_not_wanted) {
  Engines made({"a", "b"});
  auto shared = made.make("shared", {0, 1}), also = made.make("also", {0, 1}), alone = made.make("alone", {0, 1}, false);
  CHECK_EQ(shared[0]->port(), also[0]->port());
  CHECK(shared[0]->port() != alone[0]->port());
}

// One group fails in the middle of its sums; the other's go on with the same bits.
TEST_OVER_EACH(engine_a_group_that_fails_leaves_the_others_alone) {
  Engines made({"a", "b", "c"});
  auto good = made.group("good", {0, 1, 2}), bad = made.group("bad", {0, 1, 2});
  std::thread failing([&] {
    each(bad, [&](int k, Engine& engine) {
      std::vector<float> x(1'000'000, 1.0f);
      try {
        for (int round = 0; round < 20; ++round) {
          if (k == 1 && round == 3) engine.abort("the reason");
          run(engine, Kind::all_reduce, x.data(), x.data(), x.size());
        }
      } catch (const GroupError& error) {
        CHECK(contains(error.what(), "the reason"));
      }
      std::fill(x.begin(), x.end(), 7.0f);  // nobody reads it any more
    });
  });
  for (int round = 0; round < 20; ++round) sums_are_right(good, {"a", "b", "c"}, 200'000);
  failing.join();
  each(bad, [](int, Engine& engine) { CHECK(contains(engine.error(), "the reason")); });
  bad.clear();
  sums_are_right(good, {"a", "b", "c"}, 200'000);
  each(good, [](int, Engine& engine) { CHECK_EQ(engine.error(), ""); });
}

TEST_OVER_EACH(engine_a_group_begins_while_another_has_traffic) {
  Engines made({"a", "b", "b"});
  auto world = made.group("world", {0, 1, 2});
  std::atomic<bool> over{false};
  std::thread traffic([&] {
    while (!over) sums_are_right(world, {"a", "b", "b"}, 300'000);
  });
  for (int k = 0; k < 5; ++k) {
    auto pair = made.group("pair " + std::to_string(k), {1, 0});
    sums_are_right(pair, {"b", "a"}, 50'000);
    each(pair, [](int, Engine& engine) { engine.close(); });
  }
  over = true;
  traffic.join();
}

TEST_OVER_EACH(engine_a_rank_that_is_destroyed_fails_its_groups_and_no_other) {
  Engines made({"a", "b", "c"});
  auto world = made.group("world", {0, 1, 2}), pair = made.group("pair", {0, 1}), others = made.group("others", {0, 2});
  const int port = world[0]->port();
  world[1].reset();
  pair[1].reset();
  for (auto* engine : {world[0].get(), world[2].get(), pair[0].get()}) {
    await([&] { return contains(engine->error(), "rank 1 (127.0.0.2, pid 1001) was lost"); }, "the loss is named");
  }
  CHECK_EQ(others[0]->error(), "");
  sums_are_right(others, {"a", "c"}, 10'000);
  auto later = made.group("later", {0, 2});
  CHECK_EQ(later[0]->port(), port);  // no connection was lost
  sums_are_right(later, {"a", "c"}, 10'000);
}

TEST(engine_a_malformed_frame_fails_every_group_of_its_sender) {
  Engines made({"a", "b"});
  auto first = made.group("first", {0, 1}), second = made.group("second", {0, 1});
  const shoal::Place liar{"127.0.0.2", first[1]->port(), 1001};
  const int fd = shoal::call({"127.0.0.1", first[0]->port()}, {kSecret, keys_of(1)}, {liar.name(), false}, kDeadlineS).first;
  const std::string garbage(sizeof(shoal::FrameHeader), 'x');
  CHECK_EQ(::send(fd, garbage.data(), garbage.size(), MSG_NOSIGNAL), static_cast<ssize_t>(garbage.size()));
  for (auto* engine : {first[0].get(), second[0].get()}) {
    await([&] { return contains(engine->error(), "rank 1 (127.0.0.2, pid 1001) was lost: a frame does not begin"); }, "the liar is named");
  }
  auto later = made.make("later", {0, 1});
  CHECK(later[0]->port() != first[0]->port());
  made.connect(later, {0, 1}, "later");
  sums_are_right(later, {"a", "b"}, 10'000);
  ::close(fd);
}

// Ranks 0 and 1 have two addresses each, rank 2 has one: they use as many as both of a pair have.
TEST(connections_are_spread_over_the_interfaces_of_two_hosts) {
  Group group({"three hosts", {"a", "b", "c"}}, [](shoal::EngineOptions& options) {
    const std::string second = "127.0.0." + std::to_string(options.rank + 11);
    options.address = "127.0.0." + std::to_string(options.rank + 1) + (options.rank < 2 ? "," + second : "");
    options.connections_per_peer = 2;
    options.share_connections = false;
  });
  std::vector<std::vector<float>> inputs;
  for (int rank = 0; rank < 3; ++rank) inputs.push_back(values<float>(300'000, static_cast<std::uint64_t>(rank)));
  const auto expected = in_promised_order<float>({"a", "b", "c"}, inputs, [](float a, float b) { return a + b; });
  group.each([&](int rank, Engine& engine) {
    auto& x = inputs[static_cast<std::size_t>(rank)];
    run(engine, Kind::all_reduce, x.data(), x.data(), x.size());
    CHECK(x == expected);
    const auto counters = engine.counters();
    CHECK_EQ(count_of(counters, "connections"), rank < 2 ? 5u + 3u : 3u + 3u);
    CHECK_EQ(count_of(counters, "paths_lost"), 0u);
  });
  group.close();
}

}  // namespace engine_groups_test
