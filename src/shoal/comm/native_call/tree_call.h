// One asynchronous call of a framework's program on several tensors, the leaves of a tree. What XLA and TensorFlow call
// is built on it (shoal/jax/native, shoal/tensorflow/native). Uses the engine through the C interface only (shoal.h).
#ifndef SHOAL_TREE_CALL_H
#define SHOAL_TREE_CALL_H

#include <shoal.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace shoal {

// Leaves below this share a block: a message of their own costs more than two copies. shoal/comm/arrays.py fuses in the
// same way, so that it can stand in for this on some of the ranks.
constexpr std::uint64_t fused_below_bytes = 64 << 10;

// The operations of a call of up to this many bytes are waited for in the caller's thread, each for this long, before
// callbacks of the group complete them: waking two threads costs more than the collective.
constexpr std::uint64_t waited_for_bytes = 1 << 20;
constexpr double brief_wait_s = 0.5e-3;

struct Leaf {
  const std::byte* input;
  std::byte* output;
  shoal_dtype dtype;
  std::uint64_t count;  // of the operation
  std::uint64_t input_bytes;
};

inline std::uint64_t bytes_of(shoal_dtype dtype) {
  constexpr std::array<std::uint64_t, 8> bytes = {4, 8, 2, 2, 1, 1, 4, 8};
  return bytes[dtype];
}

// The operations of a call, in their order: the same on every rank, whatever device its leaves are on. Empty leaves have
// none.
struct Division {
  std::vector<std::vector<Leaf>> together;  // small leaves of one dtype, which share an operation
  std::vector<Leaf> alone;
};

inline Division divide(const std::vector<Leaf>& leaves, int kind) {
  const bool fuses = kind == SHOAL_ALL_REDUCE || kind == SHOAL_BROADCAST;
  const auto is_small = [&](const Leaf& leaf) { return fuses && leaf.count && leaf.input_bytes < fused_below_bytes; };
  std::map<shoal_dtype, std::vector<Leaf>> small;
  for (const Leaf& leaf : leaves) {
    if (is_small(leaf)) small[leaf.dtype].push_back(leaf);
  }
  Division division;
  for (const Leaf& leaf : leaves) {
    if (leaf.count && (!is_small(leaf) || small[leaf.dtype].size() == 1)) division.alone.push_back(leaf);
  }
  for (auto& [dtype, group] : small) {
    if (group.size() > 1) division.together.push_back(std::move(group));
  }
  return division;
}

inline std::uint64_t bytes_of(const std::vector<Leaf>& leaves) {
  std::uint64_t bytes = 0;
  for (const Leaf& leaf : leaves) bytes += leaf.input_bytes;
  return bytes;
}

// Groups by the number that a compiled program has as an attribute; an address would not outlive the process.
class GroupTable {
 public:
  // Takes over a reference to a group under a number above 0, in place of the one before.
  void set(std::int64_t number, shoal_group* group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    shoal_group*& place = groups_[number];
    shoal_group* const before = std::exchange(place, group);
    if (group == nullptr) groups_.erase(number);
    shoal_group_release(before);
  }

  // Returns a new reference, or nullptr.
  shoal_group* find(std::int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = groups_.find(number);
    return found == groups_.end() ? nullptr : shoal_group_retain(found->second);
  }

 private:
  std::mutex mutex_;
  std::map<std::int64_t, shoal_group*> groups_;
};

class TreeCall {
 public:
  // Called once, with an empty string or the reason of a failure, by a thread of the group or by the caller of `run`.
  using Done = std::function<void(const std::string& error)>;

  // Submits one operation per leaf or block of leaves, which share `operation`, and returns. Waits for a small call, but
  // briefly.
  static void run(shoal_group* group, std::vector<Leaf> leaves, shoal_operation operation, Done done) {
    auto* const call = new TreeCall(std::move(done));
    if (operation.kind == SHOAL_BROADCAST && operation.root == shoal_group_rank(group)) {
      copy(leaves);  // the engine leaves the root's output as it is
      for (Leaf& leaf : leaves) leaf.input = leaf.output;
    }
    Division division = divide(leaves, operation.kind);
    for (std::vector<Leaf>& together : division.together) call->gather(std::move(together));
    operation.struct_size = sizeof operation;
    call->submit(group, division.alone, operation);
  }

