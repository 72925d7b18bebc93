#include "engine/block_exchange.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine_group.h"

namespace block_exchange_test {

using namespace shoal_test;
using shoal::Block;
using shoal::BlockExchange;
using shoal::Engine;
using shoal::Kind;
using shoal::OpSpec;

using Row = std::vector<std::int64_t>;
using Rows = std::vector<Row>;

TEST(block_exchange_slots_of_a_rank_have_a_megabyte_or_a_page_each) {
  CHECK_EQ(BlockExchange::slot_bytes(2), std::size_t{64 << 10});
  CHECK_EQ(BlockExchange::slot_bytes(4), std::size_t{64 << 10});
  CHECK_EQ(BlockExchange::slot_bytes(9), std::size_t{32 << 10});
  CHECK_EQ(BlockExchange::slot_bytes(1000), std::size_t{4 << 10});
}

// What rank `from` sends to rank `to` in exchange `number`: nothing, a few, or more than all slots between them hold.
Row sent(int from, int to, int number) {
  const std::size_t counts[] = {3, 0, 50'000, 8192, 8193};
  const auto which = static_cast<std::size_t>(from + 2 * to + number) % 5;
  return values<std::int64_t>(counts[which], static_cast<std::uint64_t>(100 * number + 10 * from + to + 1));
}

std::vector<Block> blocks(Rows& rows) {
  std::vector<Block> found;
  for (Row& row : rows) found.push_back({reinterpret_cast<std::byte*>(row.data()), row.size()});
  return found;
}

// An all_to_all, or a gather or scatter whose root it is, with its memory.
struct Exchange {
  Rows given, taken, wanted;
  OpSpec spec;

  Exchange(Kind kind, int rank, int size, int number, int root) {
    spec.kind = kind;
    spec.element = shoal::Element::int64;
    spec.root = kind == Kind::all_to_all ? 0 : root;
    spec.timeout_s = kDeadlineS;
    spec.shape = {7};
    const bool sends_all = kind == Kind::all_to_all || (kind == Kind::scatter && rank == root);
    const bool takes_all = kind == Kind::all_to_all || (kind == Kind::gather && rank == root);
    for (int peer = 0; peer < size; ++peer) {
      if (sends_all || (kind == Kind::gather && peer == root)) given.push_back(sent(rank, peer, number));
      if (takes_all || (kind == Kind::scatter && peer == root)) wanted.push_back(sent(peer, rank, number));
    }
    for (const Row& row : wanted) taken.emplace_back(row.size());
    if (sends_all) spec.inputs = blocks(given);
    else if (!given.empty()) spec.input = blocks(given)[0].data, spec.count = given[0].size();
    if (takes_all) spec.outputs = blocks(taken);
    else if (!taken.empty()) spec.output = blocks(taken)[0].data, spec.count = taken[0].size();
  }
};

// Many exchanges under way at once, among sums of all sizes, waited for in other orders by the ranks.
TEST(block_exchange_follows_the_order_of_operations) {
  for (const int n : {2, 3, 5}) {
    Group group({"", std::vector<std::string>(static_cast<std::size_t>(n), "a")});
    group.each([&](int rank, Engine& engine) {
      const Kind kinds[] = {Kind::all_to_all, Kind::gather, Kind::scatter};
      std::vector<std::unique_ptr<Exchange>> exchanges;
      std::vector<Row> sums;
      std::vector<std::uint64_t> handles;
      for (int k = 0; k < 30; ++k) {
        exchanges.push_back(std::make_unique<Exchange>(kinds[k % 3], rank, n, k, k % n));
        handles.push_back(engine.submit(exchanges.back()->spec));
        sums.emplace_back(k % 4 == 1 ? 30'000 : 5, rank + k);
        handles.push_back(submit(engine, Kind::all_reduce, sums.back().data(), sums.back().data(), sums.back().size()));
      }
      for (std::size_t k = 0; k < handles.size(); ++k) must_end(engine, handles[rank % 2 ? k : handles.size() - 1 - k]);
      for (int k = 0; k < 30; ++k) {
        const auto at = static_cast<std::size_t>(k);
        CHECK(exchanges[at]->taken == exchanges[at]->wanted);
        CHECK(sums[at] == Row(sums[at].size(), n * k + n * (n - 1) / 2));
      }
    });
    group.close();
  }
}

// Nobody waits: ranks with a callback, ranks that poll or do nothing at all still send and receive all of it.
TEST(block_exchange_completes_without_a_waiting_caller) {
  Group group({"", {"a", "a", "a"}});
  std::atomic<int> num_done{0};
  group.each([&](int rank, Engine& engine) {
    for (int number = 0; number < 20; ++number) {
      Exchange exchange(Kind::all_to_all, rank, 3, number, 0);
      const std::uint64_t handle = engine.submit(exchange.spec);
      if (rank == 0) {
        std::atomic<bool> ended{false};
        engine.then(handle, [&] { ended = true; });
        while (!ended) std::this_thread::yield();
      } else if (rank == 1) {
        while (!engine.is_done(handle)) std::this_thread::yield();
      } else {
        engine.on_end(handle, [&] { ++num_done; });
        while (num_done <= number) std::this_thread::yield();
      }
      CHECK(exchange.taken == exchange.wanted);
    }
  });
  group.close();
}

// A rank that is elsewhere lets others begin as much as they want; what they have begun goes on without them.
TEST(block_exchange_waits_for_a_rank_that_is_late) {
  Group group({"", {"a", "a"}});
  constexpr int kNumOps = 12;
  std::atomic<bool> begun{false};
  group.each([&](int rank, Engine& engine) {
    std::vector<std::unique_ptr<Exchange>> exchanges;
    std::vector<std::uint64_t> handles;
    engine.trace(true);
    while (rank == 1 && !begun) std::this_thread::yield();
    for (int number = 0; number < kNumOps; ++number) {
      exchanges.push_back(std::make_unique<Exchange>(Kind::all_to_all, rank, 2, number, 0));
      handles.push_back(engine.submit(exchanges.back()->spec));
    }
    begun = true;
    if (rank == 1) must_end(engine, handles.back());  // rank 0 waits for none: its thread does the work
    else await([&] { return engine.counters().at("ops_all_to_all") == kNumOps && engine.is_done(handles.back()); }, "the last exchange");
    for (const std::uint64_t handle : handles) must_end(engine, handle);
    for (const auto& each : exchanges) CHECK(each->taken == each->wanted);
    const std::vector<shoal::TraceEvent> trace = engine.take_trace();
    const auto in_slot = [&](const shoal::TraceEvent& each) { return each.what == "copy out" && each.seq == handles.back(); };
    CHECK(std::any_of(trace.begin(), trace.end(), in_slot));
  });
  group.close();
}

// Of the operation or, on ranks whose own part of it fits, of the barrier behind it.
std::string failure_of(Engine& engine, const OpSpec& spec) {
  try {
    must_end(engine, engine.submit(spec));
    run<std::uint8_t>(engine, Kind::barrier, nullptr, nullptr, 0);
    return "nothing failed";
  } catch (const shoal::GroupError& error) {
    return error.what();
  }
}

TEST(block_exchange_names_both_ranks_of_sizes_that_do_not_fit) {
  Group group({"", {"a", "a", "a"}});
  group.each([&](int rank, Engine& engine) {
    Exchange exchange(Kind::all_to_all, rank, 3, 0, 0);
    if (rank == 2) {
      exchange.taken[0].resize(exchange.taken[0].size() + 2);
      exchange.spec.outputs = blocks(exchange.taken);
    }
    const std::string why = failure_of(engine, exchange.spec);
    const std::size_t count = sent(0, 2, 0).size();
    CHECK(contains(why, "the ranks do not agree about the part of operation #0, all_to_all of int64[7], from rank 0"));
    CHECK(contains(why, "it sends " + std::to_string(count) + " elements of int64, and " + std::to_string(count + 2) + " elements"));
  });
}

TEST(block_exchange_names_the_operations_of_ranks_that_disagree) {
  Group group({"", {"a", "a"}});
  group.each([&](int rank, Engine& engine) {
    Exchange exchange(Kind::all_to_all, rank, 2, 0, 0);
    if (rank) exchange.spec.element = shoal::Element::float64;
    const std::string why = failure_of(engine, exchange.spec);
    CHECK(contains(why, "the ranks do not agree about operation #0"));
    CHECK(contains(why, "all_to_all of int64[7]"));
    CHECK(contains(why, "all_to_all of float64[7]"));
  });
}

}  // namespace block_exchange_test
