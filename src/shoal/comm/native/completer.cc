#include "completer.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace shoal_torch {

namespace {

constexpr double kWaitS = 0.1;
constexpr std::chrono::milliseconds kCheck{100};

// Tells other threads how the thread that made it uses the processor.
class ThreadUse {
 public:
  ThreadUse() : stat_("/proc/self/task/" + std::to_string(syscall(SYS_gettid)) + "/stat") {
    pthread_getcpuclockid(pthread_self(), &clock_);
  }

  double used_s() const {
    timespec time{};
    clock_gettime(clock_, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }

  // True if the thread runs, or would if a processor were free.
  bool ready() const {
    std::ifstream file(stat_);
    std::string line;
    std::getline(file, line);
    const std::size_t name_end = line.rfind(") ");  // "number (name) state ..."
    return name_end != std::string::npos && line.size() > name_end + 2 && line[name_end + 2] == 'R';
  }

 private:
  std::string stat_;
  clockid_t clock_{};
};

}  // namespace

struct Completer::Task {
  std::shared_ptr<Promise> promise;
  unsigned depth = 0;           // 0 if the program submitted the operation, 1 if a callback of such an operation did, ...
  std::uint64_t num_begun = 0;  // operations that the program had submitted when the future was requested
};

// The futures of one depth.
struct Completer::Lane {
  struct Running {
    ThreadUse thread;  // of the thread that runs the callbacks
    double used_s = -1;
  };
  std::map<std::uint64_t, Task> tasks;
  unsigned turn = 0;  // of the thread that serves the lane; another thread's turn has ended
  bool served = false;
  std::optional<Running> running;
};

struct Completer::Shared {
  explicit Shared(bool ordered) : ordered(ordered) {}

  const bool ordered;
  std::mutex beginning;  // held while an operation is submitted
  std::atomic<std::uint64_t> num_begun{0};

  std::mutex mutex;  // guards what follows
  std::condition_variable changed, resumed;
  std::map<unsigned, Lane> lanes;
  std::size_t num_open = 0;  // tasks, with those whose callbacks run
  int num_threads = 0;
  bool watched = false, watch_pauses = false, stopping = false;

