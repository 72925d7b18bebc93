// Threads for one call. They are started by the call and end with it (about 30 us a thread): a process may
// fork at any other time, and no thread of ours competes with torch's between two calls.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>

namespace shoal {

// Runs work() on the caller's thread and on num_threads - 1 others at the same time, fewer where the system
// refuses another thread. work must not throw.
void run_on_threads(int num_threads, const std::function<void()>& work);

// Hands out 0, 1, ... count - 1, each once. Threads that claim their work keep together when one of them
// loses its processor for a while; with fixed shares the others would wait for it.
class Claims {
 public:
  explicit Claims(std::size_t count) : count_(count) {}

  // False when nothing is left.
  bool next(std::size_t& index) {
    index = next_.fetch_add(1, std::memory_order_relaxed);
    return index < count_;
  }

 private:
  std::atomic<std::size_t> next_{0};
  std::size_t count_;
};

}  // namespace shoal
