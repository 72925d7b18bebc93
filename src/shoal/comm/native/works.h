// Operations of a group in flight, and their works. GroupState has what a group's backend and works share: it submits to
// the engine through its C interface, and keeps tensors until their operations have completed. It lives until the last
// backend and work are gone.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>
#include <pybind11/chrono.h>
#include <shoal.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <deque>
#include <exception>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "gil.h"

namespace shoal_torch {

using Milliseconds = std::chrono::milliseconds;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

inline double seconds(Milliseconds time) { return std::chrono::duration<double>(time).count(); }

// ---- errors, as the Python exceptions that shoal/comm raises ---------------------------------------------

inline bool python_is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsInitialized() || Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

// Releases the GIL where the calling thread holds it: callers in C++ may.
class WithoutGil {
 public:
  WithoutGil() {
    if (PyGILState_Check()) released_.emplace();
  }

 private:
  std::optional<shoal::WithoutGil> released_;
};

[[noreturn]] inline void raise(const char* module, const char* type, const std::string& message) {
  if (python_is_ending()) throw std::runtime_error(message);
  const shoal::WithGil gil;
  PyErr_SetString(py::module_::import(module).attr(type).ptr(), message.c_str());
  throw py::error_already_set();
}

[[noreturn]] inline void raise_comm_error(const std::string& message) {
  raise("shoal.comm.engine", "CommError", message);
}

// Raises the error of a call of the C interface.
[[noreturn]] inline void raise_status(shoal_status status, const std::string& message) {
  if (status == SHOAL_GROUP_FAILED) raise_comm_error(message);
  if (status == SHOAL_OUT_OF_ORDER) raise("shoal.errors", "UsageError", message);
  if (status == SHOAL_INVALID_ARGUMENT) raise("builtins", "ValueError", message);
  throw std::runtime_error(message);
}

// ---- operations in flight -------------------------------------------------------------------------------

// Owns a reference to a C group.
struct ReleaseGroup {
  void operator()(shoal_group* group) const { shoal_group_release(group); }
};
using CGroup = std::unique_ptr<shoal_group, ReleaseGroup>;

// Tensors that the engine reads and writes, kept until their operations have completed.
class Operands {
 public:
  void add(shoal_group* group, shoal_handle handle, std::vector<at::Tensor> tensors) {
    std::vector<Entry> done;  // destroyed after the lock is released: a tensor's Python object needs the GIL
    const std::lock_guard lock(mutex_);
    const bool is_message = handle >= kFirstMessage;
    std::deque<Entry>& entries = is_message ? messages_ : entries_;
    const auto is_pending = [group](const Entry& each) { return !shoal_test(group, each.handle); };
    // Messages end in any order, and one may stay for long.
    const auto left = is_message ? std::stable_partition(entries.begin(), entries.end(), [&](const Entry& each) { return !is_pending(each); })
                                 : std::find_if(entries.begin(), entries.end(), is_pending);
    std::move(entries.begin(), left, std::back_inserter(done));
    entries.erase(entries.begin(), left);
    entries.push_back({handle, std::move(tensors)});
  }

  // Lets go of the tensors of an operation that has completed.
  void release(shoal_handle handle) {
    std::vector<at::Tensor> tensors;  // destroyed after the lock is released, as in add()
    const std::lock_guard lock(mutex_);
    std::deque<Entry>& entries = handle >= kFirstMessage ? messages_ : entries_;
    const auto entry = std::find_if(entries.begin(), entries.end(), [handle](const Entry& each) { return each.handle == handle; });
    if (entry == entries.end()) return;
    tensors = std::move(entry->tensors);
    entries.erase(entry);
  }

  std::size_t num_pending(shoal_group* group) {
    const std::lock_guard lock(mutex_);
    std::size_t num = 0;
    for (const std::deque<Entry>* entries : {&entries_, &messages_}) {
      for (const Entry& each : *entries) num += shoal_test(group, each.handle) ? 0 : 1;
    }
    return num;
  }