  // Runs on a thread of its own, which the completer does not join.
  template <class Run>
  static void launch(const std::shared_ptr<Shared>& shared, Run run) {
    ++shared->num_threads;
    sigset_t all, before;  // signals are for the program's threads
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread([shared, run] {
      pthread_setname_np(pthread_self(), "shoal-futures");
      run();
      const std::lock_guard lock(shared->mutex);
      --shared->num_threads;
      shared->changed.notify_all();
    }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  // The task whose callbacks the calling thread is running, of this completer.
  static thread_local Shared* here;
  static thread_local const Task* task_here;
  const Task* task() const { return here == this ? task_here : nullptr; }
};

thread_local Completer::Shared* Completer::Shared::here = nullptr;
thread_local const Completer::Task* Completer::Shared::task_here = nullptr;

Completer::Completer(bool ordered) : pid_(getpid()), shared_(std::make_shared<Shared>(ordered)) {}

Completer::~Completer() {
  if (getpid() != pid_) return;  // a forked child has no threads, and maybe a locked mutex
  const std::lock_guard lock(shared_->mutex);
  shared_->stopping = true;
  shared_->changed.notify_all();
  shared_->resumed.notify_all();
}

std::unique_lock<std::mutex> Completer::enter(const char* name, double limit_s) {
  const Task* task = shared_->task();
  if (!task && shared_->ordered) {
    std::unique_lock lock(shared_->mutex);
    const std::chrono::duration<double> limit(limit_s);
    if (!shared_->changed.wait_for(lock, limit, [&] { return shared_->num_open == 0 || shared_->stopping; })) {
      throw CallbackTimeout(std::string(name) + ": callbacks of earlier operations ran longer than " +
                            std::to_string(limit_s) + " s");
    }
  }
  std::unique_lock lock(shared_->beginning);
  if (!task) {
    ++shared_->num_begun;
  } else if (shared_->num_begun > task->num_begun) {
    throw OvertakenError("a callback begins " + std::string(name) +
                         ", and the program has begun other collectives of this group since it asked for the future: "
                         "each rank may do so in another order. Make the group with "
                         "pg_options=EngineOptions(ordered_callbacks=True), or begin nothing else until the callback "
                         "has ended (with DistributedDataParallel: have one bucket)");
  }
  return lock;
}

void Completer::add(std::uint64_t handle, std::unique_ptr<Promise> promise) {
  const Task* outer = shared_->task();
  const unsigned depth = outer ? outer->depth + 1 : 0;
  const std::uint64_t num_begun = outer ? outer->num_begun : shared_->num_begun.load();
  {
    const std::lock_guard lock(shared_->mutex);
    if (!shared_->stopping) {
      Lane& lane = shared_->lanes[depth];
      lane.tasks[handle] = {std::move(promise), depth, num_begun};
      ++shared_->num_open;
      if (!lane.served) start(shared_, depth);
      if (!shared_->watched) watch(shared_);
      shared_->changed.notify_all();
      if (shared_->watch_pauses) shared_->resumed.notify_all();
    }
  }
  if (promise) promise->complete();
}

void Completer::stop() {
  if (getpid() != pid_) return;
  std::map<std::uint64_t, Task> open;
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->stopping = true;
    for (auto& [depth, lane] : shared_->lanes) open.merge(lane.tasks);
    shared_->num_open -= open.size();
    shared_->changed.notify_all();
    shared_->resumed.notify_all();
  }
  for (auto& [handle, task] : open) task.promise->complete();
}

void Completer::join(double timeout_s) {
  if (getpid() != pid_) return;
  const int mine = shared_->task() ? 1 : 0;
  std::unique_lock lock(shared_->mutex);
  shared_->changed.wait_for(lock, std::chrono::duration<double>(timeout_s),
                            [&] { return shared_->num_threads <= mine; });
}

// ---- threads --------------------------------------------------------------------------------------------

// Starts the thread of a lane. Requires the mutex.
void Completer::start(const std::shared_ptr<Shared>& shared, unsigned depth) {
  Lane& lane = shared->lanes[depth];
  lane.served = true;
  lane.running.reset();
  const unsigned turn = ++lane.turn;
  Shared::launch(shared, [state = shared.get(), depth, turn] { serve(*state, depth, turn); });
}

// Completes the tasks of a lane in their order until another thread has the turn.
void Completer::serve(Shared& shared, unsigned depth, unsigned turn) {
  std::unique_lock lock(shared.mutex);
  Lane& lane = shared.lanes[depth];
  while (!shared.stopping && lane.turn == turn) {
    if (lane.tasks.empty()) {
      shared.changed.wait(lock);
      continue;
    }
    const std::uint64_t handle = lane.tasks.begin()->first;
    std::shared_ptr<Promise> promise = lane.tasks.begin()->second.promise;
    lock.unlock();
    const bool done = promise->wait(kWaitS);
    lock.lock();
    if (shared.stopping || !done || lane.tasks.begin()->first != handle) {
      lock.unlock();
      promise.reset();  // outside the lock: it may be the last reference to tensors and works
      lock.lock();
      continue;
    }
    Task task = std::move(lane.tasks.extract(handle).mapped());
    lane.running.emplace();
    lock.unlock();
    Shared::here = &shared;
    Shared::task_here = &task;
    promise->complete();
    Shared::here = nullptr;
    promise.reset();
    task.promise.reset();
    lock.lock();
    if (lane.turn == turn) lane.running.reset();
    --shared.num_open;
    if (shared.ordered) shared.changed.notify_all();
  }
}

// Starts the thread that hands a lane to another thread where a callback blocks it. Requires the mutex.
void Completer::watch(const std::shared_ptr<Shared>& shared) {
  shared->watched = true;
  Shared::launch(shared, [state = shared.get(), shared] {
    pthread_setname_np(pthread_self(), "shoal-watchdog");
    std::unique_lock lock(state->mutex);
    while (!state->stopping) {
      state->watch_pauses = state->num_open == 0;
      state->resumed.wait(lock, [&] { return state->num_open > 0 || state->stopping; });
      state->watch_pauses = false;
      if (state->resumed.wait_for(lock, kCheck, [&] { return state->stopping; })) return;
      for (auto& [depth, lane] : state->lanes) {
        if (!lane.running) continue;
        const double before_s = std::exchange(lane.running->used_s, lane.running->thread.used_s());
        if (before_s == lane.running->used_s && !lane.running->thread.ready()) start(shared, depth);
      }
    }
  });
}

}  // namespace shoal_torch
