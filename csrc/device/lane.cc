#include "device/lane.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <deque>
#include <exception>
#include <stdexcept>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "engine/errors.h"

namespace shoal {

namespace {

using Clock = std::chrono::steady_clock;

// Copies to the host that are queued before the first of them has completed: enough that the device always has one.
constexpr std::size_t kCopiesAhead = 4;
// A thread that sleeps wakes up about this late.
constexpr std::chrono::microseconds kSpin{50};
constexpr double kLeastTimeS = 1e-3;  // 0 would be no limit
// Buffers of messages have sizes of powers of two, so that later ones can use them.
constexpr std::size_t kLeastMessageBytes = std::size_t{64} << 10;

// Calls f(address, bytes, is_input) for all memory that messages read and then for all that they write.
template <class F>
void for_each_part(OpSpec& spec, const F& f) {
  const std::size_t width = size_of(spec.element);
  auto* input = const_cast<std::byte*>(spec.input);
  if (input) f(input, spec.count * width, true);
  spec.input = input;
  for (Block& each : spec.inputs) f(each.data, each.count * width, true);
  if (spec.output) f(spec.output, spec.count * width, false);
  for (Block& each : spec.outputs) f(each.data, each.count * width, false);
}

// Returns a function that throws a copy of the exception that is being handled.
std::function<void()> raises_copy() {
  try {
    throw;
  } catch (const GroupError& error) {
    return [what = std::string(error.what())] { throw GroupError(what); };
  } catch (const CudaError& error) {
    return [what = std::string(error.what())] { throw CudaError(what); };
  } catch (const std::exception& error) {
    return [what = std::string(error.what())] { throw std::runtime_error(what); };
  }
}

}  // namespace

// What the threads use. The engines' callbacks hold it too.
struct Lane::Core : std::enable_shared_from_this<Core> {
  struct Buffer {
    std::byte* memory = nullptr;
    CudaEvent event = nullptr;
    bool recorded = false;
    std::size_t message_bytes = 0;  // size, of one for messages
  };

  // Memory of a message on the device and in its buffer.
  struct Region {
    std::byte *device, *host;
    std::size_t bytes;
  };

  // A transfer under way. What follows `failed` is accessed with the lane's lock.
  struct Moving {
    Transfer transfer;
    std::shared_ptr<ChunkEngine> engine;
    std::vector<Region> sources, targets;  // of messages
    std::atomic<bool> failed{false};
    std::size_t num_open = 0;  // chunks at the engine
    bool receiving = false;    // the receiver has one of them
    bool sending = true;       // the sender has it, or will have it
    std::function<void()> raise;  // the first error, as a new exception of its type

    bool ended() const { return !sending && !receiving && (raise || num_open == 0); }
  };

  // Columns of a tensor, or messages as a whole.
  struct Chunk {
    std::shared_ptr<Moving> of;
    Buffer* buffer = nullptr;
    std::size_t first = 0, count = 0;  // columns
    std::uint64_t seq = 0;

    std::size_t width() const { return size_of(of->transfer.spec.element); }
    // Weights may come back in another type.
    std::size_t target_width() const { return returns_weights(of->transfer.spec.kind) ? size_of(of->transfer.spec.weights) : width(); }
    std::size_t row_bytes() const { return count * width(); }
    std::byte* buffered(const DeviceTable& table) const { return buffer->memory + table.first * row_bytes(); }
    // Address of the contribution, or of the result: in the buffer, or memory of the host that `spec` gives.
    const std::byte* input() const {
      const OpSpec& spec = of->transfer.spec;
      if (sends_coefficients(spec.kind)) return spec.input + first / kFactorPart * input_stride(spec);
      return spec.kind == Kind::configure ? spec.input : buffered(of->transfer.source);
    }
    std::byte* output() const {
      const OpSpec& spec = of->transfer.spec;
      if (spec.kind == Kind::configure) return spec.output;
      if (returns_sums(spec.kind)) return spec.output + first / kServedUnit * kSums * sizeof(double);
      if (spec.kind == Kind::factor) return spec.output + first / kFactorPart * factor_bytes(spec);
      return buffered(of->transfer.target);
    }
  };

  struct Counters {
    std::atomic<std::uint64_t> chunks{0}, copies_to_host{0}, copies_to_device{0}, bytes_to_host{0}, bytes_to_device{0}, events{0},
        waits{0}, sleeps{0};
  };

  Core(CudaRuntime with, Options with_options) : runtime(std::move(with)), options(with_options) {}
  ~Core();

  void launch(const char* name, void (Core::*run)());
  void send_all();
  void receive_all();

