#include "c_api/callbacks.h"

#include <utility>

namespace shoal {

void CallbackThread::add(shoal_handle handle, shoal_callback callback, void* context) {
  {
    const std::lock_guard lock(mutex_);
    items_.push_back({handle, callback, context});
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  changed_.notify_all();
}

void CallbackThread::stop() {
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    if (thread_.get_id() == std::this_thread::get_id()) return;
    thread = std::move(thread_);
  }
  changed_.notify_all();
  if (thread.joinable()) thread.join();
}

void CallbackThread::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return stopping_ || !items_.empty(); });
    if (items_.empty()) return;
    const Item item = items_.front();
    items_.pop_front();
    lock.unlock();
    std::string message;
    const shoal_status status = wait_(item.handle, message);
    item.callback(item.context, item.handle, status, message.c_str());
    lock.lock();
  }
}

}  // namespace shoal
