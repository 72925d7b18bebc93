#include "base/parallel.h"

#include <atomic>
#include <system_error>
#include <thread>
#include <vector>

namespace shoal {

void run_parts(int max_parts, const std::function<void(int, int)>& work) {
  // The threads wait for the number of parts, which is known only once all of them have started.
  std::atomic<int> num_parts{0};
  std::vector<std::thread> threads;
  for (int part = 1; part < max_parts; ++part) {
    try {
      threads.emplace_back([&num_parts, &work, part] {
        num_parts.wait(0);
        work(part, num_parts.load());
      });
    } catch (const std::system_error&) {
      break;
    }
  }
  const int started = static_cast<int>(threads.size()) + 1;
  num_parts.store(started);
  num_parts.notify_all();
  work(0, started);
  for (std::thread& thread : threads) thread.join();
}

Range range_of_part(std::size_t count, std::size_t granule, int part, int num_parts) {
  const std::size_t granules = (count + granule - 1) / granule;
  const auto bound = [&](int index) {
    const std::size_t at = granules * static_cast<std::size_t>(index) / static_cast<std::size_t>(num_parts);
    return at * granule < count ? at * granule : count;
  };
  return {bound(part), bound(part + 1)};
}

}  // namespace shoal
