#include "base/parallel.h"

#include <system_error>
#include <thread>
#include <vector>

namespace shoal {

void run_on_threads(int num_threads, const std::function<void()>& work) {
  std::vector<std::thread> threads;
  for (int index = 1; index < num_threads; ++index) {
    try {
      threads.emplace_back(work);
    } catch (const std::system_error&) {
      break;
    }
  }
  work();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace shoal