  // Keeps what is pending until the group is closed, on a thread of its own. Takes over the reference to the group.
  void outlive(CGroup group) {
    std::deque<Entry> entries = take();
    while (!entries.empty() && shoal_test(group.get(), entries.front().handle)) entries.pop_front();
    if (entries.empty()) return;
    std::thread([entries = std::move(entries), group = std::move(group)]() mutable {
      for (const Entry& each : entries) shoal_wait(group.get(), each.handle, -1);
      if (python_is_ending()) {  // nobody can destroy Python objects now
        new std::deque<Entry>(std::move(entries));
        static_cast<void>(group.release());
        return;
      }
      const shoal::WithGil gil;  // for the tensors' Python objects
      entries.clear();
    }).detach();
  }

  void clear() { take(); }

 private:
  struct Entry {
    shoal_handle handle;
    std::vector<at::Tensor> tensors;
  };

  std::deque<Entry> take() {
    const std::lock_guard lock(mutex_);
    std::deque<Entry> all = std::exchange(entries_, {});
    std::move(messages_.begin(), messages_.end(), std::back_inserter(all));
    messages_.clear();
    return all;
  }

  static constexpr shoal_handle kFirstMessage = shoal_handle{1} << 63;

  std::mutex mutex_;
  std::deque<Entry> entries_, messages_;
};

class GroupState {
 public:
  // `python` is the ShoalProcessGroup of the same engine; `idle` is called about every second while a thread waits.
  GroupState(py::object python, py::object idle, CGroup group, Milliseconds timeout)
      : python_(std::move(python)),
        idle_(std::move(idle)),
        group_(std::move(group)),
        is_single_(shoal_group_size(group_.get()) == 1),
        timeout_(timeout) {}

  ~GroupState() {
    if (python_is_ending() || getpid() != pid_) {  // neither Python nor the engine's threads are there any more
      python_.release();
      idle_.release();
      group_.release();
      return;
    }
    operands_.outlive(CGroup(shoal_group_retain(group_.get())));
    const shoal::WithGil gil;
    idle_ = py::object();
    python_ = py::object();  // closes the engine
    group_.reset();
  }

  shoal_group* group() const { return group_.get(); }
  const py::object& python() const { return python_; }
  Operands& operands() { return operands_; }
  bool is_single() const { return is_single_; }

  Milliseconds timeout() const { return timeout_; }
  void set_timeout(Milliseconds timeout) { timeout_ = timeout; }
  // An operation's timeout: the given one, or the group's if that is unset.
  Milliseconds limit(Milliseconds given) const { return given == c10d::kUnsetTimeout ? timeout() : given; }
  // The same in seconds, for the engine, which takes 0 for none: as in gloo, one of zero or less has passed.
  double limit_s(Milliseconds given) const { return std::max(seconds(limit(given)), kPassedS); }

  // Submits an operation on the memory of tensors, which it keeps until the operation has completed.
  shoal_handle submit(const char* name, const shoal_operation& operation, std::vector<at::Tensor> tensors) {
    if (closed_) raise_comm_error(std::string(name) + ": this process group has been shut down; make a new one");
    shoal_handle handle = SHOAL_NO_HANDLE;
    const shoal_status status = shoal_submit(group(), &operation, 1, &handle);
    if (status != SHOAL_SUCCESS) raise_status(status, shoal_last_error());
    if (!is_single_ && !tensors.empty()) operands_.add(group(), handle, std::move(tensors));
    if (delegated_.load(std::memory_order_relaxed)) settle_delegated();
    return handle;
  }

  // The Python group has begun an operation.
  void delegated() { delegated_ = true; }

  // Handles signals and logs the engine's events. Called about every second of a wait; may raise.
  void idle() {
    if (python_is_ending()) throw std::runtime_error("the interpreter ends");
    const shoal::WithGil gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    idle_();
  }

  // Leaves the group through the Python group, which closes the engine: the futures are set, and its threads end.
  void shutdown() {
    if (closed_.exchange(true)) return;
    {
      const shoal::WithGil gil;
      python_.attr("shutdown")();
    }
    operands_.clear();
  }

 private:
  static constexpr double kPassedS = 1e-9;

  // Lets the Python group release the memory of its operations that have ended, as submit() does with others.
  void settle_delegated() {
    if (python_is_ending()) return;
    const shoal::WithGil gil;
    delegated_ = python_.attr("operations").attr("settle_ended")().cast<bool>();
  }

