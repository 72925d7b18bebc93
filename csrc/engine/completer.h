// Calls functions once their operations have ended, on threads of its own: those that set the futures of a process
// group, and so run the callbacks of programs.
//
// - Callbacks run one at a time, in the order in which their operations were submitted.
// - Callbacks of operations that a callback has submitted do not wait for that callback to return: they form a lane of
//   their own, which has its own thread and its own order.
// - A callback that waits for a later operation of its lane would block that operation. If its thread sleeps and uses no
//   processor time for kCheck, another thread continues the lane. A thread that is ready to run, on a busy machine, does
//   not sleep.
//
// A callback runs at a different time on each rank. If both the program and a callback submit operations, ranks may
// submit them in different orders and reduce unrelated tensors. begin() refuses that. With `ordered`, the program's
// operations wait until earlier callbacks have returned.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "engine/types.h"

namespace shoal {

class Completer {
 public:
  using Function = std::function<void()>;
  // Waits for an operation, at most `timeout_s`; returns whether it has completed or failed. Called only while a
  // function of that operation is kept, which so keeps alive what this refers to.
  using Wait = std::function<bool(std::uint64_t seq, double timeout_s)>;

  Completer(bool ordered, Wait wait);
  // Lets the threads end; does not wait for them.
  ~Completer();

  // With `ordered`: waits, in the program and not in a callback, until all callbacks have returned. Throws GroupError
  // once the operation's time has passed.
  void await_callbacks(const OpSpec& spec);

  // Counts an operation of the program or of a callback, before it is submitted. Throws OrderError if a callback begins
  // it and the program has begun others since it added that callback. Called by one thread at a time.
  void begin(const OpSpec& spec) {
    if (here == shared_.get()) return require_in_order(spec);
    ++num_begun_;
  }

  // Calls `function` once the operation has ended and functions of earlier ones have returned. It must not throw.
  void add(std::uint64_t seq, Function function);

  // Calls the functions that are left, on this thread; those that are added later are called at once.
  void stop();

  // Waits until the threads have ended, at most `timeout_s`; a callback does not wait for its own thread.
  void join(double timeout_s);

 private:
  struct Task;
  struct Lane;
  struct Shared;

  void require_in_order(const OpSpec& spec) const;
  const Task* task() const { return here == shared_.get() ? task_here : nullptr; }

  // The completer and the task whose callbacks the calling thread is running.
  static thread_local const Shared* here;
  static thread_local const Task* task_here;

  const pid_t pid_;
  const std::shared_ptr<Shared> shared_;  // the threads have it, too
  std::atomic<std::uint64_t> num_begun_{0};  // operations of the program
};

}  // namespace shoal
