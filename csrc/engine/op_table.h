// This rank's operations: the state of each, and the table that numbers, counts, waits for and ends them. Any thread.
//
// Invariant of completion: `Op::pending` counts the reasons for which an operation is not over: its submission, each
// chunk that this rank sends or receives, each queue that points into the caller's memory. Each reason is held once
// and released once. When the last one is released the operation completes, and only then; from then on nothing reads
// or writes the caller's memory. end_all() ends every operation at once; its caller has made sure that nothing points
// into callers' memory any more. release() aborts the process for an operation with no reason left.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "engine/errors.h"
#include "engine/topology.h"
#include "engine/types.h"
#include "transport/frame.h"

namespace shoal {

struct Op {
  enum class Step : std::uint8_t { idle, waiting, done };

  // State of a chunk that this rank owns on its host.
  struct Part {
    Step step = Step::idle;
    bool contributed = false;
    int server = 0;                       // differs from the chunk's if that one is lost
    Payload contribution;                 // kept until the result arrives, to resend it if the server is lost
    Element input = Element::uint8;       // type of the contribution
    std::byte* destination = nullptr;     // address for the result
    std::uint64_t sent_ns = 0;
  };

  explicit Op(OpSpec of = {});

  OpSpec spec;
  std::uint64_t seq = 0;
  std::uint64_t signature;  // equal for two ranks exactly if they issued the same operation (shapes of equal size may differ)
  std::chrono::steady_clock::time_point begun = std::chrono::steady_clock::now();
  std::vector<Chunk> chunks;
  int num_links = 1;                          // hosts and helpers that serve chunks of its kind
  std::vector<Part> parts;                    // network thread
  std::map<std::uint64_t, Payload> retained;  // results received from helpers, in case one is lost
  std::atomic<int> pending{1};                // see OpTable
  std::atomic<bool> ended{false};
  bool in_question = false;                   // other ranks spoke of it before this rank had issued it
  bool ordered = false;                       // sent in rank 0's order
  bool announced = false, named = false;      // to the other ranks; stragglers were logged
  bool has_messages = false;  // its receives are posted; network thread
  std::uint64_t ticket = 0;   // host stage: of the first chunk, or of the direct exchange
  int blocks_left = 0;        // host stage: not sent or received by the block exchange

  std::size_t width() const { return size_of(spec.element); }

  // Address of chunk `index` in this rank's input or output. Only for ranks that have it.
  const std::byte* input_at(std::uint64_t index, int rank) const {
    if (sends_coefficients(spec.kind)) return spec.input + index * input_stride(spec);
    const std::uint64_t base = spec.kind == Kind::all_gather ? static_cast<std::uint64_t>(rank) * spec.count : 0;
    return spec.input + (chunks[index].begin - base) * width();
  }
  std::byte* output_at(std::uint64_t index, int rank) const {
    const std::uint64_t base = spec.kind == Kind::reduce_scatter ? static_cast<std::uint64_t>(rank) * spec.count : 0;
    return spec.output + result_bytes(chunks[index].begin - base);
  }
  // Bytes of a chunk's contribution, and of its result.
  std::size_t bytes_of(std::uint64_t index) const {
    return sends_coefficients(spec.kind) ? coefficient_bytes(spec) : chunks[index].count * width();
  }
  std::size_t result_bytes_of(std::uint64_t index) const { return result_bytes(chunks[index].count); }
  // Bytes of the result of so many elements.
  std::size_t result_bytes(std::uint64_t count) const {
    if (returns_sums(spec.kind)) return (count + kServedUnit - 1) / kServedUnit * kSums * sizeof(double);
    if (spec.kind == Kind::factor) return factor_parts(count) * factor_bytes(spec);
    return count * (returns_weights(spec.kind) ? size_of(spec.weights) : width());
  }
  // Bytes of a chunk that windows bound: those of an apply are on their way back.
  std::size_t in_flight_bytes(std::uint64_t index) const {
    return spec.kind == Kind::apply ? result_bytes_of(index) : parts[index].contribution.size();
  }
  bool sums() const { return adds_up(spec.kind); }
};

using OpPtr = std::shared_ptr<Op>;

// An empty tensor may have a null address.
inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes) std::memcpy(to, from, bytes);
}

