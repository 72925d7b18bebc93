#include "base/log.h"

#include <cstdio>

namespace shoal {

namespace {

constexpr int kLinesAMinute = 10;
constexpr std::size_t kMaxLine = 1024;

}  // namespace

std::string printable(const std::string& text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte < 0x7f) {
      out += c;
      continue;
    }
    char escaped[8];
    std::snprintf(escaped, sizeof escaped, "\\x%02x", byte);
    out += escaped;
  }
  return out;
}

void LineLimit::write(const std::string& line, Clock::time_point now) {
  tick(now);
  if (num_written_ == 0) minute_began_ = now;
  if (++num_written_ > kLinesAMinute) {
    ++num_left_out_;
    return;
  }
  std::fprintf(stderr, "%s\n", printable(line.substr(0, kMaxLine)).c_str());
}

void LineLimit::tick(Clock::time_point now) {
  if (num_written_ == 0 || now - minute_began_ < std::chrono::minutes(1)) return;
  if (num_left_out_) {
    std::fprintf(stderr, "shoal: %llu more such lines in the last minute\n",
                 static_cast<unsigned long long>(num_left_out_));
  }
  num_written_ = 0;
  num_left_out_ = 0;
}

}  // namespace shoal
