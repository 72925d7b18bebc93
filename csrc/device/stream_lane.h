// Collectives as work of a stream of the device, for callers that know only its handle, as XLA's custom calls do.
//
// The caller's thread waits until the results are on their way to the device, so that it can say why a collective failed.
// The device goes on meanwhile with what the stream had before.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "device/cuda_runtime.h"
#include "device/lane.h"
#include "engine/types.h"

namespace shoal {

class StreamLane {
 public:
  struct Options {
    std::string runtime;  // as of CudaRuntime
    int device = 0;
    std::size_t num_buffers = 8, buffer_bytes = std::size_t{4} << 20;  // the size is the same on all ranks
  };

  // Throws CudaError.
  explicit StreamLane(const Options& options);
  ~StreamLane();

  // Runs collectives of a group on memory of the device, after what the stream has been given and before what it gets
  // later, and returns once they have ended. Without an engine each of them is a copy, as in a group of one rank.
  //
  // Throws std::invalid_argument, before any of them begins, for other operations; else the first error of the engine or
  // of the device. The stream then waits for copies that had begun, and results are undefined.
  void run(const std::shared_ptr<ChunkEngine>& engine, std::vector<OpSpec> specs, int rank, int size, CudaStream stream);

  // Returns the engine that was made for this object before, or makes it, as Lane does.
  std::shared_ptr<ChunkEngine> engine_of(const void* object, const std::function<std::shared_ptr<ChunkEngine>()>& make) {
    return lane_.engine_of(object, make);
  }

 private:
  struct Stream {
    Stream(const CudaRuntime& runtime, int device);
    ~Stream() { runtime.destroy_stream(handle); }
    Stream(const Stream&) = delete;
    Stream& operator=(const Stream&) = delete;

    const CudaRuntime& runtime;
    const CudaStream handle;
  };

  void move(const std::shared_ptr<ChunkEngine>& engine, std::vector<Transfer> transfers, CudaStream stream);
  // Makes the stream wait for all copies that are queued.
  void join(CudaStream stream);

  const Options options_;
  const CudaRuntime runtime_;
  const Stream to_host_, to_device_;
  Lane lane_;
};

}  // namespace shoal
