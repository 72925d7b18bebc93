#include "device/stream_lane.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "c_api/single_rank.h"
#include "check.h"
#include "engine/errors.h"
#include "engine_group.h"
#include "fake_device.h"

namespace stream_lane_test {

using shoal::Kind;

constexpr std::size_t kBufferBytes = std::size_t{64} << 10;

using Floats = std::vector<float>;

shoal::StreamLane::Options options(std::size_t buffer_bytes = kBufferBytes) { return {fake::kLibrary, 0, 3, buffer_bytes}; }

shoal::OpSpec spec_of(Kind kind, std::size_t count, const void* input, void* output, int root = 0) {
  shoal::OpSpec spec;
  spec.kind = kind;
  spec.element = shoal::Element::float32;
  if (kind == Kind::all_reduce) spec.combine = shoal::Combine::avg;
  spec.count = count;
  spec.root = root;
  spec.input = static_cast<const std::byte*>(input);
  spec.output = static_cast<std::byte*>(output);
  spec.timeout_s = shoal_test::kDeadlineS;
  spec.shape = {static_cast<std::int64_t>(count)};
  return spec;
}

Floats numbers(std::size_t count, int rank) {
  Floats made(count);
  for (std::size_t i = 0; i < count; ++i) made[i] = 0.1f * static_cast<float>(i % 1000) + 0.37f * static_cast<float>(rank);
  return made;
}

// What the engine gives for memory of the host.
Floats on_host(shoal::Engine& engine, shoal::OpSpec spec, int rank, const Floats& input, std::size_t outputs) {
  Floats output(outputs);
  spec.input = reinterpret_cast<const std::byte*>(input.data());
  spec.output = reinterpret_cast<std::byte*>(output.data());
  CHECK(engine.wait(engine.submit(spec), shoal_test::kDeadlineS));
  return spec.kind == Kind::broadcast && spec.root == rank ? input : output;
}

// The same from the kernel that makes the input to the kernel that reads the result, which frees both.
Floats on_device(shoal::StreamLane& lane, const std::shared_ptr<shoal::ChunkEngine>& engine, shoal::OpSpec spec, int rank,
                 const Floats& input, std::size_t outputs, bool in_place) {
  const fake::Stream compute;
  fake::Array from(input.size()), to(outputs);
  float* const read = in_place ? to.floats() : from.floats();
  compute.run([&] { std::copy(input.begin(), input.end(), read); });
  spec.input = reinterpret_cast<const std::byte*>(read);
  spec.output = to.bytes();
  lane.run(engine, {spec}, rank, 2, compute.get());
  Floats result;
  compute.run([&] { result.assign(to.floats(), to.floats() + outputs); });
  CHECK_EQ(compute.synchronize(), 0);
  return result;
}

// Both ranks of a group, and streams that are late in 20 ways.
TEST(stream_lane_gives_the_bits_of_memory_of_the_host) {
  shoal_test::Group group({"two hosts", {"a", "b"}});
  fake_cuda_strict(1);
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    fake_cuda_seed(seed);
    group.each([&](int rank, shoal::Engine& engine) {
      shoal::StreamLane lane(options());
      const std::shared_ptr<shoal::Engine> shared(std::shared_ptr<void>(), &engine);
      const auto chunks = std::make_shared<shoal::ChunkEngineOf<shoal::Engine>>(shared);
      for (const std::size_t count : {std::size_t{1}, 100 + seed, 3 * kBufferBytes / sizeof(float) + seed}) {
        for (const Kind kind : {Kind::all_reduce, Kind::all_gather, Kind::reduce_scatter, Kind::broadcast}) {
          const Floats input = numbers(count * (kind == Kind::reduce_scatter ? 2 : 1), rank);
          const std::size_t outputs = count * (kind == Kind::all_gather ? 2 : 1);
          const bool in_place = seed % 2 && (kind == Kind::all_reduce || kind == Kind::broadcast);
          const shoal::OpSpec spec = spec_of(kind, count, nullptr, nullptr, static_cast<int>(seed % 2));
          const Floats wanted = on_host(engine, spec, rank, input, outputs);
          const Floats got = on_device(lane, chunks, spec, rank, input, outputs, in_place);
          if (std::memcmp(wanted.data(), got.data(), outputs * sizeof(float)) != 0) {
            check::fail(__FILE__, __LINE__, "wrong bits with seed " + std::to_string(seed));
          }
        }
      }
    });
  }
  fake_cuda_seed(0);
  fake_cuda_strict(0);
  group.close();
}

