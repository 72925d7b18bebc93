// Several threads that read and write the connections of a process: what arrives, and what touches callers' memory.
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "check.h"
#include "engine_group.h"

namespace tcp_threads_test {

using namespace shoal_test;
using shoal::Engine;
using shoal::GroupError;
using shoal::Kind;

Group::Tweak with_threads(int threads) {
  return [threads](shoal::EngineOptions& options) {
    options.network_threads = options.connections_per_peer = threads;
    options.chunk_bytes = 64 << 10;
  };
}

// Operations of all sizes overlap, in place and not: each has the bits of the sum in the order of the hosts.
TEST(tcp_threads_sum_with_the_same_bits) {
  for (const int threads : {1, 2, 4}) {
    for (const int num_helpers : {0, 2}) {
      Group group({"", {"a", "b", "c"}, num_helpers}, with_threads(threads));
      const std::vector<std::size_t> counts = {1, 1000, 100'000, 40'000, 300'000, 7};
      std::vector<std::vector<std::vector<float>>> inputs(counts.size());
      for (std::size_t k = 0; k < counts.size(); ++k) {
        for (std::size_t rank = 0; rank < 3; ++rank) inputs[k].push_back(values<float>(counts[k], 3 * k + rank));
      }
      group.each([&](int rank, Engine& engine) {
        std::vector<std::vector<float>> outputs;
        std::vector<std::uint64_t> handles;
        for (std::size_t k = 0; k < counts.size(); ++k) outputs.push_back(inputs[k][static_cast<std::size_t>(rank)]);
        for (std::size_t k = 0; k < counts.size(); ++k) {
          const float* input = k % 2 ? outputs[k].data() : inputs[k][static_cast<std::size_t>(rank)].data();
          handles.push_back(submit(engine, Kind::all_reduce, input, outputs[k].data(), counts[k]));
        }
        for (std::uint64_t handle : handles) must_end(engine, handle);
        for (std::size_t k = 0; k < counts.size(); ++k) {
          CHECK(outputs[k] == in_promised_order({"a", "b", "c"}, inputs[k], [](float a, float b) { return a + b; }));
        }
      });
    }
  }
}

// An operation ends in the middle of its results, by an abort or a lost peer: nothing reads or writes its memory
// afterwards. The thread sanitizer sees a thread that does, the pattern shows what it has written.
void end_in_the_middle(int threads, const std::function<void(Group&)>& ends) {
  constexpr std::size_t kCount = 1'000'000;
  constexpr std::uint32_t kPattern = 0x5ca1ab1e;
  for (int round = 0; round < 6; ++round) {
    Group group({"", {"a", "b"}}, with_threads(threads));
    std::atomic<int> begun{0};
    std::thread ending([&] {
      while (begun < 2) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::microseconds(300 * round));
      ends(group);
    });
    group.each([&](int, Engine& engine) {
      std::vector<float> x(kCount, 1.0f), y(kCount, 2.0f);
      const auto number = [&](std::vector<float>& of) {
        return submit(engine, Kind::all_reduce, of.data(), of.data(), kCount);
      };
      try {
        for (int k = 0; k < 50; ++k) {
          const std::uint64_t first = number(x), second = number(y);
          begun.fetch_add(k == 0);
          CHECK(engine.wait(first, kDeadlineS));
          CHECK(engine.wait(second, kDeadlineS));
        }
      } catch (const GroupError&) {
      }
      std::vector<std::uint32_t> pattern(kCount, kPattern);
      for (auto* each : {&x, &y}) std::memcpy(each->data(), pattern.data(), kCount * sizeof(float));
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      for (auto* each : {&x, &y}) CHECK(std::memcmp(each->data(), pattern.data(), kCount * sizeof(float)) == 0);
    });
    ending.join();
  }
}

TEST(tcp_threads_leave_the_memory_of_an_aborted_operation) {
  end_in_the_middle(3, [](Group& group) { group.engine(0).abort("the reason"); });
}

TEST(tcp_threads_leave_the_memory_when_a_peer_is_lost) {
  end_in_the_middle(3, [](Group& group) { group.engine(1).close(); });
}

}  // namespace tcp_threads_test
