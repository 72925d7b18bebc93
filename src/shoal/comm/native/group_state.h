// The state that a group's backend and works share: the C group, the Python group beside it, and the completer. Lives
// until the last of them is gone.
#pragma once

#include <ATen/ATen.h>
#include <shoal.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <iterator>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "completer.h"
#include "python_errors.h"

namespace shoal_torch {

using Milliseconds = std::chrono::milliseconds;

inline double seconds(Milliseconds time) { return std::chrono::duration<double>(time).count(); }

// Owns a reference to a C group.
struct ReleaseGroup {
  void operator()(shoal_group* group) const { shoal_group_release(group); }
};
using CGroup = std::unique_ptr<shoal_group, ReleaseGroup>;

// Tensors that the engine reads and writes, kept until their operations have completed.
class Operands {
 public:
  void add(shoal_group* group, shoal_handle handle, at::Tensor input, at::Tensor output,
           std::vector<at::Tensor> others = {}) {
    std::vector<Entry> done;  // destroyed after the lock is released: a tensor's Python object needs the GIL
    const std::lock_guard lock(mutex_);
    if (handle >= kFirstMessage) {  // they end in any order, and one may stay for long
      const auto ended = std::partition(messages_.begin(), messages_.end(), [group](const Entry& each) {
        return !shoal_test(group, each.handle);
      });
      std::move(ended, messages_.end(), std::back_inserter(done));
      messages_.erase(ended, messages_.end());
      messages_.push_back({handle, std::move(input), std::move(output), {}});
      return;
    }
    while (!entries_.empty() && shoal_test(group, entries_.front().handle)) {
      done.push_back(std::move(entries_.front()));
      entries_.pop_front();
    }
    entries_.push_back({handle, std::move(input), std::move(output), std::move(others)});
  }

  std::size_t num_pending(shoal_group* group) {
    const std::lock_guard lock(mutex_);
    std::size_t num = 0;
    for (const Entry& each : entries_) num += shoal_test(group, each.handle) ? 0 : 1;
    for (const Entry& each : messages_) num += shoal_test(group, each.handle) ? 0 : 1;
    return num;
  }

  // Keeps what is pending until the group is closed, on a thread of its own. Takes over the reference to the group.
  void outlive(CGroup group) {
    std::deque<Entry> entries;
    {
      const std::lock_guard lock(mutex_);
      entries.swap(entries_);
      std::move(messages_.begin(), messages_.end(), std::back_inserter(entries));
      messages_.clear();
    }
    while (!entries.empty() && shoal_test(group.get(), entries.front().handle)) entries.pop_front();
    if (entries.empty()) return;
    std::thread([entries = std::move(entries), group = std::move(group)]() mutable {
      for (const Entry& each : entries) shoal_wait(group.get(), each.handle, -1);
      if (!python_is_ending()) return;
      new std::deque<Entry>(std::move(entries));  // the process ends: nobody can destroy Python objects now
      group.release();
    }).detach();
  }

  void clear() {
    std::deque<Entry> entries;  // destroyed after the lock is released
    std::vector<Entry> messages;
    const std::lock_guard lock(mutex_);
    entries.swap(entries_);
    messages.swap(messages_);
  }

 private:
  struct Entry {
    shoal_handle handle;
    at::Tensor input, output;
    std::vector<at::Tensor> others;
  };

  static constexpr shoal_handle kFirstMessage = shoal_handle{1} << 63;

  std::mutex mutex_;
  std::deque<Entry> entries_;
  std::vector<Entry> messages_;
};

class GroupState {
 public:
  // `python` is the ShoalProcessGroup of the same engine; `idle` is called about every second while a thread waits.
  GroupState(py::object python, py::object idle, CGroup group, Milliseconds timeout, bool ordered)
      : python_(std::move(python)),
        idle_(std::move(idle)),
        group_(std::move(group)),
        is_single_(shoal_group_size(group_.get()) == 1),
        timeout_(timeout),
        completer_(ordered) {}

