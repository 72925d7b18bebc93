// This rank's operations: numbers them, waits for them, ends them. Any thread.
//
// Invariant of completion: `Op::pending` counts the reasons for which an operation is not over: its submission, each
// chunk that this rank sends or receives, each queue that points into the caller's memory. Each reason is held once
// and released once. When the last one is released the operation completes, and only then; from then on nothing reads
// or writes the caller's memory. end_all() ends every operation at once; its caller has made sure that nothing points
// into callers' memory any more. release() aborts the process for an operation with no reason left.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/errors.h"
#include "engine/op.h"

namespace shoal {

class OpTable {
 public:
  explicit OpTable(std::string group) : group_(std::move(group)) {}

  // Accepts operations from now on.
  void open();
  // Throws GroupError if the group has failed or is not open.
  void require_open();
  // Numbers and adds operations, all of them or, if it throws GroupError, none. Messages are numbered apart.
  void add(const std::vector<OpPtr>& ops);

  // Operations of the group that this rank has begun; those below the second number have completed here.
  std::uint64_t num_submitted() const { return num_submitted_; }
  std::uint64_t num_completed() const { return num_completed_; }

  OpPtr find(std::uint64_t seq);        // null unless pending
  std::vector<OpPtr> pending();         // in order

  void hold(Op& op, int reasons = 1) { op.pending.fetch_add(reasons); }
  void release(const OpPtr& op);
  // Holds the operation until the last copy of the result is gone.
  std::shared_ptr<const void> held(const OpPtr& op);

  // Returns whether the operation has ended within `timeout_s` (negative: no limit). Throws GroupError if it failed.
  bool wait(std::uint64_t seq, double timeout_s);
  bool is_done(std::uint64_t seq);
  // Makes next_watched() return the operation once it has ended.
  void watch(std::uint64_t seq);
  std::vector<std::uint64_t> next_watched(double timeout_s);
  // Calls `then` once the operation has ended, at once if it has: on the thread that ends it, and without the lock.
  void on_end(std::uint64_t seq, std::function<void()> then);

  // The group has failed: ends all operations. The first reason stays.
  void end_all(const std::string& reason);
  // Returns false if it was closed before. Then no operation can begin; end_all() ends those that have begun.
  bool close();
  bool is_closed();
  std::string error();  // why the group failed; empty for a group that has not, or is closed

 private:
  void check_open() REQUIRES(mutex_);
  void complete(const OpPtr& op);
  // Adds to `then` what is to be called once the lock is gone.
  void end(std::uint64_t seq, Op& op, std::vector<std::function<void()>>& then) REQUIRES(mutex_);

  const std::string group_;
  std::atomic<std::uint64_t> num_submitted_{0}, num_completed_{0};
  Mutex mutex_;
  Condition changed_;
  std::map<std::uint64_t, OpPtr> ops_ GUARDED_BY(mutex_);
  std::set<std::uint64_t> failed_ GUARDED_BY(mutex_), watched_ GUARDED_BY(mutex_);
  std::deque<std::uint64_t> watched_done_ GUARDED_BY(mutex_);
  std::map<std::uint64_t, std::function<void()>> on_end_ GUARDED_BY(mutex_);
  std::string error_ GUARDED_BY(mutex_);
  std::uint64_t num_messages_ GUARDED_BY(mutex_) = 0;
  bool open_ GUARDED_BY(mutex_) = false, closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace shoal
