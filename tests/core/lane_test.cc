#include "device/lane.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "c_api/single_rank.h"
#include "check.h"
#include "engine/errors.h"
#include "engine_group.h"
#include "fake_device.h"

namespace lane_test {

using shoal::Kind;

constexpr std::size_t kColumns = 16;  // of a chunk
constexpr std::size_t kRanks = 3;     // that the made engine stands for
constexpr std::size_t kBufferBytes = (kRanks + 1) * kColumns * sizeof(float);
#ifdef __SANITIZE_THREAD__
constexpr std::uint64_t kSeeds = 100;  // each takes long there; the other builds take all
#else
constexpr std::uint64_t kSeeds = 1000;
#endif

// Ends operations in any order, late, on its own thread. It adds up kRanks ranks that give the same. A message comes back to the
// receives of its tag, in order, and what goes to a rank in an all_to_all comes back as if from it.
class LateEngine final : public shoal::ChunkEngine {
 public:
  explicit LateEngine(std::uint64_t seed) : random_(seed), thread_([this] { run(); }) {}
  ~LateEngine() override {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

  std::uint64_t submit(shoal::OpSpec spec) override {
    const std::lock_guard lock(mutex_);
    if (!error_.empty()) throw shoal::GroupError(error_);
    open_[num_].spec = std::move(spec);
    changed_.notify_all();
    return num_++;
  }
  void on_end(std::uint64_t seq, std::function<void()> then) override {
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = open_.find(seq); found != open_.end()) {
        found->second.then = std::move(then);
        return;
      }
    }
    then();
  }
  bool wait(std::uint64_t, double) override {
    const std::lock_guard lock(mutex_);
    if (!error_.empty()) throw shoal::GroupError(error_);
    return true;
  }
  void fail(const std::string& error) {
    const std::lock_guard lock(mutex_);
    error_ = error;
  }
  // Ends nothing while it is held.
  void hold(bool held) {
    const std::lock_guard lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }

 private:
  struct Open {
    shoal::OpSpec spec;
    std::function<void()> then;
  };

  static std::vector<std::byte> copy_of(const std::byte* data, std::uint64_t count) {
    return std::vector<std::byte>(data, data + count * sizeof(float));
  }
  void move(const shoal::OpSpec& spec) {
    if (spec.kind == Kind::send) sent_[spec.tag].push_back(copy_of(spec.input, spec.count));
    if (spec.kind == Kind::recv) {
      std::memcpy(spec.output, sent_[spec.tag].front().data(), spec.count * sizeof(float));
      sent_[spec.tag].pop_front();
    }
    for (std::size_t rank = 0; spec.kind == Kind::all_to_all && rank < kRanks; ++rank) {
      std::memcpy(spec.outputs[rank].data, spec.inputs[rank].data, spec.inputs[rank].count * sizeof(float));
    }
  }
  static void reduce(const shoal::OpSpec& spec) {
    const auto* in = reinterpret_cast<const float*>(spec.input);
    auto* out = reinterpret_cast<float*>(spec.output);
    for (std::size_t i = 0; i < spec.count; ++i) {
      if (spec.kind == Kind::all_reduce) out[i] = kRanks * in[i];
      if (spec.kind == Kind::broadcast) out[i] = 7;
      if (spec.kind == Kind::reduce_scatter) {
        out[i] = 0;
        for (std::size_t row = 0; row < kRanks; ++row) out[i] += in[row * spec.count + i];
      }
    }
    // this rank is the second, and its row is in place
    for (std::size_t row = 0; spec.kind == Kind::all_gather && row < kRanks; ++row) {
      if (row != 1) std::memcpy(out + row * spec.count, in, spec.count * sizeof(float));
    }
  }
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return stopping_ || (!open_.empty() && !held_); });
      if (open_.empty()) return;
      if (random_() % 3 == 0) {  // more may come
        lock.unlock();
        std::this_thread::sleep_for(std::chrono::microseconds(random_() % 100));
        lock.lock();
      }
      auto chosen = std::next(open_.begin(), static_cast<long>(random_() % open_.size()));
      const shoal::OpSpec spec = chosen->second.spec;
      const std::uint64_t seq = chosen->first;
      // Messages of a tag keep their order, as those of an engine.
      const auto is_alike = [&](const auto& each) { return each.second.spec.kind == spec.kind && each.second.spec.tag == spec.tag; };
      const bool is_first = !shoal::is_message(spec.kind) || std::find_if(open_.begin(), chosen, is_alike) == chosen;
      if (!is_first || (spec.kind == Kind::recv && sent_[spec.tag].empty())) {
        changed_.wait_for(lock, std::chrono::microseconds(100));
        continue;
      }
      lock.unlock();
      shoal::by_messages(spec.kind) ? move(spec) : reduce(spec);
      lock.lock();
      const std::function<void()> then = std::move(open_.at(seq).then);
      open_.erase(seq);
      lock.unlock();
      if (then) then();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  std::map<std::uint64_t, Open> open_;
  std::uint64_t num_ = 0;
  std::string error_;
  bool stopping_ = false, held_ = false;
  std::map<int, std::deque<std::vector<std::byte>>> sent_;  // by tag; of the thread
  std::thread thread_;
};

