#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "engine_group.h"

namespace messages_test {

using namespace shoal_test;
using shoal::Block;
using shoal::Engine;
using shoal::GroupError;
using shoal::Kind;
using shoal::OpSpec;

using Rows = std::vector<std::vector<std::int32_t>>;

// Returns what rank `from` sends to rank `to`: empty for some pairs. Made once: sanitizers look at each element.
const std::vector<std::int32_t>& sent(int from, int to, std::size_t scale) {
  static std::mutex mutex;
  static std::map<std::tuple<int, int, std::size_t>, std::vector<std::int32_t>> made;
  const std::lock_guard lock(mutex);
  const auto [place, is_new] = made.try_emplace({from, to, scale});
  if (is_new) {
    const std::size_t count = scale * static_cast<std::size_t>((3 * from + to) % 4);
    place->second = values<std::int32_t>(count, static_cast<std::uint64_t>(100 * from + to + 1));
  }
  return place->second;
}

std::vector<Block> blocks(Rows& rows) {
  std::vector<Block> found;
  for (auto& row : rows) found.push_back({reinterpret_cast<std::byte*>(row.data()), row.size()});
  return found;
}

OpSpec spec_of(Kind kind, int root = 0) {
  OpSpec spec;
  spec.kind = kind;
  spec.element = shoal::Element::int32;
  spec.root = root;
  spec.timeout_s = kDeadlineS;
  spec.shape = {7};
  return spec;
}

OpSpec message_of(Kind kind, int peer, std::vector<std::int32_t>& data, int tag = 0) {
  OpSpec spec = spec_of(kind, peer);
  spec.input = spec.output = reinterpret_cast<std::byte*>(data.data());
  spec.count = data.size();
  spec.tag = tag;
  return spec;
}

void exchange(Engine& engine, int rank, int size, std::size_t scale) {
  Rows given, taken;
  for (int peer = 0; peer < size; ++peer) {
    given.push_back(sent(rank, peer, scale));
    taken.emplace_back(sent(peer, rank, scale).size());
  }
  OpSpec spec = spec_of(Kind::all_to_all);
  spec.inputs = blocks(given);
  spec.outputs = blocks(taken);
  must_end(engine, engine.submit(spec));
  for (int peer = 0; peer < size; ++peer) CHECK(taken[static_cast<std::size_t>(peer)] == sent(peer, rank, scale));
}

void gather_and_scatter(Engine& engine, int rank, int size, int root, std::size_t scale) {
  Rows rows, given;
  for (int peer = 0; peer < size; ++peer) {
    rows.emplace_back(sent(peer, root, scale).size());
    given.push_back(sent(root, peer, scale));
  }
  auto mine = sent(rank, root, scale);
  OpSpec gather = spec_of(Kind::gather, root);
  gather.input = reinterpret_cast<const std::byte*>(mine.data());
  gather.count = mine.size();
  if (rank == root) gather.outputs = blocks(rows);
  std::vector<std::int32_t> part(sent(root, rank, scale).size());
  OpSpec scatter = spec_of(Kind::scatter, root);
  scatter.output = reinterpret_cast<std::byte*>(part.data());
  scatter.count = part.size();
  if (rank == root) scatter.inputs = blocks(given);
  const std::uint64_t first = engine.submit(gather), second = engine.submit(scatter);
  must_end(engine, second);
  must_end(engine, first);
  CHECK(part == sent(root, rank, scale));
  for (int peer = 0; rank == root && peer < size; ++peer) CHECK(rows[static_cast<std::size_t>(peer)] == sent(peer, root, scale));
}

// A message to each rank under each of two tags, received in another order than sent; some are empty, some large.
void messages(Engine& engine, int rank, int size, std::size_t scale) {
  std::vector<std::uint64_t> handles;
  Rows given, taken;
  given.reserve(static_cast<std::size_t>(2 * size));
  taken.reserve(static_cast<std::size_t>(2 * size));
  for (int tag = 0; tag < 2; ++tag) {
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      given.push_back(sent(rank, peer, scale + static_cast<std::size_t>(tag)));
      handles.push_back(engine.submit(message_of(Kind::send, peer, given.back(), tag)));
    }
  }
  for (int tag = 1; tag >= 0; --tag) {
    for (int peer = size - 1; peer >= 0; --peer) {
      if (peer == rank) continue;
      taken.emplace_back(sent(peer, rank, scale + static_cast<std::size_t>(tag)).size());
      handles.push_back(engine.submit(message_of(Kind::recv, peer, taken.back(), tag)));
    }
  }
  for (const std::uint64_t handle : handles) must_end(engine, handle);
  std::size_t k = 0;
  for (int tag = 1; tag >= 0; --tag) {
    for (int peer = size - 1; peer >= 0; --peer) {
      if (peer != rank) CHECK(taken[k++] == sent(peer, rank, scale + static_cast<std::size_t>(tag)));
    }
  }
}

