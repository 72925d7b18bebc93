#include "engine/completer.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/errors.h"

namespace completer_test {

using shoal::Completer;
using shoal::OpSpec;
using shoal::OrderError;

// Operations that end when the test says so.
class Operations {
 public:
  void end(std::uint64_t seq) {
    const std::lock_guard lock(mutex_);
    ended_.insert(seq);
  }
  Completer::Wait wait() {
    return [this](std::uint64_t seq, double timeout_s) {
      const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
      while (!has_ended(seq)) {
        if (std::chrono::steady_clock::now() > until) return false;
        std::this_thread::yield();
      }
      return true;
    };
  }

 private:
  bool has_ended(std::uint64_t seq) {
    const std::lock_guard lock(mutex_);
    return ended_.count(seq) > 0;
  }

  std::mutex mutex_;
  std::set<std::uint64_t> ended_;
};

// A number that is waited for without processor time: a callback that polls is not taken for a blocked one.
class Count {
 public:
  void operator++() {
    const std::lock_guard lock(mutex_);
    ++value_;
    changed_.notify_all();
  }
  void await(int wanted) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return value_ == wanted; });
  }
  int load() {
    const std::lock_guard lock(mutex_);
    return value_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int value_ = 0;
};

TEST(completer_calls_in_the_order_of_the_operations) {
  Operations operations;
  Completer completer(false, operations.wait());
  Count num;
  std::vector<int> seen;
  for (int seq = 0; seq < 3; ++seq) {
    completer.add(static_cast<std::uint64_t>(seq), [&, seq] {
      seen.push_back(seq);
      ++num;
    });
  }
  operations.end(2);
  operations.end(1);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK_EQ(num.load(), 0);
  operations.end(0);
  num.await(3);
  CHECK(seen == (std::vector<int>{0, 1, 2}));
}

// A callback waits for one of its own operation, and then for one that the program submitted after it.
TEST(completer_callbacks_may_wait_for_others) {
  Operations operations;
  Completer completer(false, operations.wait());
  for (std::uint64_t seq = 0; seq < 3; ++seq) operations.end(seq);
  Count inner, later, outer;
  completer.add(0, [&] {
    completer.add(2, [&] { ++inner; });
    inner.await(1);
    later.await(1);
    ++outer;
  });
  completer.add(1, [&] { ++later; });
  outer.await(1);
}

TEST(completer_refuses_callbacks_that_the_program_has_overtaken) {
  Operations operations;
  Completer completer(false, operations.wait());
  completer.begin(OpSpec{});
  Count overtaken, done;
  completer.add(0, [&] {
    completer.begin(OpSpec{});  // nothing has been begun since
    ++done;
    overtaken.await(1);
    CHECK_THROWS(OrderError, completer.begin(OpSpec{}));
    ++done;
  });
  operations.end(0);
  done.await(1);
  completer.begin(OpSpec{});
  ++overtaken;
  done.await(2);
}

TEST(completer_ordered_holds_the_program_back) {
  Operations operations;
  Completer completer(true, operations.wait());
  Count done;
  completer.add(0, [&] {
    completer.await_callbacks(OpSpec{});  // a callback does not wait for itself
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ++done;
  });
  OpSpec hurried;
  hurried.timeout_s = 0.01;
  CHECK_THROWS(shoal::GroupError, completer.await_callbacks(hurried));
  operations.end(0);
  completer.await_callbacks(OpSpec{});
  CHECK_EQ(done.load(), 1);
}

// What is pending is called by stop(), and what comes later at once; afterwards no thread is left.
TEST(completer_stop_calls_what_is_left) {
  Operations operations;
  Completer completer(false, operations.wait());
  int num = 0;
  completer.add(0, [&] { ++num; });
  completer.stop();
  CHECK_EQ(num, 1);
  completer.add(1, [&] { ++num; });
  CHECK_EQ(num, 2);
  completer.join(10);
}

}  // namespace completer_test
