#include "engine/journal.h"

#include <cstdio>
#include <utility>

#include "base/clock.h"

namespace shoal {

void Journal::note(const std::string& text) {
  std::fprintf(stderr, "shoal: %s\n", text.c_str());
  const MutexLock lock(mutex_);
  events_.push_back(text);
}

std::vector<std::string> Journal::take_events() {
  const MutexLock lock(mutex_);
  return std::exchange(events_, {});
}

void Journal::add_trace(const char* what, std::uint64_t begin_ns, std::uint64_t seq, std::uint64_t chunk) {
  const std::uint64_t end_ns = now_ns();
  const MutexLock lock(mutex_);
  trace_.push_back({what, begin_ns, end_ns, seq, chunk});
}

std::vector<TraceEvent> Journal::take_trace() {
  const MutexLock lock(mutex_);
  return std::exchange(trace_, {});
}

}  // namespace shoal