// Kinds whose results go to ranks that contribute nothing, and so may not have begun the operation.
inline bool forwards(Kind kind) { return kind == Kind::broadcast || kind == Kind::all_gather; }

// Number and bytes of operations, for users.
class OpCounts {
 public:
  void add(const OpSpec& spec);
  // "ops_<name>" and "bytes_<name>" of each kind that was counted, and of each name of delegated operations.
  std::map<std::string, std::uint64_t> by_name() const;

 private:
  struct Count {
    std::uint64_t ops = 0, bytes = 0;
  };

  std::array<Count, kNumKinds> of_kinds_;
  std::map<std::string, Count> delegated_;
};

class OpTable {
 public:
  // What remains of an operation once it has ended.
  struct Record {
    std::uint64_t seq = ~std::uint64_t{0}, signature = 0;
    OpSpec spec;
  };
  static constexpr std::size_t kRecords = 1024;

  explicit OpTable(std::string group) : group_(std::move(group)), records_(kRecords) {}

  // Accepts operations from now on.
  void open();
  // Throws GroupError if the group has failed or is not open.
  void require_open() {
    if (!open_) refuse();
  }
  // Numbers and adds operations, all of them or, if it throws GroupError, none. Messages are numbered apart.
  void add(const std::vector<OpPtr>& ops);

  // Operations of the group that this rank has begun; those below the second number have completed here.
  std::uint64_t num_submitted() const { return num_submitted_; }
  std::uint64_t num_completed() const { return num_completed_; }

  OpPtr find(std::uint64_t seq);        // null unless pending
  std::vector<OpPtr> pending();         // in order
  // Returns what this rank has issued as `seq`, no message, if that is among the last kRecords. If it has not issued it
  // yet, the operation will be in_question.
  std::optional<Record> issued(std::uint64_t seq);

  void hold(Op& op, int reasons = 1) { op.pending.fetch_add(reasons); }
  void release(const OpPtr& op) {
    if (const int before = op->pending.fetch_sub(1); before <= 1) complete(op, before);
  }
  // Holds the operation until the last copy of the result is gone.
  std::shared_ptr<const void> held(const OpPtr& op) {
    hold(*op);
    return {static_cast<const void*>(op.get()), [this, op](const void*) { release(op); }};
  }

  // Returns whether the operation has ended within `timeout_s` (negative: no limit). Throws GroupError if it failed.
  bool wait(std::uint64_t seq, double timeout_s);
  bool is_done(std::uint64_t seq);
  // Calls `then` once the operation has ended, at once if it has: on the thread that ends it, and without the lock.
  void on_end(std::uint64_t seq, std::function<void()> then);

  // The group has failed: ends all operations. The first reason stays.
  void end_all(const std::string& reason);
  // Returns false if it was closed before. Then no operation can begin; end_all() ends those that have begun.
  bool close();
  bool is_closed();
  std::string error();  // why the group failed; empty for a group that has not, or is closed
  std::map<std::string, std::uint64_t> counters();  // OpCounts

 private:
  void refuse();
  std::string why_not_open() const REQUIRES(mutex_);
  void complete(const OpPtr& op, int reasons);
  // Adds to `then` what is to be called once the lock is gone.
  void end(std::uint64_t seq, Op& op, std::vector<std::function<void()>>& then) REQUIRES(mutex_);

  const std::string group_;
  std::atomic<std::uint64_t> num_submitted_{0}, num_completed_{0};
  Mutex mutex_;
  Condition changed_;
  std::map<std::uint64_t, OpPtr> ops_ GUARDED_BY(mutex_);
  std::set<std::uint64_t> failed_ GUARDED_BY(mutex_);
  std::map<std::uint64_t, std::function<void()>> on_end_ GUARDED_BY(mutex_);
  std::string error_ GUARDED_BY(mutex_);
  std::uint64_t num_messages_ GUARDED_BY(mutex_) = 0;
  OpCounts counts_ GUARDED_BY(mutex_);
  std::vector<Record> records_ GUARDED_BY(mutex_);              // by number modulo kRecords
  std::set<std::uint64_t> asked_for_ GUARDED_BY(mutex_);        // by issued(), and not issued yet
  std::atomic<bool> open_{false};                               // set with the lock
  bool closed_ GUARDED_BY(mutex_) = false;
};

}  // namespace shoal