void all_of_them(Group& group, std::size_t scale) {
  group.each([&](int rank, Engine& engine) {
    exchange(engine, rank, group.size(), scale);
    for (int root = 0; root < group.size(); ++root) gather_and_scatter(engine, rank, group.size(), root, scale);
    messages(engine, rank, group.size(), scale);
    std::vector<float> x(1000, 1.0f);
    run(engine, Kind::all_reduce, x.data(), x.data(), x.size());
    CHECK_EQ(x[999], static_cast<float>(group.size()));
  });
}

TEST_OVER_EACH(messages_of_all_sizes_on_every_placement) {
  for (const Placement& placement : placements()) {
    Group group(placement);
    for (std::size_t scale : {0, 1, 1000, 20'001}) all_of_them(group, scale);
    group.close();
  }
}

// Ranks with different local indices on different hosts exchange no chunks: the first message in either direction connects them.
TEST(messages_bring_connections_for_data) {
  Group group({"two hosts of two", {"a", "a", "b", "b"}});
  const auto connections = [&](int rank) { return count_of(group.engine(rank).counters(), "connections"); };
  group.each([&](int, Engine& engine) {
    std::vector<float> x(100'003, 1.0f), all(4 * x.size());
    for (Kind kind : {Kind::all_reduce, Kind::broadcast, Kind::reduce}) {
      for (int root = 0; root < 4; ++root) run(engine, kind, x.data(), x.data(), x.size(), shoal::Combine::max, root);
    }
    run(engine, Kind::all_gather, x.data(), all.data(), x.size());
    run(engine, Kind::reduce_scatter, all.data(), x.data(), x.size());
  });
  for (int rank = 0; rank < 4; ++rank) CHECK_EQ(connections(rank), 3u);  // to its host's other rank; to the one in its place, and for data
  all_of_them(group, 1000);
  for (int rank = 0; rank < 4; ++rank) CHECK_EQ(connections(rank), 5u);
  all_of_them(group, 1000);
  group.close();
}

TEST_OVER_EACH(messages_connect_ranks_from_either_side) {
  for (const int sender : {0, 3}) {
    Group group({"two hosts of two", {"a", "a", "b", "b"}});
    const int receiver = 3 - sender;
    const auto sent = values<float>(50'000, 1);
    group.each([&](int rank, Engine& engine) {
      std::vector<float> got(sent.size());
      if (rank == sender) run(engine, Kind::send, sent.data(), static_cast<float*>(nullptr), sent.size(), shoal::Combine::sum, receiver);
      if (rank != receiver) return;
      run(engine, Kind::recv, static_cast<const float*>(nullptr), got.data(), got.size(), shoal::Combine::sum, sender);
      CHECK(got == sent);
    });
    group.close();
  }
}

// Nothing may be sent unasked, or little: every message but the empty ones is offered first.
TEST_OVER_EACH(messages_with_little_room) {
  for (const std::size_t unexpected : {0, 5000}) {
    for (const Placement& placement : placements()) {
      Group group(placement, [&](shoal::EngineOptions& options) {
        options.chunk_bytes = 4 << 10;
        options.unexpected_bytes = unexpected;
        options.connections_per_peer = 2;
      });
      for (std::size_t scale : {1, 300, 7'001}) all_of_them(group, scale);
      group.close();
    }
  }
}

// Messages of one tag arrive in order, of any size, whether a receiver names their source or not.
TEST_OVER_EACH(messages_keep_their_order_and_tell_their_source) {
  Group group({"", {"a", "b", "b"}}, [](shoal::EngineOptions& options) {
    options.chunk_bytes = 4 << 10;
    options.unexpected_bytes = 16 << 10;
    options.connections_per_peer = 3;
  });
  constexpr int kMessages = 60;
  group.each([&](int rank, Engine& engine) {
    Rows data;
    std::vector<std::uint64_t> handles;
    std::vector<std::int32_t> sources(2 * kMessages, -1);
    data.reserve(2 * kMessages);
    const auto size_of = [](int k) { return k % 3 == 0 ? std::size_t{1} : static_cast<std::size_t>(50 * k); };
    if (rank > 0) {
      for (int k = 0; k < kMessages; ++k) {
        data.emplace_back(1 + size_of(k), 1000 * rank + k);
        data.back()[0] = static_cast<std::int32_t>(size_of(k));
        handles.push_back(engine.submit(message_of(Kind::send, 0, data.back(), k % 2)));
      }
      for (const std::uint64_t handle : handles) must_end(engine, handle);
      return;
    }
    // of each tag and rank the sizes are known: even numbers of messages have tag 0
    for (int tag = 1; tag >= 0; --tag) {
      for (int k = tag; k < kMessages; k += 2) {
        for (int from = 1; from < 3; ++from) {
          data.emplace_back(1 + size_of(k));
          OpSpec spec = message_of(Kind::recv, from, data.back(), tag);
          spec.source = &sources[data.size() - 1];
          must_end(engine, engine.submit(spec));
          CHECK_EQ(data.back().back(), 1000 * from + k);
          CHECK_EQ(sources[data.size() - 1], from);
        }
      }
    }
  });
  // from any rank: both come, once
  group.each([&](int rank, Engine& engine) {
    std::vector<std::int32_t> one{rank};
    if (rank > 0) return must_end(engine, engine.submit(message_of(Kind::send, 0, one, 5)));
    int seen = 0;
    for (int k = 0; k < 2; ++k) {
      std::int32_t source = -1;
      OpSpec spec = message_of(Kind::recv, -1, one, 5);
      spec.source = &source;
      must_end(engine, engine.submit(spec));
      CHECK_EQ(one[0], source);
      seen += source;
    }
    CHECK_EQ(seen, 3);
  });
  group.close();
}

std::string failure_of(Engine& engine, const OpSpec& spec) {
  try {
    CHECK(engine.wait(engine.submit(spec), 2 * kDeadlineS));
    return "it did not fail";
  } catch (const GroupError& error) {
    return error.what();
  }
}

TEST_OVER_EACH(messages_that_do_not_fit_name_both_sides) {
  for (const char* second : {"a", "b"}) {
    for (const std::size_t size : {10, 100'000}) {
      Group group({"", {"a", second}});
      group.each([&](int rank, Engine& engine) {
        std::vector<std::int32_t> data(rank ? size : 3);
        const std::string why = failure_of(engine, message_of(rank ? Kind::recv : Kind::send, 1 - rank, data, 4));
        if (rank == 0 && why == "it did not fail") return;  // a small message is sent when it is on its way
        CHECK(contains(why, "the message (tag 4) from rank 0"));
        CHECK(contains(why, "it sends 3 elements of int32, and " + std::to_string(size) + " elements of int32 are expected"));
      });
    }
  }
}

TEST_OVER_EACH(messages_of_another_operation_are_a_mismatch) {
  for (const char* second : {"a", "b"}) {
    Group group({"", {"a", second}});
    group.each([&](int rank, Engine& engine) {
      Rows rows(2, std::vector<std::int32_t>(3));
      OpSpec spec = spec_of(rank ? Kind::all_reduce : Kind::all_to_all);
      std::vector<std::int32_t> x(3);
      spec.input = spec.output = reinterpret_cast<std::byte*>(x.data());
      spec.count = rank ? 3 : 6;
      spec.shape = {static_cast<std::int64_t>(spec.count)};
      Rows taken(2, std::vector<std::int32_t>(3));
      if (!rank) spec.inputs = blocks(rows), spec.outputs = blocks(taken);
      const std::string why = failure_of(engine, spec);
      CHECK(contains(why, "the ranks do not agree about operation #0"));
      CHECK(contains(why, "all_to_all of int32[6]"));
      CHECK(contains(why, "all_reduce of int32[3] (sum)"));
    });
  }
}

// A receive ends when its rank has left, when its deadline passes, and when the group is aborted; a message that was
// sent before the sender left still arrives.
TEST_OVER_EACH(messages_of_a_rank_that_leaves) {
  for (const char* second : {"a", "b"}) {
    Group group({"", {"a", second}});
    group.each([&](int rank, Engine& engine) {
      std::vector<std::int32_t> data(1000, 7 * rank);
      if (rank == 1) {
        must_end(engine, engine.submit(message_of(Kind::send, 0, data)));
        return engine.close();
      }
      must_end(engine, engine.submit(message_of(Kind::recv, 1, data)));
      CHECK_EQ(data[999], 7);
      const std::string why = failure_of(engine, message_of(Kind::recv, 1, data));
      CHECK(contains(why, "rank 1 (127.0.0.1, pid 1001) has left the group, and recv of int32[7] from rank 1"));
    });
  }
}

TEST_OVER_EACH(messages_have_deadlines_and_are_aborted) {
  for (const bool aborts : {false, true}) {
    Group group({"", {"a", "a", "b"}});
    std::atomic<int> waiting{0};
    group.each([&](int rank, Engine& engine) {
      std::vector<std::int32_t> data(100'000);
      if (rank == 2) {
        while (waiting < 2) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        if (aborts) return engine.abort("the reason");
        while (engine.error().empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return;
      }
      OpSpec spec = message_of(rank ? Kind::send : Kind::recv, rank ? 2 : -1, data);
      if (!aborts) spec.timeout_s = rank ? 1.5 : 0.5;
      const std::uint64_t handle = engine.submit(spec);
      waiting.fetch_add(1);
      const std::string why = CHECK_THROWS(GroupError, engine.wait(handle, kDeadlineS));
      CHECK(contains(why, aborts ? "the reason" : "the timeout of 0.5 s passed for recv of int32[7] from any rank"));
    });
  }
}

TEST(messages_that_are_not_possible_are_refused) {
  Group group({"", {"a", "b"}});
  group.each([&](int rank, Engine& engine) {
    std::vector<std::int32_t> data(4);
    for (const int peer : {rank, 2, -1}) {
      const std::string why = CHECK_THROWS(std::invalid_argument, engine.submit(message_of(Kind::send, peer, data)));
      CHECK_EQ(why, "a message between rank " + std::to_string(rank) + " and rank " + std::to_string(peer) + " of a group of 2");
    }
    OpSpec spec = spec_of(Kind::all_to_all);
    CHECK(contains(CHECK_THROWS(std::invalid_argument, engine.submit(spec)), "all_to_all has 0 inputs and 0 outputs where 2 and 2"));
    Rows rows{std::vector<std::int32_t>(4), std::vector<std::int32_t>(4)};
    spec.inputs = spec.outputs = blocks(rows);
    CHECK(contains(CHECK_THROWS(std::invalid_argument, engine.submit(spec)), "overlaps an input"));
    Rows other{std::vector<std::int32_t>(3), std::vector<std::int32_t>(3)};
    spec.outputs = blocks(other);
    CHECK(contains(CHECK_THROWS(std::invalid_argument, engine.submit(spec)), "gives itself 4 elements and takes 3"));
  });
  group.close();
}

}  // namespace messages_test
