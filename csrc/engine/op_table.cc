#include "engine/op_table.h"

#include <cstdio>
#include <cstdlib>
#include <utility>

#include "base/clock.h"

namespace shoal {

void OpTable::open() {
  const MutexLock lock(mutex_);
  open_ = true;
}

void OpTable::check_open() {
  if (!error_.empty()) throw GroupError(error_);
  if (closed_ || !open_) throw GroupError("group '" + group_ + "' is not open");
}

void OpTable::require_open() {
  const MutexLock lock(mutex_);
  check_open();
}

void OpTable::add(const std::vector<OpPtr>& ops) {
  const MutexLock lock(mutex_);
  check_open();
  for (const OpPtr& op : ops) {
    const bool message = is_message(op->spec.kind);
    op->seq = message ? kFirstMessage + num_messages_++ : num_submitted_.load();
    ops_.emplace(op->seq, op);
    if (!message) num_submitted_ = op->seq + 1;
  }
}

OpPtr OpTable::find(std::uint64_t seq) {
  const MutexLock lock(mutex_);
  const auto found = ops_.find(seq);
  return found == ops_.end() ? nullptr : found->second;
}

std::vector<OpPtr> OpTable::pending() {
  const MutexLock lock(mutex_);
  std::vector<OpPtr> ops;
  for (const auto& [seq, op] : ops_) ops.push_back(op);
  return ops;
}

void OpTable::release(const OpPtr& op) {
  const int before = op->pending.fetch_sub(1);
  if (before == 1) return complete(op);
  if (before > 1) return;
  std::fprintf(stderr, "shoal: %s was released more often than held\n", numbered(op->seq).c_str());
  std::abort();
}

std::shared_ptr<const void> OpTable::held(const OpPtr& op) {
  hold(*op);
  return {static_cast<const void*>(op.get()), [this, op](const void*) { release(op); }};
}

void OpTable::complete(const OpPtr& op) {
  std::vector<std::function<void()>> then;
  {
    const MutexLock lock(mutex_);
    const auto found = ops_.find(op->seq);
    if (found == ops_.end()) return;  // end_all() came first
    ops_.erase(found);
    end(op->seq, *op, then);
    const bool none = ops_.empty() || ops_.begin()->first >= kFirstMessage;
    num_completed_ = none ? num_submitted_.load() : ops_.begin()->first;
  }
  changed_.notify_all();
  for (const auto& call : then) call();
}

void OpTable::end(std::uint64_t seq, Op& op, std::vector<std::function<void()>>& then) {
  if (!watched_.empty() && watched_.erase(seq)) watched_done_.push_back(seq);
  if (!on_end_.empty()) {
    if (auto found = on_end_.extract(seq)) then.push_back(std::move(found.mapped()));
  }
  op.ended = true;
}

bool OpTable::wait(std::uint64_t seq, double timeout_s) {
  const auto deadline = std::chrono::steady_clock::now() + seconds(timeout_s < 0 ? 0 : timeout_s);
  const MutexLock lock(mutex_);
  while (ops_.count(seq)) {
    if (timeout_s < 0) changed_.wait(mutex_);
    else if (!changed_.wait_until(mutex_, deadline) && ops_.count(seq)) return false;
  }
  if (!failed_.empty() && failed_.count(seq)) throw GroupError(error_);
  return true;
}

bool OpTable::is_done(std::uint64_t seq) {
  const MutexLock lock(mutex_);
  return !ops_.count(seq);
}

void OpTable::watch(std::uint64_t seq) {
  {
    const MutexLock lock(mutex_);
    if (ops_.count(seq)) watched_.insert(seq);
    else watched_done_.push_back(seq);
  }
  changed_.notify_all();
}

std::vector<std::uint64_t> OpTable::next_watched(double timeout_s) {
  const auto deadline = std::chrono::steady_clock::now() + seconds(timeout_s);
  const MutexLock lock(mutex_);
  while (watched_done_.empty() && changed_.wait_until(mutex_, deadline)) {
  }
  std::vector<std::uint64_t> done(watched_done_.begin(), watched_done_.end());
  watched_done_.clear();
  return done;
}

void OpTable::on_end(std::uint64_t seq, std::function<void()> then) {
  {
    const MutexLock lock(mutex_);
    if (ops_.count(seq)) return static_cast<void>(on_end_.emplace(seq, std::move(then)));
  }
  then();
}

void OpTable::end_all(const std::string& reason) {
  std::vector<std::function<void()>> then;
  {
    const MutexLock lock(mutex_);
    if (error_.empty()) error_ = reason;
    for (const auto& [seq, op] : ops_) {
      failed_.insert(seq);
      end(seq, *op, then);
    }
    ops_.clear();
  }
  changed_.notify_all();
  for (const auto& call : then) call();
}

bool OpTable::close() {
  const MutexLock lock(mutex_);
  return !std::exchange(closed_, true);
}

bool OpTable::is_closed() {
  const MutexLock lock(mutex_);
  return closed_;
}

std::string OpTable::error() {
  const MutexLock lock(mutex_);
  return closed_ ? "" : error_;
}

}  // namespace shoal