  ~GroupState() {
    if (python_is_ending() || getpid() != pid_) {  // neither Python nor the engine's threads are there any more
      python_.release();
      idle_.release();
      group_.release();
      return;
    }
    operands_.outlive(CGroup(shoal_group_retain(group_.get())));
    const py::gil_scoped_acquire gil;
    idle_ = py::object();
    python_ = py::object();  // closes the engine
    group_.reset();
  }

  shoal_group* group() const { return group_.get(); }
  const py::object& python() const { return python_; }
  Completer& completer() { return completer_; }
  Operands& operands() { return operands_; }
  bool is_single() const { return is_single_; }

  Milliseconds timeout() const { return timeout_; }
  void set_timeout(Milliseconds timeout) { timeout_ = timeout; }
  // An operation's timeout: the given one, or the group's if that is unset.
  Milliseconds limit(Milliseconds given) const { return given == c10d::kUnsetTimeout ? timeout() : given; }
  // The same in seconds, for the engine, which takes 0 for none: as in gloo, one of zero or less has passed.
  double limit_s(Milliseconds given) const { return std::max(seconds(limit(given)), kPassedS); }

  std::uint64_t num_submitted() const { return num_submitted_; }

  // Counts an operation and calls `submit` for it, in the order that the completer allows.
  template <class Submit>
  auto begin(const char* name, Submit submit) {
    require_open(name);
    try {
      return completer_.begin(name, seconds(timeout()), std::move(submit));
    } catch (const OvertakenError& error) {
      raise_usage_error(error.what());
    } catch (const CallbackTimeout& error) {
      raise_comm_error(error.what());
    }
  }

  // Submits an operation on the memory of tensors, which it keeps until the operation has completed.
  shoal_handle submit(const char* name, const shoal_operation& operation, const at::Tensor& input,
                      const at::Tensor& output, std::vector<at::Tensor> others = {}) {
    shoal_handle handle = SHOAL_NO_HANDLE;
    const shoal_status status = begin(name, [&] {
      ++num_submitted_;
      return shoal_submit(group(), &operation, 1, &handle);
    });
    if (status != SHOAL_SUCCESS) {
      --num_submitted_;
      raise_status(status, shoal_last_error());
    }
    if (!is_single_ && (input.defined() || !others.empty())) {
      operands_.add(group(), handle, input, output, std::move(others));
    }
    return handle;
  }

  // Submits a send or receive, which has no place in the order of the group's operations. `source`: where the rank is
  // written that has sent.
  shoal_handle submit_message(const char* name, const shoal_operation& operation, const at::Tensor& tensor,
                              const at::Tensor& source) {
    require_open(name);
    shoal_handle handle = SHOAL_NO_HANDLE;
    const shoal_status status = shoal_submit(group(), &operation, 1, &handle);
    if (status != SHOAL_SUCCESS) raise_status(status, shoal_last_error());
    operands_.add(group(), handle, tensor, source);
    return handle;
  }

  void require_open(const char* name) const {
    if (closed_) raise_comm_error(std::string(name) + ": this process group has been shut down; make a new one");
  }

  // Handles signals and logs the engine's events. Called about every second of a wait; may raise.
  void idle() {
    if (python_is_ending()) throw std::runtime_error("the interpreter ends");
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    idle_();
  }

  // Leaves the group through the Python group, which closes the engine.
  void shutdown() {
    if (closed_.exchange(true)) return;
    const WithoutGil released;
    completer_.stop();
    {
      const py::gil_scoped_acquire gil;
      python_.attr("shutdown")();
    }
    completer_.join(kJoinS);
    operands_.clear();
    if (is_single_) shoal_group_close(group());
  }

  // Completes the futures and ends the threads at the end of the interpreter. Called without the GIL.
  void end() {
    completer_.stop();
    completer_.join(kEndS);
  }

 private:
  static constexpr double kJoinS = 10, kEndS = 1, kPassedS = 1e-9;

  const int pid_ = static_cast<int>(getpid());
  py::object python_, idle_;
  CGroup group_;
  const bool is_single_;
  std::atomic<Milliseconds> timeout_;
  std::atomic<bool> closed_{false};
  std::atomic<std::uint64_t> num_submitted_{0};
  Completer completer_;
  Operands operands_;
};

}  // namespace shoal_torch
