// Locks whose use clang checks (-Wthread-safety, `.ci/thread-safety`).
//
//   Mutex mutex_;
//   std::map<…> ops_ GUARDED_BY(mutex_);   // an access without the lock does not compile
//   Window window_ GUARDED_BY(network_thread);  // only with the NetworkLock of the process's connections
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
// For a callback that the holder of the capability runs, where clang cannot see it, and for locks themselves.
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

// The thread that runs the protocol of a process's connections now: a role, which the holder of their NetworkLock has.
struct CAPABILITY("role") ThreadRole {};
inline constexpr ThreadRole network_thread;

// Lets the threads of a transport run the protocol in turn. Clang checks that code which requires the role is called
// with the lock; where it cannot see that, assert_here() does. It aborts the process: the state would be corrupt.
class NetworkLock {
 public:
  void lock() ACQUIRE(network_thread) SHOAL_NO_ANALYSIS {
    mutex_.lock();
    holder_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }
  void unlock() RELEASE(network_thread) SHOAL_NO_ANALYSIS {
    holder_.store({}, std::memory_order_relaxed);
    mutex_.unlock();
  }
  void assert_here() const ASSERT_CAPABILITY(network_thread) {
    if (holder_.load(std::memory_order_relaxed) != std::this_thread::get_id()) std::abort();
  }

 private:
  std::mutex mutex_;
  std::atomic<std::thread::id> holder_{};
};

class SCOPED_CAPABILITY NetworkHold {
 public:
  explicit NetworkHold(NetworkLock& lock) ACQUIRE(network_thread) : lock_(lock) { lock_.lock(); }
  ~NetworkHold() RELEASE() { lock_.unlock(); }
  NetworkHold(const NetworkHold&) = delete;
  NetworkHold& operator=(const NetworkHold&) = delete;

 private:
  NetworkLock& lock_;
};

}  // namespace shoal
