// Lets XLA's CPU client call a handler for CUDA devices: it gets a stream of the fake runtime (tests/fake_cuda), device 0, and
// memory of the host, which that runtime takes for the device's. What the program does next is the stream's next work; memory
// that the handler has freed is poisoned then.
#include <xla/ffi/api/c_api.h>

#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

extern "C" {

using Handler = XLA_FFI_Error*(XLA_FFI_CallFrame*);

static Handler* handler = nullptr;
static void* stream = nullptr;
static int (*synchronize)(void*) = nullptr;
static thread_local std::vector<std::pair<void*, std::size_t>> freed;

__attribute__((visibility("default"))) void use_fake_device(Handler* with, void* on, int (*wait)(void*)) {
  handler = with;
  stream = on;
  synchronize = wait;
}

__attribute__((visibility("default"))) XLA_FFI_Error* on_fake_device(XLA_FFI_CallFrame* frame) {
  if (frame->extension_start) return handler(frame);  // a question about the handler
  XLA_FFI_Api api = *frame->api;
  api.XLA_FFI_Stream_Get = [](XLA_FFI_Stream_Get_Args* args) -> XLA_FFI_Error* {
    args->stream = stream;
    return nullptr;
  };
  api.XLA_FFI_DeviceOrdinal_Get = [](XLA_FFI_DeviceOrdinal_Get_Args* args) -> XLA_FFI_Error* {
    args->device_ordinal = 0;
    return nullptr;
  };
  api.XLA_FFI_DeviceMemory_Allocate = [](XLA_FFI_DeviceMemory_Allocate_Args* args) -> XLA_FFI_Error* {
    args->data = std::malloc(args->size);
    return nullptr;
  };
  api.XLA_FFI_DeviceMemory_Free = [](XLA_FFI_DeviceMemory_Free_Args* args) -> XLA_FFI_Error* {
    freed.emplace_back(args->data, args->size);
    return nullptr;
  };
  XLA_FFI_CallFrame there = *frame;
  there.api = &api;
  XLA_FFI_Error* const error = handler(&there);
  synchronize(stream);
  for (const auto& [memory, bytes] : freed) {
    std::memset(memory, 0xDB, bytes);
    std::free(memory);
  }
  freed.clear();
  return error;
}
}
