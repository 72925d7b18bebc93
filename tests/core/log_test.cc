#include "base/log.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>

#include <unistd.h>

#include "check.h"

namespace log_test {

using shoal::LineLimit;
using namespace std::chrono_literals;

// Returns what `call` writes to stderr.
std::string written(const std::function<void()>& call) {
  std::FILE* file = std::tmpfile();
  std::fflush(stderr);
  const int before = dup(2);
  dup2(fileno(file), 2);
  call();
  std::fflush(stderr);
  dup2(before, 2);
  close(before);
  std::rewind(file);
  std::string text;
  for (int c; (c = std::fgetc(file)) != EOF;) text += static_cast<char>(c);
  std::fclose(file);
  return text;
}

std::size_t lines_in(const std::string& text) { return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n')); }

TEST(log_what_a_terminal_would_obey_is_escaped) {
  CHECK_EQ(shoal::printable("group 'a~ b'"), "group 'a~ b'");
  CHECK_EQ(shoal::printable("\x1b[2J\nforged\r\x7f"), "\\x1b[2J\\x0aforged\\x0d\\x7f");
  CHECK_EQ(shoal::printable("\xc2\x9b"), "\\xc2\\x9b");
  CHECK_EQ(shoal::printable(std::string("\0", 1)), "\\x00");
  LineLimit lines;
  CHECK_EQ(written([&] { lines.write("a\nb\x1b"); }), "a\\x0ab\\x1b\n");
}

TEST(log_ten_lines_a_minute_and_then_how_many_were_left_out) {
  LineLimit lines;
  const auto begin = LineLimit::Clock::now();
  const std::string first = written([&] {
    for (int k = 0; k < 1000; ++k) lines.write("line", begin + k * 1ms);
    lines.tick(begin + 59s);
  });
  CHECK_EQ(lines_in(first), 10u);
  CHECK_EQ(written([&] { lines.tick(begin + 60s); }), "shoal: 990 more such lines in the last minute\n");
  const std::string second = written([&] {  // heard again: ten scans do not silence a server for good
    for (int k = 0; k < 12; ++k) lines.write("line", begin + 61s);
    lines.write("late", begin + 130s);
  });
  std::string expected;
  for (int k = 0; k < 10; ++k) expected += "line\n";
  CHECK_EQ(second, expected + "shoal: 2 more such lines in the last minute\nlate\n");
  CHECK_EQ(lines_in(written([&] { lines.tick(begin + 300s); })), 0u);
}

TEST(log_lines_are_bounded) {
  LineLimit lines;
  CHECK_EQ(written([&] { lines.write(std::string(1 << 20, 'x')); }).size(), 1025u);
}

}  // namespace log_test
