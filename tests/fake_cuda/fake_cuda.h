// The runtime of fake_cudart.cc: what tests do with it, and CUDA's own functions.
#pragma once

#include <cstddef>
#include <cstdint>

#pragma GCC visibility push(default)
extern "C" {

enum { fake_records, fake_queries, fake_synchronizes, fake_stream_waits, fake_copies, fake_num_counts };

// Delays each stream that is made from now on at random, by this seed; 0: no delays.
void fake_cuda_seed(std::uint64_t seed);
// Lets call number `nth` from now (0: the next) of a function, as "cudaMemcpyAsync", return `code`.
void fake_cuda_fail(const char* function, int nth, int code);
// Fails the work of a stream, as a kernel that reads a wrong address does: from then on every call fails with `code`.
// Called by such work, without a stream: at once.
void fake_cuda_break(void* stream, int code);
// Forgets failures that were set or have happened.
void fake_cuda_reset(void);
// Behaves, while `on`, as when a thread captures a graph in CUDA's mode "global".
void fake_cuda_capture(int on);
// Copies of memory of the device work only inside of what cudaMalloc has given.
void fake_cuda_strict(int on);
// Asks before each copy whether the memory of the device at an address is still there; null: does not ask.
void fake_cuda_ask(int (*is_alive)(const void* address));
// Calls since the library was loaded.
std::uint64_t fake_cuda_count(int what);

int cudaMalloc(void** memory, std::size_t bytes);
// Gives the memory away without waiting for the device, as torch's allocator does: it is poisoned, and a copy that is still
// to use it fails.
int cudaFree(void* memory);
int cudaHostAlloc(void** memory, std::size_t bytes, unsigned flags);
int cudaFreeHost(void* memory);
int cudaStreamCreateWithPriority(void** stream, unsigned flags, int priority);
int cudaStreamDestroy(void* stream);
int cudaStreamSynchronize(void* stream);
int cudaStreamWaitEvent(void* stream, void* event, unsigned flags);
int cudaLaunchHostFunc(void* stream, void (*function)(void*), void* argument);
int cudaEventCreateWithFlags(void** event, unsigned flags);
int cudaEventDestroy(void* event);
int cudaEventRecord(void* event, void* stream);
int cudaEventQuery(void* event);
int cudaEventSynchronize(void* event);
int cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int direction, void* stream);
int cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t row_bytes,
                      std::size_t rows, int direction, void* stream);
int cudaSetDevice(int device);
int cudaGetDevice(int* device);
int cudaThreadExchangeStreamCaptureMode(int* mode);
const char* cudaGetErrorName(int code);
const char* cudaGetErrorString(int code);

}  // extern "C"
#pragma GCC visibility pop