TEST(stream_lane_copies_on_the_device_without_an_engine) {
  shoal::StreamLane lane(options());
  const fake::Stream compute;
  fake::Array from(1000), to(1000);
  const std::uint64_t copies = fake_cuda_count(fake_copies);
  compute.run([&] { std::iota(from.floats(), from.floats() + 1000, 3.0f); });
  lane.run(nullptr, {spec_of(Kind::all_gather, 1000, from.floats(), to.floats())}, 0, 1, compute.get());
  lane.run(nullptr, {spec_of(Kind::all_reduce, 1000, to.floats(), to.floats())}, 0, 1, compute.get());
  CHECK_EQ(compute.synchronize(), 0);
  CHECK(std::equal(from.floats(), from.floats() + 1000, to.floats()));
  CHECK_EQ(fake_cuda_count(fake_copies), copies + 1);
}

TEST(stream_lane_leaves_the_device_of_the_caller) {
  const shoal::CudaRuntime runtime(fake::kLibrary);
  runtime.set_device(1);
  shoal::StreamLane lane(options());
  const auto engine = std::make_shared<shoal::ChunkEngineOf<shoal::SingleRank>>(std::make_shared<shoal::SingleRank>());
  const fake::Stream compute;
  fake::Array array(10);
  CHECK_EQ(runtime.current_device(), 1);
  lane.run(engine, {spec_of(Kind::all_reduce, 10, array.floats(), array.floats())}, 0, 1, compute.get());
  CHECK_EQ(runtime.current_device(), 1);
  CHECK_EQ(compute.synchronize(), 0);  // before the array is freed
  fake_cuda_fail("cudaEventRecord", 0, 719);
  CHECK(contains(CHECK_THROWS(shoal::CudaError, lane.run(engine, {spec_of(Kind::all_reduce, 10, array.floats(), array.floats())}, 0, 1, compute.get())),
                 "cudaEventRecord: cudaErrorLaunchFailure (719)"));
  CHECK_EQ(runtime.current_device(), 1);
  runtime.set_device(0);
}

TEST(stream_lane_refuses_what_it_does_not_move) {
  shoal::StreamLane lane(options(16));
  const auto engine = std::make_shared<shoal::ChunkEngineOf<shoal::SingleRank>>(std::make_shared<shoal::SingleRank>());
  const fake::Stream compute;
  const auto run = [&](shoal::OpSpec spec, int size) { lane.run(engine, {std::move(spec)}, 0, size, compute.get()); };
  CHECK(contains(CHECK_THROWS(std::invalid_argument, run(spec_of(Kind::barrier, 0, nullptr, nullptr), 1)), "a barrier on memory of a device"));
  CHECK(contains(CHECK_THROWS(std::invalid_argument, run(spec_of(Kind::reduce_scatter, 1, nullptr, nullptr), 4)),
                 "a buffer of 16 bytes, where an element of all ranks has 20; use larger buffers"));
}

// Ends nothing, and fails what comes after the first chunk, while `in_wait` has the receiver.
class FailingEngine final : public shoal::ChunkEngine {
 public:
  std::uint64_t submit(shoal::OpSpec) override {
    if (num_++ == 0) return 0;
    while (!in_wait) std::this_thread::yield();
    throw shoal::GroupError("rank 1 was lost");
  }
  void on_end(std::uint64_t, std::function<void()> then) override { then(); }
  bool wait(std::uint64_t, double) override {
    in_wait = true;
    while (!go_on) std::this_thread::yield();
    return true;
  }

  std::atomic<bool> in_wait{false}, go_on{false};

 private:
  int num_ = 0;
};

// Memory of a transfer that has failed may be given to others.
TEST(lane_that_fails_has_ended_once_its_receiver_is_done) {
  const fake::Stream to_host, to_device;
  const fake::Event ready;
  fake::Array array(64);
  shoal::Lane lane(shoal::CudaRuntime(fake::kLibrary), {0, to_host.get(), to_device.get(), 2, 128});
  const auto engine = std::make_shared<FailingEngine>();
  shoal::Transfer transfer;
  transfer.spec = spec_of(Kind::all_reduce, 64, nullptr, nullptr);
  transfer.source.data = transfer.target.data = array.bytes();
  transfer.width = 64;
  transfer.columns = 32;
  transfer.ready = ready.get();
  transfer.deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  const std::uint64_t number = lane.begin(engine, transfer);
  while (!engine->in_wait) std::this_thread::yield();
  for (int k = 0; k < 10; ++k) CHECK(!lane.wait(number, 0.002));
  engine->go_on = true;
  CHECK_EQ(CHECK_THROWS(shoal::GroupError, lane.wait(number, shoal_test::kDeadlineS)), "rank 1 was lost");
  lane.stop();
}

}  // namespace stream_lane_test