  std::shared_ptr<Moving> next_to_send();
  void send(const std::shared_ptr<Moving>& moving);
  void send_messages(const std::shared_ptr<Moving>& moving);
  static void place(Moving& moving, std::byte* memory);
  Buffer* take_buffer(bool may_wait);
  Buffer* take_message_buffer(std::size_t bytes);
  Buffer* make_buffer(std::size_t bytes);
  void queue_copy(const Chunk& chunk);
  void submit(Chunk chunk);
  void await(CudaEvent event);

  bool next_to_receive(Chunk& chunk);
  void receive(const Chunk& chunk);
  void receive_messages(const Chunk& chunk);
  void fail(Moving& moving);
  void put_back(Buffer* buffer);
  void drain(CudaStream stream) noexcept;

  const CudaRuntime runtime;
  const Options options;
  Counters counts;

  Mutex mutex;
  Condition to_send, to_receive, freed, ended;
  std::deque<std::shared_ptr<Moving>> begun GUARDED_BY(mutex);
  std::deque<Chunk> completed GUARDED_BY(mutex);  // by the engine
  std::deque<Buffer*> free GUARDED_BY(mutex);
  std::map<std::size_t, std::deque<Buffer*>> free_for_messages GUARDED_BY(mutex);  // by size
  std::vector<std::unique_ptr<Buffer>> buffers GUARDED_BY(mutex);
  std::map<std::uint64_t, std::shared_ptr<Moving>> moving GUARDED_BY(mutex);
  std::map<const void*, std::shared_ptr<ChunkEngine>> engines GUARDED_BY(mutex);
  std::uint64_t num_begun GUARDED_BY(mutex) = 0;
  std::size_t num_open GUARDED_BY(mutex) = 0, num_for_chunks GUARDED_BY(mutex) = 0;
  int num_threads GUARDED_BY(mutex) = 0;
  bool stopping GUARDED_BY(mutex) = false, all_sent GUARDED_BY(mutex) = false;
};

Lane::Core::~Core() {
  for (const auto& each : buffers) {
    if (each->event) runtime.destroy_event(each->event);
    if (each->memory) runtime.free_pinned(each->memory);
  }
}

Lane::Lane(CudaRuntime runtime, Options options)
    : pid_(static_cast<int>(getpid())), core_(std::make_shared<Core>(std::move(runtime), options)) {
  core_->launch("shoal-to-host", &Core::send_all);
  core_->launch("shoal-to-device", &Core::receive_all);
}

Lane::~Lane() {
  if (getpid() != pid_) {  // a forked child has no threads, and maybe a locked mutex
    static_cast<void>(new std::shared_ptr<Core>(core_));
    return;
  }
  const MutexLock lock(core_->mutex);
  core_->stopping = true;
  core_->to_send.notify_all();
}

std::shared_ptr<ChunkEngine> Lane::engine_of(const void* object, const std::function<std::shared_ptr<ChunkEngine>()>& make) {
  const MutexLock lock(core_->mutex);
  std::shared_ptr<ChunkEngine>& engine = core_->engines[object];
  if (!engine) engine = make();
  return engine;
}

std::uint64_t Lane::begin(std::shared_ptr<ChunkEngine> engine, Transfer transfer) {
  const std::size_t bytes = transfer.buffer_rows * transfer.columns * size_of(transfer.spec.element);
  if (!by_messages(transfer.spec.kind) && (transfer.columns == 0 || bytes > core_->options.buffer_bytes)) {
    throw std::invalid_argument("a chunk of " + std::to_string(bytes) + " bytes for buffers of " +
                                std::to_string(core_->options.buffer_bytes));
  }
  if (is_served(transfer.spec.kind) && transfer.columns < transfer.width && transfer.columns % kServedBlock) {
    throw std::invalid_argument("chunks of " + std::to_string(transfer.columns) + " numbers, where a server has blocks of " +
                                std::to_string(kServedBlock));
  }
  if (is_served(transfer.spec.kind)) engine->require_servers(transfer.spec);
  auto moving = std::make_shared<Core::Moving>();
  moving->transfer = std::move(transfer);
  moving->engine = std::move(engine);
  const MutexLock lock(core_->mutex);
  if (core_->stopping) throw std::logic_error("a transfer begins after its lane was stopped");
  core_->moving[core_->num_begun] = moving;
  core_->begun.push_back(std::move(moving));
  core_->to_send.notify_all();
  return core_->num_begun++;
}

bool Lane::wait(std::uint64_t number, double timeout_s) {
  std::shared_ptr<Core::Moving> moving;
  const auto until = Clock::now() + seconds(timeout_s);
  {
    const MutexLock lock(core_->mutex);
    const auto found = core_->moving.find(number);
    if (found == core_->moving.end()) throw std::invalid_argument("transfer " + std::to_string(number) + " is not under way");
    moving = found->second;
    while (!moving->ended()) {
      if (!core_->ended.wait_until(core_->mutex, until) && !moving->ended()) return false;
    }
    core_->moving.erase(number);
  }
  if (moving->raise) moving->raise();
  return true;
}

std::optional<std::uint64_t> Lane::next_ended(double timeout_s) {
  const auto until = Clock::now() + seconds(timeout_s);
  const MutexLock lock(core_->mutex);
  for (bool in_time = true;; in_time = core_->ended.wait_until(core_->mutex, until)) {
    for (const auto& [number, each] : core_->moving) {
      if (each->ended()) return number;
    }
    if (!in_time || core_->num_threads == 0) return std::nullopt;
  }
}

void Lane::stop() {
  if (getpid() != pid_) return;
  std::map<const void*, std::shared_ptr<ChunkEngine>> engines;  // let go without the lock
  const MutexLock lock(core_->mutex);
  core_->stopping = true;
  core_->to_send.notify_all();
  while (core_->num_threads > 0) core_->ended.wait(core_->mutex);
  engines.swap(core_->engines);
}

std::map<std::string, std::uint64_t> Lane::counters() const {
  const Core::Counters& counts = core_->counts;
  return {{"chunks", counts.chunks},
          {"copies_to_host", counts.copies_to_host},
          {"copies_to_device", counts.copies_to_device},
          {"bytes_to_host", counts.bytes_to_host},
          {"bytes_to_device", counts.bytes_to_device},
          {"events", counts.events},
          {"waits", counts.waits},
          {"sleeps", counts.sleeps}};
}

void Lane::Core::launch(const char* name, void (Core::*run)()) {
  {
    const MutexLock lock(mutex);
    ++num_threads;
  }
  sigset_t all, before;  // signals are for the program's threads
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  std::thread([core = shared_from_this(), name, run] {
    pthread_setname_np(pthread_self(), name);
    (*core.*run)();
    const MutexLock lock(core->mutex);
    --core->num_threads;
    core->ended.notify_all();
  }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// Ends a transfer with the exception that is being handled. The caller who waits gets a copy.
void Lane::Core::fail(Moving& moving) {
  moving.failed = true;
  std::function<void()> raise = raises_copy();
  const MutexLock lock(mutex);
  if (!moving.raise) moving.raise = std::move(raise);
  ended.notify_all();
}

// Waits for copies that are queued, also those of transfers that have failed: they use the buffers.
void Lane::Core::drain(CudaStream stream) noexcept {
  CudaEvent event = nullptr;
  try {
    event = runtime.create_event();
    runtime.record(event, stream);
    runtime.synchronize(event);
  } catch (const CudaError&) {  // nothing runs on a device that has failed
  }
  if (event) runtime.destroy_event(event);
}

void Lane::Core::put_back(Buffer* buffer) {
  const MutexLock lock(mutex);
  (buffer->message_bytes ? free_for_messages[buffer->message_bytes] : free).push_back(buffer);
  freed.notify_all();
}

// ---- device to host -------------------------------------------------------------------------------------

void Lane::Core::send_all() {
  std::exception_ptr problem;
  try {
    runtime.enter_thread(options.device);
  } catch (const CudaError&) {
    problem = std::current_exception();
  }
  while (std::shared_ptr<Moving> moving = next_to_send()) {
    try {
      if (problem) std::rethrow_exception(problem);
      send(moving);
    } catch (const std::exception&) {
      fail(*moving);
    }
    const MutexLock lock(mutex);
    moving->sending = false;
    ended.notify_all();
  }
  drain(options.to_host);
  const MutexLock lock(mutex);
  all_sent = true;
  to_receive.notify_all();
}

// Returns null once the lane stops and has nothing left to send.
std::shared_ptr<Lane::Core::Moving> Lane::Core::next_to_send() {
  const MutexLock lock(mutex);
  while (begun.empty() && !stopping) to_send.wait(mutex);
  if (begun.empty()) return nullptr;
  std::shared_ptr<Moving> first = std::move(begun.front());
  begun.pop_front();
  return first;
}

void Lane::Core::send(const std::shared_ptr<Moving>& moving) {
  const Transfer& transfer = moving->transfer;
  if (by_messages(transfer.spec.kind)) return send_messages(moving);
  if (transfer.source.data) runtime.wait(options.to_host, transfer.ready);
  else await(transfer.ready);  // the caller's work may still use the target
  std::deque<Chunk> queued;
  const auto submit_first = [&] {
    submit(queued.front());
    queued.pop_front();
  };
  try {
    for (std::size_t first = 0; first < transfer.width && !moving->failed; first += transfer.columns) {
      if (queued.size() == kCopiesAhead) submit_first();
      Buffer* buffer = nullptr;
      while (!(buffer = take_buffer(queued.empty()))) submit_first();
      queued.push_back({moving, buffer, first, std::min(transfer.columns, transfer.width - first)});
      queue_copy(queued.back());
    }
    while (!queued.empty() && !moving->failed) submit_first();
  } catch (...) {
    for (const Chunk& chunk : queued) put_back(chunk.buffer);
    throw;
  }
  for (const Chunk& chunk : queued) put_back(chunk.buffer);  // of a transfer that has failed
}

// Returns null if no buffer is free and the caller must not wait for one.
Lane::Core::Buffer* Lane::Core::take_buffer(bool may_wait) {
  {
    const MutexLock lock(mutex);
    while (free.empty() && num_for_chunks == options.num_buffers) {
      if (!may_wait) return nullptr;
      freed.wait(mutex);
    }
    if (!free.empty()) {
      Buffer* const first = free.front();
      free.pop_front();
      return first;
    }
  }
  Buffer* const made = make_buffer(options.buffer_bytes);
  const MutexLock lock(mutex);
  ++num_for_chunks;
  return made;
}

Lane::Core::Buffer* Lane::Core::make_buffer(std::size_t bytes) {
  auto made = std::make_unique<Buffer>();
  made->event = runtime.create_event();
  try {
    made->memory = static_cast<std::byte*>(runtime.allocate_pinned(bytes));
  } catch (...) {
    runtime.destroy_event(made->event);
    throw;
  }
  const MutexLock lock(mutex);
  buffers.push_back(std::move(made));
  return buffers.back().get();
}

// Sends messages as a whole, and posts receives.
void Lane::Core::send_messages(const std::shared_ptr<Moving>& moving) {
  Transfer& transfer = moving->transfer;
  std::size_t bytes = 0;
  for_each_part(transfer.spec, [&](std::byte*&, std::size_t part_bytes, bool) { bytes += part_bytes; });
  Buffer* const buffer = take_message_buffer(bytes);
  try {
    place(*moving, buffer->memory);
    if (!moving->sources.empty()) {
      runtime.wait(options.to_host, transfer.ready);
      if (buffer->recorded) runtime.wait(options.to_host, buffer->event);
      for (const Region& each : moving->sources) {
        runtime.copy_to_host(each.host, each.device, {1, each.bytes, each.bytes, each.bytes}, options.to_host);
        ++counts.copies_to_host;
        counts.bytes_to_host += each.bytes;
      }
      runtime.record(buffer->event, options.to_host);
      buffer->recorded = true;
      ++counts.events;
    }
    submit({moving, buffer});
  } catch (...) {
    put_back(buffer);
    throw;
  }
}

// Gives each part of messages a place in the buffer. Parts that follow each other on the device are one copy.
void Lane::Core::place(Moving& moving, std::byte* memory) {
  for_each_part(moving.transfer.spec, [&](std::byte*& address, std::size_t bytes, bool is_input) {
    std::vector<Region>& regions = is_input ? moving.sources : moving.targets;
    if (!regions.empty() && regions.back().device + regions.back().bytes == address) {
      regions.back().bytes += bytes;
    } else if (bytes) {
      regions.push_back({address, memory, bytes});
    }
    address = memory;
    memory += bytes;
  });
}

Lane::Core::Buffer* Lane::Core::take_message_buffer(std::size_t bytes) {
  bytes = std::bit_ceil(std::max(bytes, kLeastMessageBytes));
  {
    const MutexLock lock(mutex);
    if (std::deque<Buffer*>& fitting = free_for_messages[bytes]; !fitting.empty()) {
      Buffer* const first = fitting.front();
      fitting.pop_front();
      return first;
    }
  }
  Buffer* const made = make_buffer(bytes);
  made->message_bytes = bytes;
  return made;
}

void Lane::Core::queue_copy(const Chunk& chunk) {
  const DeviceTable& source = chunk.of->transfer.source;
  if (!source.data) return;
  Buffer& buffer = *chunk.buffer;
  if (buffer.recorded) runtime.wait(options.to_host, buffer.event);
  const std::size_t width = chunk.width();
  runtime.copy_to_host(chunk.buffered(source), source.data + chunk.first * width,
                       {source.rows, chunk.row_bytes(), chunk.row_bytes(), chunk.of->transfer.width * width}, options.to_host);
  runtime.record(buffer.event, options.to_host);
  buffer.recorded = true;
  ++counts.copies_to_host;
  ++counts.events;
  counts.bytes_to_host += source.rows * chunk.row_bytes();
}

// Submits a chunk once its copy has completed, or, where nothing was copied, the last one out of its buffer has.
void Lane::Core::submit(Chunk chunk) {
  if (chunk.buffer->recorded) await(chunk.buffer->event);
  Moving& moving = *chunk.of;
  const Transfer& transfer = moving.transfer;
  OpSpec spec = transfer.spec;
  if (!by_messages(spec.kind)) {
    spec.count = chunk.count;
    spec.input = chunk.input();
    spec.output = chunk.output();
  }
  if (is_served(spec.kind)) {  // a chunk is a tensor of its own to the servers, numbered by its first block
    spec.table += static_cast<std::uint32_t>(chunk.first / kServedBlock);
    spec.place += chunk.first / kServedBlock;
  }
  spec.timeout_s = std::max(kLeastTimeS, std::chrono::duration<double>(transfer.deadline - Clock::now()).count());
  chunk.seq = moving.engine->submit(std::move(spec));
  ++counts.chunks;
  {
    const MutexLock lock(mutex);
    ++moving.num_open;
    ++num_open;
  }
  // On a thread of the engine, which must not wait for the device.
  moving.engine->on_end(chunk.seq, [core = shared_from_this(), chunk] {
    const MutexLock lock(core->mutex);
    core->completed.push_back(chunk);
    core->to_receive.notify_all();
  });
}

void Lane::Core::await(CudaEvent event) {
  ++counts.waits;
  const auto until = Clock::now() + kSpin;
  do {
    if (runtime.has_passed(event)) return;
    std::this_thread::yield();
  } while (Clock::now() < until);
  ++counts.sleeps;
  runtime.synchronize(event);
}

// ---- host to device -------------------------------------------------------------------------------------

void Lane::Core::receive_all() {
  std::exception_ptr problem;
  try {
    runtime.enter_thread(options.device);
  } catch (const CudaError&) {
    problem = std::current_exception();
  }
  Chunk chunk;
  while (next_to_receive(chunk)) {
    try {
      if (problem) std::rethrow_exception(problem);
      receive(chunk);
    } catch (const std::exception&) {
      fail(*chunk.of);
    }
    put_back(chunk.buffer);
    {
      const MutexLock lock(mutex);
      --chunk.of->num_open;
      chunk.of->receiving = false;
      --num_open;
      ended.notify_all();
    }
    chunk = {};
  }
  drain(options.to_device);
}

// Returns false once the lane stops and every chunk has been received.
bool Lane::Core::next_to_receive(Chunk& chunk) {
  const MutexLock lock(mutex);
  while (completed.empty() && !(all_sent && num_open == 0)) to_receive.wait(mutex);
  if (completed.empty()) return false;
  chunk = std::move(completed.front());
  completed.pop_front();
  chunk.of->receiving = true;
  return true;
}

void Lane::Core::receive(const Chunk& chunk) {
  Moving& moving = *chunk.of;
  moving.engine->wait(chunk.seq, 0);  // throws the error of a chunk that failed
  if (by_messages(moving.transfer.spec.kind)) return receive_messages(chunk);
  const DeviceTable& target = moving.transfer.target;
  if (!target.data || moving.failed) return;
  const std::size_t width = chunk.target_width(), row_bytes = chunk.count * width;
  runtime.copy_to_device(target.data + chunk.first * width, chunk.buffered(target),
                         {target.rows, row_bytes, moving.transfer.width * width, row_bytes}, options.to_device);
  runtime.record(chunk.buffer->event, options.to_device);
  chunk.buffer->recorded = true;
  ++counts.copies_to_device;
  ++counts.events;
  counts.bytes_to_device += target.rows * row_bytes;
}

void Lane::Core::receive_messages(const Chunk& chunk) {
  const Moving& moving = *chunk.of;
  if (moving.targets.empty()) return;
  runtime.wait(options.to_device, moving.transfer.ready);  // the caller's work may still use the target
  for (const Region& each : moving.targets) {
    runtime.copy_to_device(each.device, each.host, {1, each.bytes, each.bytes, each.bytes}, options.to_device);
    ++counts.copies_to_device;
    counts.bytes_to_device += each.bytes;
  }
  runtime.record(chunk.buffer->event, options.to_device);
  chunk.buffer->recorded = true;
  ++counts.events;
}

}  // namespace shoal
