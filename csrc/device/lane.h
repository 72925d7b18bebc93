// The way of a device's tensors through pinned memory of the host, chunk by chunk, to an engine and back.
//
// Two threads, each with a stream of the device:
//
//   sender    makes its stream wait for the caller's work; queues the copy of each chunk into a pinned buffer; submits the
//             chunk to the engine once its copy has completed
//   receiver  is told by the engine that a chunk has ended; queues its copy to the device
//
// So the chunks of one tensor leave the device, are reduced and return at the same time, while the device computes the
// next tensor. No thread but the sender ever waits for the device, and no Python runs.
//
// A buffer has one event, which is recorded at most twice for a chunk: after the copy into it, and after the copy out of it.
// The next copy into the buffer waits for the latter on the device. Buffers are reused in the order in which they became
// free. The receiver frees them without the sender, so the two cannot wait for each other.
//
// Messages between ranks (engine/messages.h) travel whole, each in a buffer of its own size: none waits for the buffer of
// another one, whose receiver may be waiting for this one. Such buffers are kept for later messages, too.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "device/cuda_runtime.h"
#include "engine/types.h"

namespace shoal {

// What a lane needs of Engine (engine/engine.h) or SingleRank (c_api/single_rank.h).
class ChunkEngine {
 public:
  virtual ~ChunkEngine() = default;
  virtual std::uint64_t submit(OpSpec spec) = 0;
  virtual void on_end(std::uint64_t seq, std::function<void()> then) = 0;
  virtual bool wait(std::uint64_t seq, double timeout_s) = 0;
  // Throws std::invalid_argument if no server of the group could keep the weights of an operation on them.
  virtual void require_servers(const OpSpec&) const {}
};

template <class Group>
class ChunkEngineOf final : public ChunkEngine {
 public:
  explicit ChunkEngineOf(std::shared_ptr<Group> group) : group_(std::move(group)) {}
  std::uint64_t submit(OpSpec spec) override { return group_->submit(std::move(spec)); }
  void on_end(std::uint64_t seq, std::function<void()> then) override { group_->on_end(seq, std::move(then)); }
  bool wait(std::uint64_t seq, double timeout_s) override { return group_->wait(seq, timeout_s); }
  void require_servers(const OpSpec& spec) const override {
    if constexpr (requires { group_->require_servers(spec); }) group_->require_servers(spec);
  }

 private:
  const std::shared_ptr<Group> group_;
};

// A tensor of the device as a table of `rows` rows, which are rows `first` and following of each buffer.
struct DeviceTable {
  std::byte* data = nullptr;  // null: is not copied
  std::size_t rows = 1, first = 0;
};

// A collective of a tensor on the device. All ranks cut it into the same chunks, of `columns` columns of its tables.
// Of operations on weights that servers keep, one side may be memory of the host (options, coefficients, sums): its address
// is that of `spec`, and the side's table is null. Their chunks begin with blocks (kServedBlock): to the servers each is a
// tensor, whose number is the whole one's plus the number of blocks before it.
// Of messages `spec` has the addresses on the device of all that is sent and received, and the tables are not used.
struct Transfer {
  OpSpec spec;  // kind, element, reduction, root, shape and priority of each chunk; what servers need
  DeviceTable source, target;
  std::size_t buffer_rows = 1;         // rows of a chunk in its buffer
  std::size_t width = 0, columns = 1;  // elements of a row, of the tables and of a chunk
  CudaEvent ready = nullptr;           // recorded after the caller's work on the tables; lives until the transfer has ended
  std::chrono::steady_clock::time_point deadline;
};

class Lane {
 public:
  struct Options {
    int device = 0;
    CudaStream to_host = nullptr, to_device = nullptr;
    std::size_t num_buffers = 2, buffer_bytes = 0;
  };

  // Starts the threads. The streams live until stop() has returned.
  Lane(CudaRuntime runtime, Options options);
  // Lets the threads end, once all transfers have; does not wait for them.
  ~Lane();

  // Returns the engine that was made for this object before, or makes it. It lives until the lane is stopped: no thread of the
  // lane, nor of the engine, should be the one that lets it go.
  std::shared_ptr<ChunkEngine> engine_of(const void* object, const std::function<std::shared_ptr<ChunkEngine>()>& make);

  // Begins a transfer and returns its number. Returns at once. The memory of the tables stays valid until work on the
  // streams that was queued before the transfer's end has completed. Throws std::invalid_argument for a chunk that is
  // larger than a buffer, and for weights that no server could keep.
  std::uint64_t begin(std::shared_ptr<ChunkEngine> engine, Transfer transfer);

  // Returns whether a transfer has ended within `timeout_s`: all its copies are queued, those to the host completed.
  // Throws the first error, GroupError or CudaError, after which no more of its copies are queued. A number is valid
  // until the wait for it returns true or throws.
  bool wait(std::uint64_t number, double timeout_s);

  // Returns the number of a transfer that has ended, the first of them, and none if there is none within `timeout_s`. Returns
  // at once after stop(). wait() then takes it.
  std::optional<std::uint64_t> next_ended(double timeout_s);

  // Waits until all transfers have ended and joins the threads. Chunks end with their engine at the latest.
  void stop();

  // Chunks, copies and bytes of each direction, events recorded, times that the sender waited for an event and times
  // that it slept.
  std::map<std::string, std::uint64_t> counters() const;

 private:
  struct Core;

  const int pid_;
  const std::shared_ptr<Core> core_;  // the threads and the engines have it, too
};

}  // namespace shoal
