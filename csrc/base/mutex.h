// Locks whose use clang checks (-Wthread-safety, `.ci/thread-safety`), and confinement to a thread.
//
//   Mutex mutex_;
//   std::map<…> ops_ GUARDED_BY(mutex_);   // an access without the lock does not compile
//   Window window_ GUARDED_BY(network_thread);  // only in methods that require that thread or have asserted it
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>

#if defined(__clang__)
#define SHOAL_ATTRIBUTE(x) __attribute__((x))
#else
#define SHOAL_ATTRIBUTE(x)
#endif

#define CAPABILITY(name) SHOAL_ATTRIBUTE(capability(name))
#define SCOPED_CAPABILITY SHOAL_ATTRIBUTE(scoped_lockable)
#define GUARDED_BY(x) SHOAL_ATTRIBUTE(guarded_by(x))
#define REQUIRES(...) SHOAL_ATTRIBUTE(requires_capability(__VA_ARGS__))
#define EXCLUDES(...) SHOAL_ATTRIBUTE(locks_excluded(__VA_ARGS__))
#define ACQUIRE(...) SHOAL_ATTRIBUTE(acquire_capability(__VA_ARGS__))
#define TRY_ACQUIRE(...) SHOAL_ATTRIBUTE(try_acquire_capability(__VA_ARGS__))
#define RELEASE(...) SHOAL_ATTRIBUTE(release_capability(__VA_ARGS__))
#define ASSERT_CAPABILITY(x) SHOAL_ATTRIBUTE(assert_capability(x))
// For a callback that the holder of the capability runs, where clang cannot see it.
#define SHOAL_NO_ANALYSIS SHOAL_ATTRIBUTE(no_thread_safety_analysis)

namespace shoal {

class CAPABILITY("mutex") Mutex {
 public:
  void lock() ACQUIRE() { mutex_.lock(); }
  bool try_lock() TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  void unlock() RELEASE() { mutex_.unlock(); }

 private:
  friend class Condition;
  std::mutex mutex_;
};

class SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) ACQUIRE(mutex) : mutex_(mutex) { mutex_.lock(); }
  ~MutexLock() RELEASE() { mutex_.unlock(); }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex& mutex_;
};

// Condition variable of a Mutex. Callers loop: `while (!ready_) changed_.wait(mutex_);`
class Condition {
 public:
  void wait(Mutex& mutex) REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    changed_.wait(lock);
    static_cast<void>(lock.release());
  }
  // Returns false once `deadline` has passed.
  bool wait_until(Mutex& mutex, std::chrono::steady_clock::time_point deadline) REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    const bool in_time = changed_.wait_until(lock, deadline) == std::cv_status::no_timeout;
    static_cast<void>(lock.release());
    return in_time;
  }
  void notify_all() { changed_.notify_all(); }

 private:
  std::condition_variable changed_;
};

// The thread of a transport, on which an engine's protocol runs. A role, not a lock: LoopThread checks it where the
// thread enters, clang everywhere else.
struct CAPABILITY("role") ThreadRole {};
inline constexpr ThreadRole network_thread;

// Confines state to one thread: the first that asserts it. Aborts the process on any other, since the state is then
// already corrupt.
class LoopThread {
 public:
  void assert_here() const ASSERT_CAPABILITY(network_thread) {
    const std::thread::id me = std::this_thread::get_id();
    std::thread::id owner = owner_.load(std::memory_order_relaxed);
    if (owner == me) return;
    if (owner != std::thread::id{} || !owner_.compare_exchange_strong(owner, me)) std::abort();
  }

 private:
  mutable std::atomic<std::thread::id> owner_{};
};

}  // namespace shoal
