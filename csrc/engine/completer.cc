#include "engine/completer.h"

#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "engine/errors.h"

namespace shoal {

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

// The thread that runs the callbacks of a lane.
struct Running {
  ThreadUse thread;
  double used_s = -1;
};

std::string name_in_messages(const OpSpec& spec) {
  return spec.kind == Kind::delegated ? spec.name : std::string(name_of(spec.kind));
}

}  // namespace

struct Completer::Task {
  Function function;
  unsigned depth = 0;           // 0 if the program submitted the operation, 1 if a callback of such an operation did, ...
  std::uint64_t num_begun = 0;  // operations that the program had begun when the function was added
};

// The functions of one depth.
struct Completer::Lane {
  std::map<std::uint64_t, std::shared_ptr<const Task>> tasks;
  unsigned turn = 0;  // of the thread that serves the lane; another thread's turn has ended
  bool served = false;
  std::optional<Running> running;
};

// What the threads use. They hold it, so that a callback may drop the last reference to the engine.
struct Completer::Shared : std::enable_shared_from_this<Shared> {
  Shared(bool ordered, Wait wait) : ordered(ordered), wait(std::move(wait)) {}

  // Runs on a thread of its own, which nobody joins.
  template <class Run>
  void launch(const char* name, Run run) REQUIRES(mutex);
  void start(unsigned depth) REQUIRES(mutex);
  void watch() REQUIRES(mutex);
  void serve(unsigned depth, unsigned turn);
  void find_blocked();
  void run_next(Lane& lane, unsigned turn) REQUIRES(mutex);

  const bool ordered;
  const Wait wait;

  Mutex mutex;
  Condition changed, resumed;
  std::map<unsigned, Lane> lanes GUARDED_BY(mutex);
  std::size_t num_open GUARDED_BY(mutex) = 0;  // tasks, with those whose callbacks run
  int num_threads GUARDED_BY(mutex) = 0;
  bool watched GUARDED_BY(mutex) = false, watch_pauses GUARDED_BY(mutex) = false, stopping GUARDED_BY(mutex) = false;
};

thread_local const Completer::Shared* Completer::here = nullptr;
thread_local const Completer::Task* Completer::task_here = nullptr;

Completer::Completer(bool ordered, Wait wait) : pid_(getpid()), shared_(std::make_shared<Shared>(ordered, std::move(wait))) {}

Completer::~Completer() {
  if (getpid() != pid_) return;  // a forked child has no threads, and maybe a locked mutex
  const MutexLock lock(shared_->mutex);
  shared_->stopping = true;
  shared_->changed.notify_all();
  shared_->resumed.notify_all();
}

void Completer::await_callbacks(const OpSpec& spec) {
  if (!shared_->ordered || task()) return;
  const auto deadline = std::chrono::steady_clock::now() + seconds(spec.timeout_s);
  const MutexLock lock(shared_->mutex);
  while (shared_->num_open && !shared_->stopping) {
    if (spec.timeout_s <= 0) shared_->changed.wait(shared_->mutex);
    else if (!shared_->changed.wait_until(shared_->mutex, deadline) && shared_->num_open) {
      throw GroupError(name_in_messages(spec) + ": callbacks of earlier operations ran longer than " +
                       std::to_string(spec.timeout_s) + " s");
    }
  }
}

void Completer::require_in_order(const OpSpec& spec) const {
  if (num_begun_ == task_here->num_begun) return;
  throw OrderError("a callback begins " + name_in_messages(spec) +
                   ", and the program has begun other collectives of this group since it asked for the future: each rank "
                   "may do so in another order. Make the group with pg_options=EngineOptions(ordered_callbacks=True), or "
                   "begin nothing else until the callback has ended (with DistributedDataParallel: have one bucket)");
}

void Completer::add(std::uint64_t seq, Function function) {
  const Task* outer = task();
  const unsigned depth = outer ? outer->depth + 1 : 0;
  const std::uint64_t num_begun = outer ? outer->num_begun : num_begun_.load();
  {
    const MutexLock lock(shared_->mutex);
    if (!shared_->stopping) {
      Lane& lane = shared_->lanes[depth];
      lane.tasks[seq] = std::make_shared<const Task>(Task{std::move(function), depth, num_begun});
      ++shared_->num_open;
      if (!lane.served) shared_->start(depth);
      if (!shared_->watched) shared_->watch();
      shared_->changed.notify_all();
      if (shared_->watch_pauses) shared_->resumed.notify_all();
      return;
    }
  }
  function();
}

