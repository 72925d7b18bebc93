// The works of the native group: an operation of the engine, several as one, and one that Python runs.
#pragma once

#include <ATen/core/ivalue.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "group_state.h"

namespace shoal_torch {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

// An operation of the engine. Waiting needs no GIL; an error is raised as shoal's CommError.
class EngineWork : public c10d::Work {
 public:
  EngineWork(std::shared_ptr<GroupState> group, shoal_handle handle, c10d::OpType type, const char* name,
             std::vector<at::Tensor> outputs)
      : c10d::Work(-1, type), group_(std::move(group)), handle_(handle), name_(name), outputs_(std::move(outputs)) {
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
  uint64_t getSequencenumber() const override { return handle_; }

  // Returns the future of the list of output tensors, set by the group's completer.
  FuturePtr getFuture() override {
    {
      const std::lock_guard lock(mutex_);
      if (future_) return future_;
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    }
    auto promise = std::make_unique<WorkPromise>(c10::intrusive_ptr<EngineWork>::unsafe_reclaim_from_nonowning(this));
    if (settled_) promise->complete();
    else group_->completer().add(handle_, std::move(promise));
    return future_;
  }

 private:
  class WorkPromise final : public Promise {
   public:
    explicit WorkPromise(c10::intrusive_ptr<EngineWork> work) : work_(std::move(work)) {}
    bool wait(double timeout_s) override {
      return shoal_wait(work_->group_->group(), work_->handle_, timeout_s) != SHOAL_TIMED_OUT;
    }
    void complete() override {
      if (!work_->settled_) work_->settle_now();
      if (work_->status_ == SHOAL_SUCCESS) return work_->future_->markCompleted(c10::IValue(work_->outputs_));
      // The error of a future may be raised many times, which a Python exception held in C++ cannot be.
      work_->future_->setError(std::make_exception_ptr(
          c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, work_->message_)));
    }

   private:
    c10::intrusive_ptr<EngineWork> work_;
  };

  static constexpr double kSliceS = 1.0;

  void settle(shoal_status status, const std::string& message) {
    {
      const std::lock_guard lock(settling_);
      if (settled_) return;
      status_ = status;
      message_ = message;
      settled_ = true;
    }
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
  FuturePtr future_;
  std::mutex settling_;
  shoal_status status_ = SHOAL_SUCCESS;  // set before settled_
  std::string message_;
  std::atomic<bool> settled_{false};
};

// A send or receive. It has no future, as with torch's own backends.
class MessageWork final : public EngineWork {
 public:
  // `source`: a tensor of one int32, for the rank that has sent.
  MessageWork(std::shared_ptr<GroupState> group, shoal_handle handle, c10d::OpType type, const char* name,
              std::vector<at::Tensor> outputs, at::Tensor source)
      : EngineWork(std::move(group), handle, type, name, std::move(outputs)), source_(std::move(source)) {}

  int sourceRank() const override { return *source_.const_data_ptr<int>(); }
  FuturePtr getFuture() override { return c10d::Work::getFuture(); }

 private:
  const at::Tensor source_;
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
    const py::gil_scoped_acquire gil;
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
    const py::gil_scoped_acquire gil;
    const py::object found = work_.attr("result")();
    try {
      return found.cast<std::vector<at::Tensor>>();
    } catch (const py::cast_error&) {  // lists of tensors
      return {};
    }
  }

  std::exception_ptr exception() const override {
    const py::gil_scoped_acquire gil;
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
      const py::gil_scoped_acquire gil;
      value = py::object();
    }
    template <class T>
    T cast() const {
      const py::gil_scoped_acquire gil;
      return value.cast<T>();
    }
  };
  Result call(const char* method) const {
    const py::gil_scoped_acquire gil;
    return {work_.attr(method)()};
  }

  WorkPtr inner_;
  py::object work_;
  const int pid_;
};

}  // namespace shoal_torch
