// Threads of a single call, started and joined by it (about 30 us per thread): the process may fork at any other
// time, and no idle threads compete with torch's between calls.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>

namespace shoal {

// Runs work() on the caller's thread and num_threads - 1 others concurrently, fewer if the system refuses a thread.
// work must not throw.
void run_on_threads(int num_threads, const std::function<void()>& work);

// Hands out 0, 1, ... count - 1, each once. With dynamic claims, threads finish together even if one of them is
// descheduled for a while; with fixed shares the others would wait for it.
class Claims {
 public:
  explicit Claims(std::size_t count) : count_(count) {}

  // Returns false when none is left.
  bool next(std::size_t& index) {
    index = next_.fetch_add(1, std::memory_order_relaxed);
    return index < count_;
  }

 private:
  std::atomic<std::size_t> next_{0};
  std::size_t count_;
};

}  // namespace shoal
