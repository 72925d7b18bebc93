// Record of an engine for its users: log lines and the trace of chunks. Any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "base/mutex.h"

namespace shoal {

struct TraceEvent {
  std::string what;
  std::uint64_t begin_ns, end_ns, seq, chunk;
};

class Journal {
 public:
  // Writes a line to stderr and keeps it for take_events().
  void note(const std::string& text);
  std::vector<std::string> take_events();

  void trace(bool on) { tracing_ = on; }
  void traced(const char* what, std::uint64_t begin_ns, std::uint64_t seq, std::uint64_t chunk) {
    if (tracing_.load(std::memory_order_relaxed)) add_trace(what, begin_ns, seq, chunk);
  }
  std::vector<TraceEvent> take_trace();

 private:
  void add_trace(const char* what, std::uint64_t begin_ns, std::uint64_t seq, std::uint64_t chunk);

  std::atomic<bool> tracing_{false};
  Mutex mutex_;
  std::vector<std::string> events_ GUARDED_BY(mutex_);
  std::vector<TraceEvent> trace_ GUARDED_BY(mutex_);
};

}  // namespace shoal