// The streams of a device, and a lane.
struct Device {
  explicit Device(std::size_t num_buffers = 3, std::size_t buffer_bytes = kBufferBytes)
      : lane(shoal::CudaRuntime(fake::kLibrary), {0, to_host.get(), to_device.get(), num_buffers, buffer_bytes}) {}
  ~Device() { lane.stop(); }

  fake::Stream compute, to_host, to_device;
  shoal::Lane lane;
};

shoal::Transfer transfer_of(Kind kind, std::size_t width, const fake::Array* source, const fake::Array* target,
                            const fake::Event& ready, std::size_t ranks = kRanks, std::size_t rank = 1) {
  shoal::Transfer transfer;
  transfer.spec.kind = kind;
  transfer.spec.element = shoal::Element::float32;
  if (source) transfer.source.data = source->bytes();
  if (target) transfer.target.data = target->bytes();
  if (kind == Kind::all_gather) {
    transfer.source.first = rank;
    transfer.target.rows = transfer.buffer_rows = ranks;
  }
  if (kind == Kind::reduce_scatter) {
    transfer.source.rows = transfer.target.first = ranks;
    transfer.buffer_rows = ranks + 1;
  }
  transfer.width = width;
  transfer.columns = kColumns;
  transfer.ready = ready.get();
  transfer.deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  return transfer;
}

bool ends(Device& device, std::uint64_t number) { return device.lane.wait(number, shoal_test::kDeadlineS); }

// One collective of a device from the kernel that makes the input to the kernel that uses the result.
class Step {
 public:
  Step(Device& device, const std::shared_ptr<shoal::ChunkEngine>& engine, Kind kind, std::size_t width, float value)
      : device_(device), kind_(kind), width_(width), value_(value),
        source_(width * (kind == Kind::reduce_scatter ? kRanks : 1)), target_(width * (kind == Kind::all_gather ? kRanks : 1)) {
    // A broadcast must overwrite what the kernel has written.
    const bool in_place = kind == Kind::all_reduce || kind == Kind::broadcast;
    float* const from = in_place ? target_.floats() : source_.floats();
    device.compute.run([from, count = source_.count(), value] {
      for (std::size_t i = 0; i < count; ++i) from[i] = value + static_cast<float>(i);
    });
    cudaEventRecord(ready_.get(), device.compute.get());
    number_ = device.lane.begin(engine, transfer_of(kind, width, kind == Kind::broadcast ? nullptr : in_place ? &target_ : &source_,
                                                    &target_, ready_));
  }

  // The result is used by a kernel. The input may go as soon as the transfer has ended.
  void use() {
    CHECK(ends(device_, number_));
    source_.free();
    const fake::Event end(device_.to_device);
    cudaStreamWaitEvent(device_.compute.get(), end.get(), 0);
    device_.compute.run([this] { used_.assign(target_.floats(), target_.floats() + target_.count()); });
  }

  bool is_right() const {
    for (std::size_t i = 0; i < target_.count(); ++i) {
      float wanted = value_ + static_cast<float>(i % width_);
      if (kind_ == Kind::all_reduce) wanted *= kRanks;
      if (kind_ == Kind::broadcast) wanted = 7;
      if (kind_ == Kind::reduce_scatter) wanted = kRanks * wanted + static_cast<float>(width_ * (kRanks * (kRanks - 1) / 2));
      if (used_.size() != target_.count() || used_[i] != wanted) return false;
    }
    return true;
  }

 private:
  Device& device_;
  const Kind kind_;
  const std::size_t width_;
  const float value_;
  fake::Array source_, target_;
  fake::Event ready_;
  std::uint64_t number_ = 0;
  std::vector<float> used_;
};

