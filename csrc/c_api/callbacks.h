// The thread that calls the completion callbacks of a C group, in the order of submission.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "c_api/shoal.h"

namespace shoal {

class CallbackThread {
 public:
  // Waits for an operation; fills the message of a failure.
  using Wait = std::function<shoal_status(shoal_handle handle, std::string& message)>;

  explicit CallbackThread(Wait wait) : wait_(std::move(wait)) {}
  ~CallbackThread() { stop(); }

  // Calls `callback` once `handle` has completed and earlier callbacks have returned. Starts the thread.
  void add(shoal_handle handle, shoal_callback callback, void* context);

  // Calls the callbacks that are left and joins the thread; their operations have completed or failed. Called by a
  // callback, it returns at once.
  void stop();

 private:
  struct Item {
    shoal_handle handle;
    shoal_callback callback;
    void* context;
  };

  void run();

  const Wait wait_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> items_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace shoal
