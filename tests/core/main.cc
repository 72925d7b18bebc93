// shoal_core_tests [PART...]: runs the tests whose names contain one of the parts, or all.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>

#include "check.h"

namespace check {
namespace {
std::atomic<int> failures{0};
}

void fail(const char* file, int line, const std::string& what) {
  failures.fetch_add(1);
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

}  // namespace check

#if defined(__SANITIZE_THREAD__)
// The sanitizer takes sendmsg() for a read after it has returned, when the peer may have answered already.
extern "C" const char* __tsan_default_options() { return "intercept_send=0"; }
#endif

namespace {

bool wanted(std::string_view name, int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (name.find(argv[i]) != std::string_view::npos) return true;
  }
  return argc == 1;
}

// False when a check failed or an exception came out.
bool run(const check::Test& test) {
  const int before = check::failures.load();
  // Before the test: a crash or a hang names it.
  std::printf("%s ", test.name.c_str());
  std::fflush(stdout);
  const auto begin = std::chrono::steady_clock::now();
  try {
    test.run();
  } catch (const std::exception& error) {
    check::fail(test.name.c_str(), 0, std::string("exception: ") + error.what());
  } catch (...) {
    check::fail(test.name.c_str(), 0, "an exception that is no std::exception");
  }
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
  const bool ok = check::failures.load() == before;
  std::printf("%s (%.0f ms)\n", ok ? "ok" : "FAILED", took.count());
  return ok;
}

}  // namespace

int main(int argc, char** argv) {
  auto& tests = check::tests();
  std::sort(tests.begin(), tests.end(), [](auto& a, auto& b) { return a.name < b.name; });
  int num_run = 0;
  std::string failed;
  for (const check::Test& test : tests) {
    if (!wanted(test.name, argc, argv)) continue;
    ++num_run;
    if (!run(test)) failed += std::string(" ") + test.name;
  }
  if (!failed.empty()) std::printf("failed:%s\n", failed.c_str());
  std::printf("%d tests%s\n", num_run, failed.empty() ? ", all passed" : "");
  return failed.empty() && num_run > 0 ? 0 : 1;
}
