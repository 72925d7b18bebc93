#include "engine/direct_exchange.h"

#include <atomic>
#include <map>

#include "check.h"
#include "engine_group.h"

namespace direct_exchange_test {

using namespace shoal_test;
using shoal::DirectExchange;
using shoal::Engine;
using shoal::Kind;

TEST(direct_exchange_takes_what_fits_a_cell) {
  shoal::OpSpec spec;
  spec.element = shoal::Element::float32;
  for (const auto& [kind, ranks, most] : {std::tuple{Kind::all_reduce, 2, 64 << 10},
                                          {Kind::all_gather, 2, 64 << 10},
                                          {Kind::reduce_scatter, 2, 32 << 10},
                                          {Kind::all_reduce, 8, 32 << 10}}) {
    spec.kind = kind;
    spec.count = static_cast<std::uint64_t>(most) / 4;
    CHECK(DirectExchange::takes(spec, ranks));
    ++spec.count;
    CHECK(!DirectExchange::takes(spec, ranks));
  }
  spec.kind = Kind::barrier;
  spec.count = 0;
  CHECK(DirectExchange::takes(spec, 4));
}

// More operations than cells, of all kinds and sizes on both sides of the limit, waited for in other orders.
TEST(direct_exchange_and_chunks_mix_in_any_order) {
  for (int n : {2, 3, 5}) {
    Group group({"", std::vector<std::string>(static_cast<std::size_t>(n), "a")});
    std::vector<std::size_t> counts;
    for (std::size_t k = 0; k < 60; ++k) counts.push_back(k % 7 == 3 ? 30'000 : 1 + (k * 97) % 500);
    group.each([&](int rank, Engine& engine) {
      std::vector<std::vector<std::int64_t>> x;
      std::vector<std::uint64_t> handles;
      for (std::size_t k = 0; k < counts.size(); ++k) {
        x.emplace_back(counts[k], static_cast<std::int64_t>(k) + rank);
        handles.push_back(submit(engine, Kind::all_reduce, x[k].data(), x[k].data(), counts[k]));
      }
      for (std::size_t k = counts.size(); k-- > 0;) {
        const std::size_t index = rank % 2 ? k : counts.size() - 1 - k;
        must_end(engine, handles[index]);
        const auto sum = static_cast<std::int64_t>(index) * n + n * (n - 1) / 2;
        CHECK(x[index] == std::vector<std::int64_t>(counts[index], sum));
      }
    });
  }
}

// Nobody waits: a rank with a callback, one that polls or does nothing still gets its result.
TEST(direct_exchange_completes_without_a_waiting_caller) {
  Group group({"", {"a", "a"}});
  group.each([&](int rank, Engine& engine) {
    for (int round = 0; round < 200; ++round) {
      float x = 1;
      const std::uint64_t handle = submit(engine, Kind::all_reduce, &x, &x, 1);
      if (rank == 0) {
        std::atomic<bool> ended{false};
        engine.then(handle, [&] { ended = true; });
        while (!ended) std::this_thread::yield();
      } else {
        while (!engine.is_done(handle)) std::this_thread::yield();
      }
      CHECK_EQ(x, 2.0f);
    }
    engine.trace(true);
    float x = 1;
    const std::uint64_t last = submit(engine, Kind::all_reduce, &x, &x, 1);
    bool copied_out = false;
    while (!copied_out) {  // the stage looks five times a second
      for (const shoal::TraceEvent& each : engine.take_trace()) copied_out |= each.what == "copy out" && each.seq == last;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    must_end(engine, last);
    CHECK_EQ(x, 2.0f);
  });
}

// Several threads of a rank wait for different operations.
TEST(direct_exchange_several_callers_wait_at_once) {
  Group group({"", {"a", "a"}});
  group.each([&](int, Engine& engine) {
    constexpr std::size_t kThreads = 4;
    for (int round = 0; round < 50; ++round) {
      std::vector<float> x(kThreads, 1.0f);
      std::vector<std::uint64_t> handles;
      for (float& each : x) handles.push_back(submit(engine, Kind::all_reduce, &each, &each, 1));
      on_threads(kThreads, [&](int k) { must_end(engine, handles[static_cast<std::size_t>(k)]); });
      CHECK(x == std::vector<float>(kThreads, 2.0f));
    }
  });
}

TEST(direct_exchange_a_rank_that_is_behind_blocks_no_memory_of_others) {
  Group group({"", {"a", "a"}});
  constexpr int kOps = 4 * static_cast<int>(DirectExchange::kNumCells);
  std::atomic<bool> begun{false};
  group.each([&](int rank, Engine& engine) {
    std::vector<float> x(kOps, 1.0f);
    std::vector<std::uint64_t> handles;
    if (rank == 1) {
      while (!begun) std::this_thread::yield();
    }
    for (float& each : x) handles.push_back(submit(engine, Kind::all_reduce, &each, &each, 1));  // never waits
    begun = true;
    for (std::uint64_t handle : handles) must_end(engine, handle);
    CHECK(x == std::vector<float>(kOps, 2.0f));
  });
}

// A failure ends the wait of a caller that spins, yields or sleeps.
TEST(direct_exchange_an_abort_frees_callers_that_drive) {
  for (int delay_ms : {0, 2, 300}) {
    Group group({"", {"a", "a"}});
    group.each([&](int rank, Engine& engine) {
      float x = 1;
      if (rank == 1) {
        std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
        engine.abort("the reason");
        return;
      }
      std::string why;
      try {
        engine.wait(submit(engine, Kind::all_reduce, &x, &x, 1), kDeadlineS);
      } catch (const shoal::GroupError& error) {
        why = error.what();
      }
      CHECK(why.find("the reason") != std::string::npos);
      CHECK_EQ(x, 1.0f);
    });
  }
}

}  // namespace direct_exchange_test
