#include "engine/journal.h"

#include <cstdio>
#include <utility>

#include "base/clock.h"

namespace shoal {

void Journal::count(const OpSpec& spec) {
  const std::uint64_t bytes = spec.count * size_of(spec.element);
  if (spec.kind == Kind::delegated) {
    const MutexLock lock(mutex_);
    delegated_["ops_" + spec.name] += 1;
    delegated_["bytes_" + spec.name] += bytes;
    return;
  }
  Count& counted = counts_[static_cast<std::size_t>(spec.kind)];
  counted.ops.fetch_add(1, std::memory_order_relaxed);
  counted.bytes.fetch_add(bytes, std::memory_order_relaxed);
}

std::map<std::string, std::uint64_t> Journal::counters() {
  const MutexLock lock(mutex_);
  auto counts = delegated_;
  for (std::size_t kind = 0; kind < counts_.size(); ++kind) {
    if (!counts_[kind].ops) continue;
    const std::string name(name_of(static_cast<Kind>(kind)));
    counts["ops_" + name] += counts_[kind].ops;
    counts["bytes_" + name] += counts_[kind].bytes;
  }
  return counts;
}

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