  const int pid_ = static_cast<int>(getpid());
  py::object python_, idle_;
  CGroup group_;
  const bool is_single_;
  std::atomic<Milliseconds> timeout_;
  std::atomic<bool> closed_{false}, delegated_{false};
  Operands operands_;
};

// ---- works ----------------------------------------------------------------------------------------------

// An operation of the engine. Waiting needs no GIL; an error is raised as shoal's CommError.
class EngineWork final : public c10d::Work {
 public:
  // `source`: of a received message, one int32 for the rank that has sent it.
  EngineWork(std::shared_ptr<GroupState> group, shoal_handle handle, c10d::OpType type, const char* name,
             std::vector<at::Tensor> outputs, at::Tensor source = {})
      : c10d::Work(-1, type),
        group_(std::move(group)),
        handle_(handle),
        name_(name),
        outputs_(std::move(outputs)),
        source_(std::move(source)) {
    if (group_->is_single()) settle(SHOAL_SUCCESS, "");
  }

  bool isCompleted() override {
    if (!settled_ && shoal_test(group_->group(), handle_)) settle_now();
    return settled_;
  }

  bool isSuccess() const override { return const_cast<EngineWork*>(this)->isCompleted() && status_ == SHOAL_SUCCESS; }

  std::exception_ptr exception() const override {
    if (!settled_ || status_ == SHOAL_SUCCESS) return nullptr;
    try {
      raise_status(status_, message_);
    } catch (...) {
      return std::current_exception();
    }
  }

  // Raises CommError if the operation failed, or if `timeout` has passed (less than zero: at once; zero: none): the
  // operation itself continues then.
  bool wait(Milliseconds timeout = kNoTimeout) override {
    if (!settled_) wait_until_settled(timeout);
    if (status_ != SHOAL_SUCCESS) raise_status(status_, message_);
    return true;
  }