constexpr Kind kKinds[] = {Kind::all_reduce, Kind::all_gather, Kind::reduce_scatter, Kind::broadcast};

TEST(lane_keeps_the_order_whatever_is_late) {
  fake_cuda_strict(1);
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    fake_cuda_seed(seed);
    Device device(2 + seed % 3);
    const auto engine = std::make_shared<LateEngine>(seed);
    std::vector<std::unique_ptr<Step>> steps;
    for (std::size_t k = 0; k < 3; ++k) {
      const std::size_t width = 1 + (seed * 13 + k * 29) % (5 * kColumns);
      steps.push_back(std::make_unique<Step>(device, engine, kKinds[(seed + k) % 4], width, static_cast<float>(10 * k + seed % 7)));
    }
    for (const auto& step : steps) step->use();
    REQUIRE(device.compute.synchronize() == 0);
    for (const auto& step : steps) {
      if (!step->is_right()) check::fail(__FILE__, __LINE__, "wrong numbers with seed " + std::to_string(seed));
    }
  }
  fake_cuda_seed(0);
  fake_cuda_strict(0);
}

shoal::Transfer messages(Kind kind, int tag, const fake::Array* from, const fake::Array* to, const fake::Event& ready) {
  shoal::Transfer transfer;
  transfer.spec.kind = kind;
  transfer.spec.element = shoal::Element::float32;
  transfer.spec.tag = tag;
  transfer.spec.count = (from ? from : to)->count();
  if (from) transfer.spec.input = from->bytes();
  if (to) transfer.spec.output = to->bytes();
  transfer.ready = ready.get();
  transfer.deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  return transfer;
}

// Gives rank r the r-th part of an array, and takes a part of the same size from it, which lies before those of lower ranks.
shoal::Transfer exchange(const std::vector<std::size_t>& counts, const fake::Array& from, const fake::Array& to, const fake::Event& ready) {
  shoal::Transfer transfer = messages(Kind::all_to_all, 0, &from, &to, ready);
  std::size_t given = 0, left = to.count();
  for (const std::size_t count : counts) {
    left -= count;
    transfer.spec.inputs.push_back({from.bytes() + given * sizeof(float), count});
    transfer.spec.outputs.push_back({to.bytes() + left * sizeof(float), count});
    given += count;
  }
  transfer.spec.input = nullptr;
  transfer.spec.output = nullptr;
  return transfer;
}

