// A test is TEST(name) { CHECK(...); CHECK_EQ(a, b); }. A failed check prints file, line and values, and the
// test goes on, so that one run names all that is wrong. main is in main.cc.
#pragma once

#include <cstdio>
#include <functional>
#include <ostream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

namespace check {

struct Test {
  std::string name;
  std::function<void()> run;
};

// In the order of the files' static initialisation; main sorts by name.
inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

// Threads may fail checks too; each message is one write.
void fail(const char* file, int line, const std::string& what);

template <class T>
std::string show(const T& value) {
  std::ostringstream out;
  if constexpr (requires { out << value; }) {
    out << value;
  } else {
    out << "(" << sizeof(T) << " bytes)";
  }
  return out.str();
}

struct Registered {
  Registered(std::string name, std::function<void()> run) { tests().push_back({std::move(name), std::move(run)}); }
};

// The message of the exception of type E that `call` throws; fails when it throws none.
template <class E>
std::string message_thrown(const char* file, int line, const char* text, const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  fail(file, line, std::string(text) + " threw nothing");
  return "";
}

}  // namespace check

#define TEST(name)                                                     \
  static void test_##name();                                           \
  static const check::Registered registered_##name(#name, test_##name); \
  static void test_##name()

#define CHECK(condition) \
  ((condition) ? void() : check::fail(__FILE__, __LINE__, #condition " is false"))

#define CHECK_EQ(a, b)                                                                                     \
  do {                                                                                                     \
    const auto& check_a = (a);                                                                             \
    const auto& check_b = (b);                                                                             \
    if (!(check_a == check_b))                                                                             \
      check::fail(__FILE__, __LINE__, #a " is " + check::show(check_a) + ", not " + check::show(check_b)); \
  } while (false)

// Ends the test when the condition does not hold: for what the next lines need.
#define REQUIRE(condition)                                          \
  do {                                                              \
    if (!(condition)) {                                             \
      check::fail(__FILE__, __LINE__, #condition " is false"); \
      return;                                                       \
    }                                                               \
  } while (false)

// The value is the message: CHECK_EQ(CHECK_THROWS(std::invalid_argument, call(-1)), "count is -1").
#define CHECK_THROWS(E, expression) \
  check::message_thrown<E>(__FILE__, __LINE__, #expression, [&] { (void)(expression); })
