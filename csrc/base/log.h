// Log lines on stderr about peers and strangers: rate-limited, and without bytes that a terminal would interpret.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace shoal {

// Escapes every byte that is not printable ASCII as \xNN, so that escape sequences and forged lines stay visible.
std::string printable(const std::string& text);

// Writes at most ten lines per minute, and then the number of dropped ones. Used by one thread.
class LineLimit {
 public:
  using Clock = std::chrono::steady_clock;

  void write(const std::string& line, Clock::time_point now = Clock::now());
  // Writes the number of dropped lines once the minute is over. Called periodically.
  void tick(Clock::time_point now = Clock::now());

 private:
  Clock::time_point minute_began_{};
  int num_written_ = 0;
  std::uint64_t num_left_out_ = 0;
};

}  // namespace shoal
