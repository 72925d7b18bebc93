#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "check.h"
#include "engine_group.h"

namespace engine_collectives_test {

using namespace shoal_test;
using shoal::Combine;
using shoal::Engine;
using shoal::Kind;

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <class T>
std::vector<std::vector<T>> inputs_of(int size, std::size_t count, std::uint64_t seed) {
  std::vector<std::vector<T>> inputs;
  for (int rank = 0; rank < size; ++rank) inputs.push_back(values<T>(count, seed * 100 + static_cast<std::uint64_t>(rank)));
  return inputs;
}

const auto add = [](auto a, auto b) { return static_cast<decltype(a)>(a + b); };
const auto greater = [](auto a, auto b) { return a > b ? a : b; };

std::size_t index_of(int rank) { return static_cast<std::size_t>(rank); }

void all_kinds(Group& group, const Placement& placement, std::size_t count) {
  const int n = group.size();
  const auto floats = inputs_of<float>(n, count, count + 1);
  const auto bytes = inputs_of<std::uint8_t>(n, count, count + 2);
  const auto wide = inputs_of<double>(n, count * index_of(n), count + 3);
  const auto sum = in_promised_order(placement.hosts, floats, add);
  const auto most = in_promised_order(placement.hosts, bytes, greater);
  const auto wide_sum = in_promised_order(placement.hosts, wide, add);
  group.each([&](int rank, Engine& engine) {
    auto x = floats[index_of(rank)];
    run(engine, Kind::all_reduce, x.data(), x.data(), count);  // in place
    CHECK(same_bits(x, sum));

    std::vector<std::uint8_t> y(count);
    run(engine, Kind::all_reduce, bytes[index_of(rank)].data(), y.data(), count, Combine::max);
    CHECK(same_bits(y, most));

    std::vector<std::uint8_t> all(count * index_of(n));
    run(engine, Kind::all_gather, bytes[index_of(rank)].data(), all.data(), count);
    for (int from = 0; from < n; ++from) {
      CHECK(std::equal(bytes[index_of(from)].begin(), bytes[index_of(from)].end(), all.begin() + static_cast<std::ptrdiff_t>(index_of(from) * count)));
    }

    std::vector<double> part(count);
    run(engine, Kind::reduce_scatter, wide[index_of(rank)].data(), part.data(), count);
    const auto begin = wide_sum.begin() + static_cast<std::ptrdiff_t>(index_of(rank) * count);
    CHECK(same_bits(part, std::vector<double>(begin, begin + static_cast<std::ptrdiff_t>(count))));

    for (int root = 0; root < n; ++root) {
      auto sent = floats[index_of(rank)];
      run(engine, Kind::broadcast, sent.data(), sent.data(), count, Combine::sum, root);
      CHECK(same_bits(sent, floats[index_of(root)]));
      std::vector<float> reduced(count, -1.0f);
      run(engine, Kind::reduce, floats[index_of(rank)].data(), reduced.data(), count, Combine::sum, root);
      CHECK(same_bits(reduced, rank == root ? sum : std::vector<float>(count, -1.0f)));
    }
    run<std::uint8_t>(engine, Kind::barrier, nullptr, nullptr, 0);
  });
}

TEST_OVER_EACH(engine_every_kind_on_every_placement) {
  for (const Placement& placement : placements()) {
    Group group(placement);
    for (std::size_t count : {0, 1, 1000, 33'333}) all_kinds(group, placement, count);
    group.close();
  }
}

// 50,003 floats are many chunks a server; the small options force every queue and window to fill.
TEST_OVER_EACH(engine_long_tensors_with_small_windows_and_few_slots) {
  for (const Placement& placement : placements()) {
    Group group(placement, [](shoal::EngineOptions& options) {
      options.chunk_bytes = 8 << 10;
      options.shared_chunk_bytes = 16 << 10;
      options.num_slots = 2;
      options.min_window_bytes = options.window_bytes = 16 << 10;
      options.unexpected_bytes = 16 << 10;
      options.connections_per_peer = 2;
    });
    all_kinds(group, placement, 50'003);
    group.close();
  }
}

// A barrier ends on no rank before it has begun on all.
TEST_OVER_EACH(engine_nobody_passes_a_barrier_before_the_last_comes) {
  for (const Placement& placement : placements()) {
    Group group(placement);
    std::atomic<int> begun{0};
    group.each([&](int rank, Engine& engine) {
      std::this_thread::sleep_for(std::chrono::milliseconds(rank));
      begun.fetch_add(1);
      run<std::uint8_t>(engine, Kind::barrier, nullptr, nullptr, 0);
      CHECK_EQ(begun.load(), group.size());
    });
  }
}

// Dozens of operations of all kinds under way at once, waited for in another order on each rank.
TEST_OVER_EACH(engine_many_operations_in_flight) {
  constexpr std::size_t kOps = 36, kCount = 2001;
  for (const Placement& placement : placements()) {
    Group group(placement);
    const int n = group.size();
    const auto inputs = inputs_of<std::int32_t>(n, kCount, 7);
    const auto sum = in_promised_order(placement.hosts, inputs, [](std::int32_t a, std::int32_t b) {
      return static_cast<std::int32_t>(static_cast<std::uint32_t>(a) + static_cast<std::uint32_t>(b));
    });
    group.each([&](int rank, Engine& engine) {
      const auto& mine = inputs[index_of(rank)];
      std::vector<std::vector<std::int32_t>> outputs(kOps);
      std::vector<std::uint64_t> handles;
      for (std::size_t k = 0; k < kOps; ++k) {
        const int root = static_cast<int>(k) % n;
        outputs[k] = k % 3 == 1 ? mine : std::vector<std::int32_t>(kCount * (k % 3 == 2 ? index_of(n) : 1));
        auto* to = outputs[k].data();
        if (k % 3 == 0) handles.push_back(submit(engine, Kind::all_reduce, mine.data(), to, kCount));
        if (k % 3 == 1) handles.push_back(submit(engine, Kind::broadcast, to, to, kCount, Combine::sum, root));
        if (k % 3 == 2) handles.push_back(submit(engine, Kind::all_gather, mine.data(), to, kCount));
      }
      for (std::size_t k = 0; k < kOps; ++k) must_end(engine, handles[(k * 7 + index_of(rank) * 11) % kOps]);
      for (std::size_t k = 0; k < kOps; ++k) {
        if (k % 3 == 0) CHECK(same_bits(outputs[k], sum));
        if (k % 3 == 1) CHECK(same_bits(outputs[k], inputs[k % index_of(n)]));
        if (k % 3 == 2) CHECK(std::equal(inputs.back().begin(), inputs.back().end(), outputs[k].end() - kCount));
      }
    });
    group.close();
  }
}

// Three groups of the same ranks; even ranks begin in one order and odd ranks in the other. Nothing may wait for
// the callers' order across groups.
TEST_OVER_EACH(engine_groups_overlapping_in_opposite_orders) {
  const Placement placement{"", {"a", "a", "b", "c"}, 1};
  std::vector<std::unique_ptr<Group>> groups;
  for (int k = 0; k < 3; ++k) groups.push_back(std::make_unique<Group>(placement, Group::Tweak{}, "g" + std::to_string(k)));
  constexpr std::size_t kCount = 20'000;
  const auto inputs = inputs_of<float>(4, kCount, 3);
  const auto sum = in_promised_order(placement.hosts, inputs, add);
  on_threads(4, [&](int rank) {
    for (int round = 0; round < 5; ++round) {
      std::vector<std::vector<float>> x(groups.size(), inputs[index_of(rank)]);
      std::vector<std::uint64_t> handles(groups.size());
      std::vector<std::size_t> order(groups.size());
      std::iota(order.begin(), order.end(), 0);
      if (rank % 2) std::reverse(order.begin(), order.end());
      for (std::size_t k : order) handles[k] = submit(groups[k]->engine(rank), Kind::all_reduce, x[k].data(), x[k].data(), kCount);
      for (std::size_t k : order) must_end(groups[k]->engine(rank), handles[k]);
      for (const auto& each : x) CHECK(same_bits(each, sum));
    }
  });
}

// One rank is far ahead: what it sends waits, bounded, until the other begins.
TEST_OVER_EACH(engine_a_rank_that_begins_late) {
  for (const auto& hosts : {std::vector<std::string>{"a", "b", "c"}, {"a", "a", "b"}}) {
    const Placement placement{"", hosts};
    Group group(placement, [](shoal::EngineOptions& options) { options.unexpected_bytes = 64 << 10; });
    constexpr std::size_t kCount = 200'000;
    const auto sent = values<float>(kCount, 1);
    group.each([&](int rank, Engine& engine) {
      std::vector<std::vector<float>> x(4, rank == 0 ? sent : std::vector<float>(kCount));
      if (rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(50));
      std::vector<std::uint64_t> handles;
      for (auto& each : x) handles.push_back(submit(engine, Kind::broadcast, each.data(), each.data(), kCount));
      for (std::uint64_t handle : handles) must_end(engine, handle);
      for (const auto& each : x) CHECK(same_bits(each, sent));
    });
  }
}

TEST_OVER_EACH(engine_then_calls_each_once_in_the_order_of_the_operations) {
  Group group({"", {"a", "b"}});
  group.each([&](int, Engine& engine) {
    std::vector<std::vector<float>> x(8, std::vector<float>(5000, 1.0f));
    std::vector<std::uint64_t> expected, seen;
    std::atomic<std::size_t> num_seen{0};
    for (auto& each : x) expected.push_back(submit(engine, Kind::all_reduce, each.data(), each.data(), each.size()));
    for (const std::uint64_t handle : expected) {
      engine.then(handle, [&, handle] {
        CHECK(engine.is_done(handle));
        seen.push_back(handle);  // one at a time
        ++num_seen;
      });
    }
    while (num_seen < expected.size()) std::this_thread::yield();
    CHECK(seen == expected);
    engine.then(expected.front(), [&] { ++num_seen; });  // long over
    while (num_seen == expected.size()) std::this_thread::yield();
    CHECK_EQ(num_seen.load(), expected.size() + 1);
  });
}

TEST_OVER_EACH(engine_counters_and_trace_while_it_runs) {
  Group group({"", {"a", "a", "b"}});
  group.each([&](int, Engine& engine) {
    engine.trace(true);
    std::vector<float> x(50'000, 1.0f);
    for (int k = 0; k < 5; ++k) {
      const std::uint64_t handle = submit(engine, Kind::all_reduce, x.data(), x.data(), x.size());
      engine.counters();
      engine.take_trace();
      must_end(engine, handle);
    }
    const auto counts = engine.counters();
    CHECK_EQ(counts.at("ops_all_reduce"), 5u);
    CHECK_EQ(counts.at("bytes_all_reduce"), 5u * 200'000u);
    for (const auto& event : engine.take_trace()) CHECK(event.begin_ns <= event.end_ns);
  });
}

}  // namespace engine_collectives_test
