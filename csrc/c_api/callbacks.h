// The thread that calls the completion callbacks of a C group, in the order in which the operations end.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "c_api/shoal.h"

namespace shoal {

class CallbackThread {
 public:
  struct Item {
    shoal_handle handle;
    shoal_callback callback;
    void* context;
  };
  // Returns how an operation that has ended did, and fills the message of a failure.
  using Outcome = std::function<shoal_status(shoal_handle handle, std::string& message)>;

  explicit CallbackThread(Outcome outcome) : outcome_(std::move(outcome)) {}
  ~CallbackThread() { stop(); }

  // One more operation whose end will be told. Starts the thread.
  void expect();
  // The operation has ended: its callback is called next. Any thread.
  void ended(const Item& item);

  // Joins the thread once all expected operations have ended and their callbacks have returned. Called by a callback,
  // it returns at once.
  void stop();

 private:
  void run();

  const Outcome outcome_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> ended_;
  std::size_t num_expected_ = 0;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace shoal
