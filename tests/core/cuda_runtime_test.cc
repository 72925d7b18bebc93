#include "device/cuda_runtime.h"

#include <cstdlib>
#include <string>

#include "check.h"
#include "fake_device.h"

namespace cuda_runtime_test {

TEST(cuda_runtime_only_finds_a_library_that_is_loaded) {
  for (const std::string name : {"", "libcudart.so.13", "/usr/lib/no/such/libcudart.so", "libfake"}) {
    CHECK_EQ(CHECK_THROWS(shoal::CudaError, shoal::CudaRuntime(name)),
             "CUDA's runtime '" + name + "' is not loaded in this process: import a torch or JAX that was built with CUDA");
  }
  // A library that is there, could be loaded and is not: it stays so.
  CHECK(contains(CHECK_THROWS(shoal::CudaError, shoal::CudaRuntime("libresolv.so.2")), "is not loaded"));
  CHECK_EQ(CHECK_THROWS(shoal::CudaError, shoal::CudaRuntime("libc.so.6")), "CUDA's runtime 'libc.so.6' has no cudaSetDevice");
  shoal::CudaRuntime{fake::kLibrary}.enter_thread(0);
}

TEST(cuda_runtime_names_the_call_and_the_code) {
  const shoal::CudaRuntime runtime(fake::kLibrary);
  fake_cuda_fail("cudaHostAlloc", 1, 2);
  void* const memory = runtime.allocate_pinned(8);
  CHECK_EQ(CHECK_THROWS(shoal::CudaError, runtime.allocate_pinned(8)),
           "cudaHostAlloc: cudaErrorMemoryAllocation (2): out of memory");
  runtime.free_pinned(memory);
  CHECK(contains(CHECK_THROWS(shoal::CudaError, runtime.enter_thread(3)), "cudaSetDevice: cudaErrorInvalidValue (1)"));
}

// The tests of the lane rest on the fake runtime: it must see what a GPU would punish.
TEST(cuda_runtime_that_is_fake_sees_errors_of_order_and_of_memory) {
  const shoal::CudaRuntime runtime(fake::kLibrary);
  fake_cuda_strict(1);
  auto* const host = static_cast<float*>(runtime.allocate_pinned(2 * sizeof(float)));
  const fake::Stream first, second;
  fake::Array array(2);
  const auto copy = [&](void* to, const fake::Stream& stream) {
    runtime.copy_to_host(to, array.floats(), {1, 2 * sizeof(float), 0, 0}, stream.get());
  };
  // A stream goes on beside another one, unless it waits for an event; one that was recorded later does not count.
  bool go_on = false, seen = true;
  {
    const fake::Event begin(first);
    first.run([&] {
      array.floats()[0] = 3;
      array.floats()[1] = 4;
    });
    const fake::Event end(first);
    runtime.wait(second.get(), end.get());
    copy(host, second);
    CHECK_EQ(second.synchronize(), 0);
    CHECK(host[0] == 3 && host[1] == 4);
    runtime.wait(second.get(), begin.get());
    CHECK(runtime.has_passed(end.get()));
  }
  second.run([&] { seen = go_on; });
  CHECK_EQ(second.synchronize(), 0);
  CHECK(!seen);
  // memory of the host that is not pinned; memory of the device that was given away
  const auto fails = [&](void* to) {
    copy(to, second);
    const int code = second.synchronize();
    fake_cuda_reset();
    return code == 700;
  };
  float pageable[2] = {};
  CHECK(fails(pageable));
  CHECK(!fails(host));
  const float* const poisoned = array.floats();
  array.free();
  CHECK(poisoned[0] != 3);
  copy(host, second);  // of null
  CHECK_EQ(second.synchronize(), 700);
  CHECK(contains(CHECK_THROWS(shoal::CudaError, copy(host, second)), "cudaMemcpyAsync: cudaErrorIllegalAddress (700)"));
  fake_cuda_reset();
  fake_cuda_strict(0);
  runtime.free_pinned(host);
}

}  // namespace cuda_runtime_test
