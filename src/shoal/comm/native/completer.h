// Sets the futures of a group's operations, which runs their callbacks, on threads of its own. The same rules as in
// shoal/comm/completer.py, which serves the operations that Python submits:
//
// - Callbacks run one at a time, in the order in which their operations were submitted.
// - Futures of operations that a callback submitted do not wait for that callback to return: they form a lane of their
//   own, which has its own thread and its own order.
// - A callback that waits for a later operation of its lane would block that operation. If its thread uses no processor
//   time for kCheckS, another thread continues the lane.
//
// Knows neither torch nor Python.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>

namespace shoal_torch {

// A future that is to be set when its operation has completed.
class Promise {
 public:
  virtual ~Promise() = default;
  // Waits for the operation, at most `timeout_s`; returns whether it has completed or failed.
  virtual bool wait(double timeout_s) = 0;
  // Sets the future, with an error if the operation has not completed. Runs callbacks. Does not throw.
  virtual void complete() = 0;
};

// A callback submits an operation after the program has submitted others: ranks may do so in different orders.
class OvertakenError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Callbacks of earlier operations have not returned in time.
class CallbackTimeout : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Completer {
 public:
  // `ordered`: operations of the program wait until callbacks of earlier ones have returned.
  explicit Completer(bool ordered);
  // Lets the threads end; does not wait for them.
  ~Completer();

  // Calls `submit` for the program or for a callback. Throws OvertakenError and CallbackTimeout.
  template <class Submit>
  auto begin(const char* name, double limit_s, Submit submit) {
    const std::unique_lock lock = enter(name, limit_s);
    return submit();
  }

  // Completes `promise` once its operation has completed and earlier promises are complete.
  void add(std::uint64_t handle, std::unique_ptr<Promise> promise);

  // Completes the open promises with the outcome of their operations; promises that are added later complete at once.
  void stop();

  // Waits until the threads have ended, at most `timeout_s`; a callback must not wait for its own thread.
  void join(double timeout_s);

 private:
  struct Task;
  struct Lane;
  struct Shared;

  std::unique_lock<std::mutex> enter(const char* name, double limit_s);
  static void start(const std::shared_ptr<Shared>& shared, unsigned depth);
  static void serve(Shared& shared, unsigned depth, unsigned turn);
  static void watch(const std::shared_ptr<Shared>& shared);

  const int pid_;
  const std::shared_ptr<Shared> shared_;  // the threads have it, too
};

}  // namespace shoal_torch