  void synchronize() override { wait(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  int sourceRank() const override { return source_.defined() ? *source_.const_data_ptr<int>() : c10d::Work::sourceRank(); }
  uint64_t getSequencenumber() const override { return handle_; }

  // Returns the future of the list of output tensors, which the engine's completer sets.
  FuturePtr getFuture() override {
    {
      const std::lock_guard lock(mutex_);
      if (future_) return future_;
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    }
    auto self = c10::intrusive_ptr<EngineWork>::unsafe_reclaim_from_nonowning(this);
    if (settled_) complete_future();
    else shoal_then(group_->group(), handle_, &EngineWork::complete, self.release());
    return future_;
  }

 private:
  // Takes over a reference to a work, and sets its future.
  static void complete(void* context, shoal_handle, shoal_status, const char*) {
    const auto work = c10::intrusive_ptr<EngineWork>::reclaim(static_cast<EngineWork*>(context));
    if (!work->settled_) work->settle_now();
    work->complete_future();
  }

  void complete_future() {
    if (status_ == SHOAL_SUCCESS) return future_->markCompleted(c10::IValue(outputs_));
    // The error of a future may be raised many times, which a Python exception held in C++ cannot be.
    future_->setError(std::make_exception_ptr(
        c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, message_)));
  }

  static constexpr double kSliceS = 1.0;

  void settle(shoal_status status, const std::string& message) {
    {
      const std::lock_guard lock(settling_);
      if (settled_) return;
      status_ = status;
      message_ = message;
      settled_ = true;
    }
    if (status == SHOAL_SUCCESS) group_->operands().release(handle_);
    finish();
  }

  // Records the outcome of an operation that has completed, or whose group shuts down.
  void settle_now() {
    const shoal_status status = shoal_wait(group_->group(), handle_, 0);
    if (status == SHOAL_SUCCESS) return settle(status, "");
    if (status != SHOAL_TIMED_OUT) return settle(status, shoal_last_error());
    settle(SHOAL_GROUP_FAILED, std::string(name_) + ": this process group was shut down before it had ended");
  }

  void wait_until_settled(Milliseconds timeout) {
    const WithoutGil released;
    const double limit_s = seconds(timeout);
    const auto begin = std::chrono::steady_clock::now();
    while (!settled_) {
      const double waited_s = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
      const double left_s = timeout != kNoTimeout ? std::max(limit_s - waited_s, 0.0) : kSliceS;
      const shoal_status status = shoal_wait(group_->group(), handle_, std::min(left_s, kSliceS));
      if (status == SHOAL_SUCCESS) return settle(status, "");
      if (status != SHOAL_TIMED_OUT) return settle(status, shoal_last_error());
      if (left_s <= kSliceS && timeout != kNoTimeout) {
        char text[32];
        std::snprintf(text, sizeof text, "%g", limit_s);
        raise_comm_error(std::string(name_) + ": waited " + text +
                         " s as asked and it is still pending; wait longer, or find out which rank is late");
      }
      group_->idle();
    }
  }

  const std::shared_ptr<GroupState> group_;
  const shoal_handle handle_;
  const char* const name_;
  const std::vector<at::Tensor> outputs_;
  const at::Tensor source_;
  FuturePtr future_;
  std::mutex settling_;
  shoal_status status_ = SHOAL_SUCCESS;  // set before settled_
  std::string message_;
  std::atomic<bool> settled_{false};
};

// Several works as one.
class JoinedWork final : public c10d::Work {
 public:
  explicit JoinedWork(std::vector<WorkPtr> works) : c10d::Work(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

  bool isCompleted() override {
    for (const WorkPtr& work : works_) {
      if (!work->isCompleted()) return false;
    }
    return true;
  }
  bool isSuccess() const override {
    for (const WorkPtr& work : works_) {
      if (!work->isSuccess()) return false;
    }
    return true;
  }
  bool wait(Milliseconds timeout = kNoTimeout) override {
    for (const WorkPtr& work : works_) work->wait(timeout);
    return true;
  }
  void synchronize() override { wait(); }
  std::vector<at::Tensor> result() override { return {}; }
  FuturePtr getFuture() override {
    c10::List<FuturePtr> futures(c10::FutureType::create(c10::AnyType::get()));
    for (const WorkPtr& work : works_) futures.push_back(work->getFuture());
    const auto all = c10::collectAll(futures);
    return all->then(
        [](c10::ivalue::Future& done) -> c10::IValue {
          for (const c10::IValue& each : done.value().toListRef()) each.toFuture()->value();  // raises errors
          return std::vector<at::Tensor>{};
        },
        c10::ListType::create(c10::TensorType::get()));
  }

 private:
  const std::vector<WorkPtr> works_;
};

// A work that Python made. Holds its Python object, without which its methods would be gone.
class PythonWork final : public c10d::Work {
 public:
  explicit PythonWork(py::object work)
      : inner_(work.cast<WorkPtr>()), work_(std::move(work)), pid_(static_cast<int>(getpid())) {}

  ~PythonWork() override {
    if (python_is_ending() || getpid() != pid_) {
      work_.release();
      inner_.release();
      return;
    }
    const shoal::WithGil gil;
    inner_.reset();
    work_ = py::object();
  }

  bool wait(Milliseconds timeout = kNoTimeout) override { return inner_->wait(timeout); }
  FuturePtr getFuture() override { return inner_->getFuture(); }
  void synchronize() override { call("synchronize"); }
  bool isCompleted() override { return call("is_completed").cast<bool>(); }
  bool isSuccess() const override { return call("is_success").cast<bool>(); }
  int sourceRank() const override { return call("source_rank").cast<int>(); }

  std::vector<at::Tensor> result() override {
    const shoal::WithGil gil;
    const py::object found = work_.attr("result")();
    try {
      return found.cast<std::vector<at::Tensor>>();
    } catch (const py::cast_error&) {  // lists of tensors
      return {};
    }
  }

  std::exception_ptr exception() const override {
    const shoal::WithGil gil;
    const py::object error = work_.attr("exception")();
    if (error.is_none()) return nullptr;
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    return std::make_exception_ptr(py::error_already_set());
  }

 private:
  // The result of a method without arguments, of a type that needs no GIL to be destroyed: a bool, an int, None.
  struct Result {
    py::object value;
    ~Result() {
      const shoal::WithGil gil;
      value = py::object();
    }
    template <class T>
    T cast() const {
      const shoal::WithGil gil;
      return value.cast<T>();
    }
  };
  Result call(const char* method) const {
    const shoal::WithGil gil;
    return {work_.attr(method)()};
  }

  WorkPtr inner_;
  py::object work_;
  const int pid_;
};

}  // namespace shoal_torch
