#include "c_api/callbacks.h"

#include <utility>

namespace shoal {

void CallbackThread::expect() {
  const std::lock_guard lock(mutex_);
  ++num_expected_;
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
}

void CallbackThread::ended(const Item& item) {
  const std::lock_guard lock(mutex_);  // notified inside: once it is taken, this object may go
  ended_.push_back(item);
  changed_.notify_all();
}

void CallbackThread::stop() {
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (thread_.get_id() == std::this_thread::get_id()) return;
    thread = std::move(thread_);
    changed_.notify_all();
  }
  if (thread.joinable()) thread.join();
}

void CallbackThread::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !ended_.empty() || (stopping_ && num_expected_ == 0); });
    if (ended_.empty()) return;
    const Item item = ended_.front();
    ended_.pop_front();
    --num_expected_;
    lock.unlock();
    std::string message;
    const shoal_status status = outcome_(item.handle, message);
    item.callback(item.context, item.handle, status, message.c_str());
    lock.lock();
  }
}

}  // namespace shoal
