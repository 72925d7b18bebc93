#include "device/cuda_runtime.h"

#include <dlfcn.h>

#include <algorithm>
#include <type_traits>

namespace shoal {

namespace {

// Of driver_types.h, the same in all versions.
constexpr int kSuccess = 0, kNotReady = 600;
constexpr int kToHost = 2, kToDevice = 1, kOnDevice = 3;
constexpr int kRelaxedCapture = 2;
constexpr std::size_t kMaxPitch = (std::size_t{1} << 31) - 1;  // of a copy in two dimensions
constexpr unsigned kBlockingSync = 1, kDisableTiming = 2, kPortable = 1, kNonBlocking = 1;
constexpr int kHighPriority = -1;

}  // namespace

CudaRuntime::CudaRuntime(const std::string& library) {
  void* const handle = library.empty() ? nullptr : dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  if (!handle) throw CudaError("CUDA's runtime '" + library + "' is not loaded in this process: import a torch or JAX that was built with CUDA");
  const auto find = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(handle, name));
    if (!function) throw CudaError("CUDA's runtime '" + library + "' has no " + name);
  };
  find(set_device_, "cudaSetDevice");
  find(get_device_, "cudaGetDevice");
  find(exchange_capture_mode_, "cudaThreadExchangeStreamCaptureMode");
  find(host_alloc_, "cudaHostAlloc");
  find(free_host_, "cudaFreeHost");
  find(stream_create_, "cudaStreamCreateWithPriority");
  find(stream_destroy_, "cudaStreamDestroy");
  find(event_create_, "cudaEventCreateWithFlags");
  find(event_destroy_, "cudaEventDestroy");
  find(event_record_, "cudaEventRecord");
  find(event_query_, "cudaEventQuery");
  find(event_synchronize_, "cudaEventSynchronize");
  find(stream_wait_event_, "cudaStreamWaitEvent");
  find(memcpy_, "cudaMemcpyAsync");
  find(memcpy_2d_, "cudaMemcpy2DAsync");
  find(error_name_, "cudaGetErrorName");
  find(error_string_, "cudaGetErrorString");
}

void CudaRuntime::check(int code, const char* call) const {
  if (code == kSuccess) return;
  throw CudaError(std::string(call) + ": " + error_name_(code) + " (" + std::to_string(code) + "): " + error_string_(code));
}

void CudaRuntime::enter_thread(int device) const {
  set_device(device);
  int mode = kRelaxedCapture;
  check(exchange_capture_mode_(&mode), "cudaThreadExchangeStreamCaptureMode");
}

int CudaRuntime::current_device() const {
  int device = 0;
  check(get_device_(&device), "cudaGetDevice");
  return device;
}

void CudaRuntime::set_device(int device) const { check(set_device_(device), "cudaSetDevice"); }

CudaStream CudaRuntime::create_stream() const {
  CudaStream stream = nullptr;
  check(stream_create_(&stream, kNonBlocking, kHighPriority), "cudaStreamCreateWithPriority");
  return stream;
}

void CudaRuntime::destroy_stream(CudaStream stream) const noexcept { stream_destroy_(stream); }

void* CudaRuntime::allocate_pinned(std::size_t bytes) const {
  void* memory = nullptr;
  check(host_alloc_(&memory, bytes, kPortable), "cudaHostAlloc");
  return memory;
}

void CudaRuntime::free_pinned(void* memory) const noexcept { free_host_(memory); }

CudaEvent CudaRuntime::create_event() const {
  CudaEvent event = nullptr;
  check(event_create_(&event, kBlockingSync | kDisableTiming), "cudaEventCreateWithFlags");
  return event;
}

void CudaRuntime::destroy_event(CudaEvent event) const noexcept { event_destroy_(event); }

void CudaRuntime::record(CudaEvent event, CudaStream stream) const { check(event_record_(event, stream), "cudaEventRecord"); }

bool CudaRuntime::has_passed(CudaEvent event) const {
  const int code = event_query_(event);
  if (code == kNotReady) return false;
  check(code, "cudaEventQuery");
  return true;
}

void CudaRuntime::synchronize(CudaEvent event) const { check(event_synchronize_(event), "cudaEventSynchronize"); }

void CudaRuntime::wait(CudaStream stream, CudaEvent event) const {
  check(stream_wait_event_(stream, event, 0), "cudaStreamWaitEvent");
}

void CudaRuntime::copy_to_host(void* to, const void* from, const Rows& rows, CudaStream stream) const {
  copy(to, from, rows, kToHost, stream);
}

void CudaRuntime::copy_to_device(void* to, const void* from, const Rows& rows, CudaStream stream) const {
  copy(to, from, rows, kToDevice, stream);
}

void CudaRuntime::copy_on_device(void* to, const void* from, std::size_t bytes, CudaStream stream) const {
  copy(to, from, {1, bytes, bytes, bytes}, kOnDevice, stream);
}

void CudaRuntime::copy(void* to, const void* from, const Rows& rows, int direction, CudaStream stream) const {
  if (rows.rows == 1 || std::max(rows.to_pitch, rows.from_pitch) > kMaxPitch) {
    for (std::size_t row = 0; row < rows.rows; ++row) {
      check(memcpy_(static_cast<std::byte*>(to) + row * rows.to_pitch, static_cast<const std::byte*>(from) + row * rows.from_pitch,
                    rows.row_bytes, direction, stream),
            "cudaMemcpyAsync");
    }
    return;
  }
  check(memcpy_2d_(to, rows.to_pitch, from, rows.from_pitch, rows.row_bytes, rows.rows, direction, stream), "cudaMemcpy2DAsync");
}

}  // namespace shoal
