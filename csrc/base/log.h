// Lines on stderr about what peers and strangers do: bounded in number, and without a word of theirs that a
// terminal would obey.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace shoal {

// The text with every byte that is not printable ASCII as \xNN: escape sequences and forged lines stay visible.
std::string printable(const std::string& text);

// Writes at most ten lines a minute and says how many it has left out. One thread.
class LineLimit {
 public:
  using Clock = std::chrono::steady_clock;

  void write(const std::string& line, Clock::time_point now = Clock::now());
  // Says what was left out once the minute is over. To be called now and then.
  void tick(Clock::time_point now = Clock::now());

 private:
  Clock::time_point minute_began_{};
  int num_written_ = 0;
  std::uint64_t num_left_out_ = 0;
};

}  // namespace shoal