// Messages from kernels that make them to kernels that use them, while receives wait and an all_reduce is under way.
bool messages_arrive(std::uint64_t seed) {
  constexpr std::size_t kMessages = 6;
  std::mt19937_64 random(seed);
  Device device(2), beside(2);
  const auto engine = std::make_shared<LateEngine>(seed);
  std::vector<std::unique_ptr<fake::Array>> from, to;
  std::vector<std::unique_ptr<fake::Event>> ready;
  std::vector<std::vector<float>> used(kMessages + 1);
  std::map<std::uint64_t, std::size_t> numbers;
  const auto fill = [&](const fake::Array& array, float first) {
    device.compute.run([&array, first] { std::iota(array.floats(), array.floats() + array.count(), first); });
    ready.push_back(std::make_unique<fake::Event>(device.compute));
  };
  for (std::size_t k = 0; k < kMessages; ++k) {
    const std::size_t count = 1 + (k < 2 ? random() % 40'000 : random() % 100);  // some are larger than buffers
    from.push_back(std::make_unique<fake::Array>(count));
    to.push_back(std::make_unique<fake::Array>(count));
  }
  const std::vector<std::size_t> counts = {random() % 50, 0, 1 + random() % 50};
  from.push_back(std::make_unique<fake::Array>(counts[0] + counts[2]));
  to.push_back(std::make_unique<fake::Array>(counts[0] + counts[2]));
  const auto begin = [&](Kind kind, std::size_t k) {
    const bool sends = kind == Kind::send;
    fill(sends ? *from[k] : *to[k], sends ? static_cast<float>(100 * k) : -1.0f);
    const int tag = static_cast<int>(k % 3);
    const std::uint64_t number = device.lane.begin(
        engine, messages(kind, tag, sends ? from[k].get() : nullptr, sends ? nullptr : to[k].get(), *ready.back()));
    numbers[number] = sends ? kMessages + 1 : k;
  };
  for (std::size_t k = 0; k < kMessages; ++k) {  // each tag's in one order
    const bool receives_first = random() % 2 == 0;
    begin(receives_first ? Kind::recv : Kind::send, k);
    begin(receives_first ? Kind::send : Kind::recv, k);
  }
  fill(*from[kMessages], 7);
  numbers[device.lane.begin(engine, exchange(counts, *from[kMessages], *to[kMessages], *ready.back()))] = kMessages;
  Step step(beside, engine, Kind::all_reduce, 5 * kColumns, 3);
  step.use();
  while (!numbers.empty()) {
    const std::optional<std::uint64_t> number = device.lane.next_ended(shoal_test::kDeadlineS);
    if (!number || !numbers.contains(*number) || !device.lane.wait(*number, 0)) return false;
    const std::size_t k = numbers.at(*number);
    numbers.erase(*number);
    if (k > kMessages) continue;
    const fake::Event end(device.to_device);
    cudaStreamWaitEvent(device.compute.get(), end.get(), 0);
    device.compute.run([&array = *to[k], &into = used[k]] { into.assign(array.floats(), array.floats() + array.count()); });
  }
  if (device.compute.synchronize() != 0 || beside.compute.synchronize() != 0 || !step.is_right()) return false;
  for (std::size_t k = 0; k <= kMessages; ++k) {
    std::vector<float> wanted(from[k]->count());
    std::iota(wanted.begin(), wanted.end(), k == kMessages ? 7.0f : static_cast<float>(100 * k));
    if (k == kMessages) std::rotate(wanted.begin(), wanted.begin() + static_cast<long>(counts[0]), wanted.end());
    if (used[k] != wanted) return false;
  }
  return true;
}

TEST(lane_keeps_the_order_of_messages_whatever_is_late) {
  fake_cuda_strict(1);
  for (std::uint64_t seed = 1; seed <= kSeeds; ++seed) {
    fake_cuda_seed(seed);
    if (!messages_arrive(seed)) check::fail(__FILE__, __LINE__, "wrong messages with seed " + std::to_string(seed));
  }
  fake_cuda_seed(0);
  fake_cuda_strict(0);
}

TEST(lane_copies_a_message_as_a_whole_into_a_buffer_that_is_used_again) {
  constexpr std::size_t kCount = 100 * kColumns;
  const fake::Array from(kCount), to(kCount);
  Device device(2);
  const auto engine = std::make_shared<LateEngine>(3);
  const fake::Event ready;
  const std::uint64_t records = fake_cuda_count(fake_records);
  for (std::uint64_t round = 1; round <= 5; ++round) {
    const std::uint64_t sent = device.lane.begin(engine, messages(Kind::send, 0, &from, nullptr, ready));
    CHECK(ends(device, device.lane.begin(engine, messages(Kind::recv, 0, nullptr, &to, ready))));
    CHECK(ends(device, sent));
    CHECK(ends(device, device.lane.begin(engine, exchange({kCount - 20, 10, 10}, from, to, ready))));
    auto counts = device.lane.counters();
    CHECK_EQ(counts["chunks"], 3 * round);
    CHECK_EQ(counts["copies_to_host"], 2 * round);    // parts that follow each other are one copy
    CHECK_EQ(counts["copies_to_device"], 4 * round);  // these come in the reverse order
    CHECK_EQ(counts["bytes_to_host"], 2 * round * kCount * sizeof(float));
    CHECK_EQ(counts["bytes_to_device"], 2 * round * kCount * sizeof(float));
    CHECK_EQ(counts["events"], 4 * round);
    CHECK_EQ(counts["events"], fake_cuda_count(fake_records) - records);
  }
  CHECK(!device.lane.next_ended(0));
}

// Receives of what is sent later hold up nothing.
TEST(lane_goes_on_while_receives_wait) {
  constexpr int kWaiting = 20;
  const fake::Array array(50 * kColumns), received(array.count()), sums(array.count());
  std::vector<std::unique_ptr<fake::Array>> targets;
  Device device(2);
  const auto engine = std::make_shared<LateEngine>(3);
  const fake::Event ready;
  std::vector<std::uint64_t> waiting;
  for (int tag = 1; tag <= kWaiting; ++tag) {
    targets.push_back(std::make_unique<fake::Array>(array.count()));
    waiting.push_back(device.lane.begin(engine, messages(Kind::recv, tag, nullptr, targets.back().get(), ready)));
  }
  CHECK(ends(device, device.lane.begin(engine, messages(Kind::send, 0, &array, nullptr, ready))));
  CHECK(ends(device, device.lane.begin(engine, messages(Kind::recv, 0, nullptr, &received, ready))));
  CHECK(ends(device, device.lane.begin(engine, transfer_of(Kind::all_reduce, array.count(), &array, &sums, ready))));
  for (int tag = kWaiting; tag > 0; --tag) {
    CHECK(ends(device, device.lane.begin(engine, messages(Kind::send, tag, &array, nullptr, ready))));
    CHECK(ends(device, waiting[static_cast<std::size_t>(tag - 1)]));
  }
}

TEST(lane_copies_each_byte_once_each_way) {
  constexpr std::size_t kChunks = 50, kCount = kChunks * kColumns - 5;
  const fake::Array array(kCount);  // outlives the device's work
  Device device(4);
  const auto engine = std::make_shared<shoal::ChunkEngineOf<shoal::SingleRank>>(std::make_shared<shoal::SingleRank>());
  const fake::Event ready(device.compute);
  const std::uint64_t records = fake_cuda_count(fake_records);
  for (std::uint64_t round = 1; round <= 3; ++round) {
    REQUIRE(ends(device, device.lane.begin(engine, transfer_of(Kind::all_reduce, kCount, &array, &array, ready))));
    auto counts = device.lane.counters();
    CHECK_EQ(counts["chunks"], round * kChunks);
    CHECK_EQ(counts["copies_to_host"], round * kChunks);
    CHECK_EQ(counts["copies_to_device"], round * kChunks);
    CHECK_EQ(counts["bytes_to_host"], round * kCount * sizeof(float));
    CHECK_EQ(counts["bytes_to_device"], round * kCount * sizeof(float));
    CHECK_EQ(counts["events"], 2 * round * kChunks);
    CHECK_EQ(counts["events"], fake_cuda_count(fake_records) - records);
    CHECK_EQ(counts["waits"], round * kChunks);
    CHECK(counts["sleeps"] <= counts["waits"]);
  }
}

TEST(lane_returns_the_call_that_failed_and_goes_on) {
  for (const char* function : {"cudaStreamWaitEvent", "cudaMemcpyAsync", "cudaMemcpy2DAsync", "cudaEventRecord", "cudaEventQuery",
                               "cudaEventSynchronize", "cudaHostAlloc", "cudaEventCreateWithFlags"}) {
    for (int nth = 0; nth < 3; ++nth) {
      const fake::Array source(8 * kColumns * kRanks), target(8 * kColumns);
      Device device(3);
      const auto engine = std::make_shared<LateEngine>(5);
      // Copies wait until the sender sleeps or its call has failed.
      const auto has_ended = std::make_shared<std::atomic<bool>>(false);
      device.compute.run([has_ended, sleeps = fake_cuda_count(fake_synchronizes)] {
        while (!*has_ended && fake_cuda_count(fake_synchronizes) == sleeps) std::this_thread::yield();
      });
      const fake::Event ready(device.compute), later;
      const auto begin = [&](const fake::Event& after) {
        return device.lane.begin(engine, transfer_of(Kind::reduce_scatter, 8 * kColumns, &source, &target, after));
      };
      fake_cuda_fail(function, std::string(function) == "cudaEventSynchronize" ? 0 : nth, 719);
      const std::string message = CHECK_THROWS(shoal::CudaError, ends(device, begin(ready)));
      *has_ended = true;
      CHECK_EQ(message, std::string(function) + ": cudaErrorLaunchFailure (719): unspecified launch failure");
      fake_cuda_reset();
      for (int k = 0; k < 3; ++k) CHECK(ends(device, begin(later)));  // no buffer was lost
    }
  }
}

TEST(lane_ends_with_the_error_of_the_engine_or_the_device) {
  const fake::Array array(10 * kColumns);
  Device device(2);
  const auto engine = std::make_shared<LateEngine>(3);
  const fake::Event ready;
  const auto begin = [&] { return device.lane.begin(engine, transfer_of(Kind::all_reduce, array.count(), &array, &array, ready)); };
  CHECK(ends(device, begin()));
  engine->hold(true);
  const std::uint64_t first = begin(), second = begin();
  engine->fail("rank 1 was lost");
  engine->hold(false);
  CHECK_EQ(CHECK_THROWS(shoal::GroupError, ends(device, second)), "rank 1 was lost");
  CHECK_EQ(CHECK_THROWS(shoal::GroupError, ends(device, first)), "rank 1 was lost");
  CHECK(contains(CHECK_THROWS(std::invalid_argument, device.lane.wait(first, 0)), "is not under way"));
  engine->fail("");
  fake_cuda_break(device.to_device.get(), 700);
  CHECK(contains(CHECK_THROWS(shoal::CudaError, [&] {
                   for (int k = 0; k < 1000; ++k) ends(device, begin());
                 }()),
                 "cudaErrorIllegalAddress (700): an illegal memory access was encountered"));
  fake_cuda_reset();
  CHECK(ends(device, begin()));
  auto too_large = transfer_of(Kind::all_reduce, 1000, &array, &array, ready);
  too_large.columns = kBufferBytes;
  CHECK(contains(CHECK_THROWS(std::invalid_argument, device.lane.begin(engine, too_large)), "for buffers of"));
}

TEST(lane_that_cannot_use_its_device_says_so) {
  fake_cuda_fail("cudaSetDevice", 0, 719);
  const fake::Array array(kColumns);
  Device device(2);
  const auto engine = std::make_shared<LateEngine>(3);
  const fake::Event ready;
  CHECK(contains(CHECK_THROWS(shoal::CudaError, ends(device, device.lane.begin(engine, transfer_of(Kind::all_reduce, kColumns, &array, &array, ready)))),
                 "cudaSetDevice: cudaErrorLaunchFailure (719)"));
  fake_cuda_reset();
}

TEST(lane_waits_while_another_thread_captures_a_graph) {
  const fake::Array array(10 * kColumns);
  Device device(2);
  const auto engine = std::make_shared<LateEngine>(3);
  const fake::Event ready;
  fake_cuda_capture(1);
  CHECK(ends(device, device.lane.begin(engine, transfer_of(Kind::all_reduce, array.count(), &array, &array, ready))));
  fake_cuda_capture(0);
}

// Both ranks of a real group, each with its lane, in all kinds.
TEST(lane_of_each_rank_gives_the_sums_of_an_engine) {
  shoal_test::Group group({"two hosts", {"a", "b"}});
  fake_cuda_strict(1);
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    fake_cuda_seed(seed);
    group.each([&](int rank, shoal::Engine& engine) {
      Device device;
      const std::shared_ptr<shoal::Engine> shared(std::shared_ptr<void>(), &engine);
      const auto chunks = std::make_shared<shoal::ChunkEngineOf<shoal::Engine>>(shared);
      const std::size_t width = 3 * kColumns + seed;
      const auto run = [&](Kind kind, std::size_t given, std::size_t got, int root) {
        const fake::Array source(given), target(got);
        device.compute.run([&] {
          for (std::size_t i = 0; i < given; ++i) source.floats()[i] = static_cast<float>(100 * rank) + static_cast<float>(i);
        });
        const fake::Event ready(device.compute);
        auto transfer = transfer_of(kind, width, &source, &target, ready, 2, static_cast<std::size_t>(rank));
        transfer.spec.root = root;
        if (kind == Kind::broadcast && rank == root) transfer.target.data = nullptr;
        if (kind == Kind::broadcast && rank != root) transfer.source.data = nullptr;
        CHECK(ends(device, device.lane.begin(chunks, transfer)));
        CHECK_EQ(device.to_device.synchronize(), 0);
        const float* const from = transfer.target.data ? target.floats() : source.floats();
        return std::vector<float>(from, from + got);
      };
      const auto is = [&](const std::vector<float>& got, const std::function<float(float)>& wanted) {
        for (std::size_t i = 0; i < got.size(); ++i) {
          if (got[i] != wanted(static_cast<float>(i))) return false;
        }
        return true;
      };
      const auto w = static_cast<float>(width);
      CHECK(is(run(Kind::all_reduce, width, width, 0), [](float i) { return 100 + 2 * i; }));
      CHECK(is(run(Kind::reduce_scatter, 2 * width, width, 0),
               [&](float i) { return 100 + 2 * (static_cast<float>(rank) * w + i); }));
      CHECK(is(run(Kind::all_gather, width, 2 * width, 0), [&](float i) { return i < w ? i : 100 + i - w; }));
      CHECK(is(run(Kind::broadcast, width, width, 1), [](float i) { return 100 + i; }));
    });
  }
  fake_cuda_seed(0);
  fake_cuda_strict(0);
  group.close();
}

}  // namespace lane_test
