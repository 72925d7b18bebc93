// CUDA's runtime library (libcudart), as this process has already loaded it: neither its headers are needed to build, nor
// is it needed to run without a GPU.
//
// No library is ever loaded from here. The caller names one that the process has loaded, as torch loads the one that it
// was built for, and dlopen() with RTLD_NOLOAD only finds it: no search path and no environment variable can bring in
// other code.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace shoal {

using CudaStream = void*;
using CudaEvent = void*;

// A call of the runtime has failed. The message names the call and the code.
struct CudaError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class CudaRuntime {
 public:
  // Finds the functions in a library that is loaded: its file name, as "libcudart.so.13", or its path. Throws CudaError
  // if it is not loaded, or lacks a function.
  explicit CudaRuntime(const std::string& library);

  // For a thread that uses the device: sets its current device, and lets it wait and allocate while another thread
  // captures a graph. In CUDA's default capture mode these calls would fail in every thread and end the capture.
  void enter_thread(int device) const;

  // The calling thread's device.
  int current_device() const;
  void set_device(int device) const;

  // A stream of the calling thread's device. Work that is ready runs before kernels of other streams that wait.
  CudaStream create_stream() const;
  void destroy_stream(CudaStream stream) const noexcept;

  void* allocate_pinned(std::size_t bytes) const;
  void free_pinned(void* memory) const noexcept;

  // An event without times, on which a waiting thread sleeps.
  CudaEvent create_event() const;
  void destroy_event(CudaEvent event) const noexcept;
  void record(CudaEvent event, CudaStream stream) const;
  bool has_passed(CudaEvent event) const;
  void synchronize(CudaEvent event) const;
  void wait(CudaStream stream, CudaEvent event) const;

  // Queues the copy of `rows` rows of `row_bytes`, which begin every `*_pitch` bytes.
  struct Rows {
    std::size_t rows, row_bytes, to_pitch, from_pitch;
  };
  void copy_to_host(void* to, const void* from, const Rows& rows, CudaStream stream) const;
  void copy_to_device(void* to, const void* from, const Rows& rows, CudaStream stream) const;
  void copy_on_device(void* to, const void* from, std::size_t bytes, CudaStream stream) const;

 private:
  void check(int code, const char* call) const;
  void copy(void* to, const void* from, const Rows& rows, int direction, CudaStream stream) const;

  int (*get_device_)(int*);
  int (*set_device_)(int);
  int (*exchange_capture_mode_)(int*);
  int (*host_alloc_)(void**, std::size_t, unsigned);
  int (*free_host_)(void*);
  int (*stream_create_)(CudaStream*, unsigned, int);
  int (*stream_destroy_)(CudaStream);
  int (*event_create_)(CudaEvent*, unsigned);
  int (*event_destroy_)(CudaEvent);
  int (*event_record_)(CudaEvent, CudaStream);
  int (*event_query_)(CudaEvent);
  int (*event_synchronize_)(CudaEvent);
  int (*stream_wait_event_)(CudaStream, CudaEvent, unsigned);
  int (*memcpy_)(void*, const void*, std::size_t, int, CudaStream);
  int (*memcpy_2d_)(void*, std::size_t, const void*, std::size_t, std::size_t, std::size_t, int, CudaStream);
  const char* (*error_name_)(int);
  const char* (*error_string_)(int);
};

}  // namespace shoal
