#include "device/stream_lane.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <utility>

#include "base/clock.h"

namespace shoal {

namespace {

constexpr double kLongestS = 1e9;  // longer ones do not fit into nanoseconds
// Chunks are those of comm/routes.py: one leaves the device while others are reduced and return; smaller ones cost more
// than they hide.
constexpr std::size_t kNumChunks = 4, kLeastChunkBytes = std::size_t{1} << 20, kAlignment = 128;

// Makes a device the calling thread's, and its own one again in the end.
class OnDevice {
 public:
  OnDevice(const CudaRuntime& runtime, int device) : runtime_(runtime), before_(runtime.current_device()) {
    runtime.set_device(device);
  }
  ~OnDevice() {
    try {
      runtime_.set_device(before_);
    } catch (const CudaError&) {  // the call that failed first has been reported
    }
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  const CudaRuntime& runtime_;
  const int before_;
};

class Event {
 public:
  explicit Event(const CudaRuntime& runtime) : runtime_(runtime), event_(runtime.create_event()) {}
  ~Event() { runtime_.destroy_event(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  CudaEvent get() const { return event_; }

 private:
  const CudaRuntime& runtime_;
  const CudaEvent event_;
};

CudaStream stream_of(const CudaRuntime& runtime, int device) {
  const OnDevice here(runtime, device);
  return runtime.create_stream();
}

void require_collective(const OpSpec& spec) {
  if (spec.kind <= Kind::reduce_scatter) return;
  throw std::invalid_argument("a " + std::string(name_of(spec.kind)) +
                              " on memory of a device; it is for all_reduce, reduce, broadcast, all_gather and reduce_scatter");
}

// Bytes of what an operation leaves on this rank if it is the only one, or the root of a broadcast.
std::size_t bytes_of(const OpSpec& spec) { return spec.count * size_of(spec.element); }

std::size_t columns_of(const Transfer& transfer, std::size_t buffer_bytes) {
  const std::size_t column_bytes = transfer.buffer_rows * size_of(transfer.spec.element);
  const std::size_t part_bytes = (transfer.width + kNumChunks - 1) / kNumChunks * column_bytes;
  const std::size_t columns = std::min(std::max(part_bytes, kLeastChunkBytes), buffer_bytes) / column_bytes;
  if (columns == 0) {
    throw std::invalid_argument("a buffer of " + std::to_string(buffer_bytes) + " bytes, where an element of all ranks has " +
                                std::to_string(column_bytes) + "; use larger buffers");
  }
  return columns < kAlignment ? columns : columns / kAlignment * kAlignment;
}

Transfer transfer_of(OpSpec spec, int rank, int size, std::size_t buffer_bytes) {
  const auto rows = static_cast<std::size_t>(size);
  const bool is_root = spec.root == rank;
  Transfer transfer;
  if (spec.kind != Kind::broadcast || is_root) transfer.source.data = const_cast<std::byte*>(spec.input);
  if (spec.kind == Kind::broadcast ? !is_root : spec.kind != Kind::reduce || is_root) transfer.target.data = spec.output;
  if (spec.kind == Kind::all_gather) {
    transfer.source.first = static_cast<std::size_t>(rank);
    transfer.target.rows = transfer.buffer_rows = rows;
  }
  if (spec.kind == Kind::reduce_scatter) {
    transfer.source.rows = transfer.target.first = rows;
    transfer.buffer_rows = rows + 1;
  }
  transfer.width = spec.count;
  const double limit_s = spec.timeout_s > 0 ? std::min(spec.timeout_s, kLongestS) : kLongestS;
  transfer.deadline = std::chrono::steady_clock::now() + seconds(limit_s);
  transfer.spec = std::move(spec);
  transfer.columns = columns_of(transfer, buffer_bytes);
  return transfer;
}

}  // namespace

StreamLane::Stream::Stream(const CudaRuntime& with, int device) : runtime(with), handle(stream_of(with, device)) {}

StreamLane::StreamLane(const Options& options)
    : options_(options),
      runtime_(options.runtime),
      to_host_(runtime_, options.device),
      to_device_(runtime_, options.device),
      lane_(runtime_, {options.device, to_host_.handle, to_device_.handle, options.num_buffers, options.buffer_bytes}) {}

StreamLane::~StreamLane() { lane_.stop(); }

void StreamLane::run(const std::shared_ptr<ChunkEngine>& engine, std::vector<OpSpec> specs, int rank, int size,
                     CudaStream stream) {
  for (const OpSpec& spec : specs) require_collective(spec);
  const OnDevice here(runtime_, options_.device);
  std::vector<Transfer> transfers;
  for (OpSpec& spec : specs) {
    const bool is_copy = !engine || (spec.kind == Kind::broadcast && spec.root == rank);
    if (is_copy && spec.input != spec.output && spec.count) {
      runtime_.copy_on_device(spec.output, spec.input, bytes_of(spec), stream);
    }
    if (engine) transfers.push_back(transfer_of(std::move(spec), rank, size, options_.buffer_bytes));
  }
  if (!transfers.empty()) move(engine, std::move(transfers), stream);
}

void StreamLane::move(const std::shared_ptr<ChunkEngine>& engine, std::vector<Transfer> transfers, CudaStream stream) {
  const Event ready(runtime_);
  runtime_.record(ready.get(), stream);
  std::exception_ptr problem;
  const auto attempt = [&problem](const auto& step) {
    try {
      step();
    } catch (const std::exception&) {
      if (!problem) problem = std::current_exception();
    }
  };
  std::vector<std::uint64_t> numbers;
  attempt([&] {
    for (Transfer& transfer : transfers) {
      transfer.ready = ready.get();
      numbers.push_back(lane_.begin(engine, std::move(transfer)));
    }
  });
  for (const std::uint64_t number : numbers) attempt([&] { lane_.wait(number, kLongestS); });
  attempt([&] { join(stream); });
  if (problem) std::rethrow_exception(problem);
}

void StreamLane::join(CudaStream stream) {
  for (const CudaStream copies : {to_host_.handle, to_device_.handle}) {
    const Event copied(runtime_);
    runtime_.record(copied.get(), copies);
    runtime_.wait(stream, copied.get());
  }
}

}  // namespace shoal
