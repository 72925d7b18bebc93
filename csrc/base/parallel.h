// Threads for one call. They are started by the call and end with it (about 30 us a thread): a process may
// fork at any other time, and no thread of ours competes with torch's between two calls.
#pragma once

#include <cstddef>
#include <functional>

namespace shoal {

// Calls work(part, num_parts) for each part, every one on a thread of its own, part 0 on the caller's. All
// parts run at the same time, so they may wait for each other at a barrier. num_parts is max_parts, or less
// where the system refuses another thread. work must not throw.
void run_parts(int max_parts, const std::function<void(int part, int num_parts)>& work);

// The range of `part` when `count` items are dealt out in contiguous ranges whose bounds are multiples of
// `granule`.
struct Range {
  std::size_t begin;
  std::size_t end;
};
Range range_of_part(std::size_t count, std::size_t granule, int part, int num_parts);

}  // namespace shoal
