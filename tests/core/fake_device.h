// Memory and streams of the fake runtime (tests/fake_cuda), for tests of what uses a GPU.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "device/cuda_runtime.h"
#include "fake_cuda.h"

namespace fake {

inline constexpr const char* kLibrary = "libfake_cudart.so";

class Stream {
 public:
  Stream() { cudaStreamCreateWithPriority(&stream_, 0, 0); }
  ~Stream() {
    cudaStreamSynchronize(stream_);
    cudaStreamDestroy(stream_);
  }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void* get() const { return stream_; }
  // Runs a kernel, on the stream's thread.
  void run(std::function<void()> kernel) const {
    cudaLaunchHostFunc(
        stream_,
        [](void* given) {
          const std::unique_ptr<std::function<void()>> owned(static_cast<std::function<void()>*>(given));
          (*owned)();
        },
        new std::function<void()>(std::move(kernel)));
  }
  int synchronize() const { return cudaStreamSynchronize(stream_); }

 private:
  void* stream_ = nullptr;
};

class Event {
 public:
  Event() { cudaEventCreateWithFlags(&event_, 0); }
  explicit Event(const Stream& stream) : Event() { cudaEventRecord(event_, stream.get()); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void* get() const { return event_; }

 private:
  void* event_ = nullptr;
};

// Floats on the device.
class Array {
 public:
  explicit Array(std::size_t count) : count_(count) { cudaMalloc(&memory_, count * sizeof(float)); }
  ~Array() { free(); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  void free() {
    if (memory_) cudaFree(std::exchange(memory_, nullptr));
  }
  float* floats() const { return static_cast<float*>(memory_); }
  std::byte* bytes() const { return static_cast<std::byte*>(memory_); }
  std::size_t count() const { return count_; }

 private:
  const std::size_t count_;
  void* memory_ = nullptr;
};

}  // namespace fake