  // A group of one rank: every operation is a copy.
  static void copy(const std::vector<Leaf>& leaves) {
    for (const Leaf& leaf : leaves) {
      if (leaf.input != leaf.output && leaf.input_bytes) std::memcpy(leaf.output, leaf.input, leaf.input_bytes);
    }
  }

 private:
  // Small leaves of one dtype, side by side.
  struct Block {
    std::unique_ptr<std::byte[]> memory;
    std::vector<Leaf> leaves;
    std::uint64_t count = 0;
  };

  explicit TreeCall(Done done) : done_(std::move(done)) {}

  static void on_complete(void* context, shoal_handle, shoal_status status, const char* message) {
    auto* const call = static_cast<TreeCall*>(context);
    if (status != SHOAL_SUCCESS) call->fail(message);
    call->end();
  }

  void fail(const char* message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (error_.empty()) error_ = message;
  }

  // Copies leaves into a block.
  void gather(std::vector<Leaf> leaves) {
    Block block;
    const std::uint64_t bytes = bytes_of(leaves);
    block.memory = std::make_unique<std::byte[]>(bytes);
    std::byte* to = block.memory.get();
    for (const Leaf& leaf : leaves) {
      if (leaf.input_bytes) std::memcpy(to, leaf.input, leaf.input_bytes);
      to += leaf.input_bytes;
    }
    block.count = bytes / bytes_of(leaves.front().dtype);
    block.leaves = std::move(leaves);
    blocks_.push_back(std::move(block));
  }

  void submit(shoal_group* group, const std::vector<Leaf>& leaves, shoal_operation operation) {
    std::vector<shoal_operation> operations;
    std::uint64_t bytes = 0;
    const auto add = [&](shoal_dtype dtype, std::uint64_t count, const void* input, void* output) {
      bytes += count * bytes_of(dtype);
      operation.dtype = dtype;
      operation.count = count;
      operation.input = input;
      operation.output = output;
      operations.push_back(operation);
    };
    for (const Block& block : blocks_) {
      add(block.leaves.front().dtype, block.count, block.memory.get(), block.memory.get());
    }
    for (const Leaf& leaf : leaves) add(leaf.dtype, leaf.count, leaf.input, leaf.output);
    std::vector<shoal_handle> handles(operations.size());
    if (!operations.empty() &&
        shoal_submit(group, operations.data(), operations.size(), handles.data()) != SHOAL_SUCCESS) {
      fail(shoal_last_error());  // none has begun
      handles.clear();
    }
    pending_ += handles.size();
    bool waits = bytes <= waited_for_bytes;
    for (const shoal_handle handle : handles) {
      const shoal_status status = waits ? shoal_wait(group, handle, brief_wait_s) : SHOAL_TIMED_OUT;
      waits = status != SHOAL_TIMED_OUT;
      if (waits) on_complete(this, handle, status, status == SHOAL_SUCCESS ? "" : shoal_last_error());
      else shoal_on_complete(group, handle, on_complete, this);
    }
    end();
  }

  // Ends one operation. The last one completes the call and deletes it.
  void end() {
    if (pending_.fetch_sub(1) != 1) return;
    const std::unique_ptr<TreeCall> self(this);
    for (const Block& block : blocks_) {
      const std::byte* from = block.memory.get();
      for (const Leaf& leaf : block.leaves) {
        if (error_.empty() && leaf.input_bytes) std::memcpy(leaf.output, from, leaf.input_bytes);
        from += leaf.input_bytes;
      }
    }
    done_(error_);
  }

  std::atomic<std::size_t> pending_{1};  // operations, and `submit` until it returns
  std::mutex mutex_;
  std::string error_;
  std::vector<Block> blocks_;
  Done done_;
};

}  // namespace shoal

#endif  // SHOAL_TREE_CALL_H