void Completer::stop() {
  if (getpid() != pid_) return;
  std::map<std::uint64_t, std::shared_ptr<const Task>> open;
  {
    const MutexLock lock(shared_->mutex);
    shared_->stopping = true;
    for (auto& [depth, lane] : shared_->lanes) open.merge(lane.tasks);
    shared_->num_open -= open.size();
    shared_->changed.notify_all();
    shared_->resumed.notify_all();
  }
  for (const auto& [seq, task] : open) task->function();
}

void Completer::join(double timeout_s) {
  if (getpid() != pid_) return;
  const int mine = task() ? 1 : 0;
  const auto deadline = std::chrono::steady_clock::now() + seconds(timeout_s);
  const MutexLock lock(shared_->mutex);
  while (shared_->num_threads > mine && shared_->changed.wait_until(shared_->mutex, deadline)) {
  }
}

// ---- threads --------------------------------------------------------------------------------------------

template <class Run>
void Completer::Shared::launch(const char* name, Run run) {
  ++num_threads;
  sigset_t all, before;  // signals are for the program's threads
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([shared = shared_from_this(), name, run] {
    pthread_setname_np(pthread_self(), name);
    run(*shared);
    const MutexLock lock(shared->mutex);
    --shared->num_threads;
    shared->changed.notify_all();
  }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// Starts the thread of a lane.
void Completer::Shared::start(unsigned depth) {
  Lane& lane = lanes[depth];
  lane.served = true;
  lane.running.reset();
  const unsigned turn = ++lane.turn;
  launch("shoal-futures", [depth, turn](Shared& shared) { shared.serve(depth, turn); });
}

// Calls the functions of a lane in their order until another thread has the turn.
void Completer::Shared::serve(unsigned depth, unsigned turn) {
  const MutexLock lock(mutex);
  Lane& lane = lanes[depth];
  while (!stopping && lane.turn == turn) {
    if (lane.tasks.empty()) changed.wait(mutex);
    else run_next(lane, turn);
  }
}

// Waits a short while for the first operation of a lane, and calls its function if it has ended. The lock is released
// for both, and while a task is let go: that may drop the last reference to tensors and works.
void Completer::Shared::run_next(Lane& lane, unsigned turn) {
  const std::uint64_t seq = lane.tasks.begin()->first;
  std::shared_ptr<const Task> task = lane.tasks.begin()->second;
  mutex.unlock();
  const bool ended = wait(seq, kWaitS);
  mutex.lock();
  const auto first = lane.tasks.begin();
  const bool due = ended && !stopping && lane.turn == turn && first != lane.tasks.end() && first->second == task;
  if (due) {
    lane.tasks.erase(first);
    lane.running.emplace();
  }
  mutex.unlock();
  if (due) {
    Completer::here = this;
    Completer::task_here = task.get();
    task->function();
    Completer::here = nullptr;
  }
  task.reset();
  mutex.lock();
  if (!due) return;
  if (lane.turn == turn) lane.running.reset();
  --num_open;
  if (ordered) changed.notify_all();
}

// Starts the thread that hands a lane to another thread where a callback blocks it.
void Completer::Shared::watch() {
  watched = true;
  launch("shoal-watchdog", [](Shared& shared) { shared.find_blocked(); });
}

void Completer::Shared::find_blocked() {
  const MutexLock lock(mutex);
  while (!stopping) {
    watch_pauses = num_open == 0;
    while (num_open == 0 && !stopping) resumed.wait(mutex);
    watch_pauses = false;
    const auto check = std::chrono::steady_clock::now() + kCheck;
    while (!stopping && resumed.wait_until(mutex, check)) {
    }
    if (stopping) return;
    for (auto& [depth, lane] : lanes) {
      if (!lane.running) continue;
      const double before_s = std::exchange(lane.running->used_s, lane.running->thread.used_s());
      if (before_s == lane.running->used_s && !lane.running->thread.ready()) start(depth);
    }
  }
}

}  // namespace shoal
