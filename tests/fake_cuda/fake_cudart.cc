// A runtime of CUDA for machines without a GPU: the functions that shoal uses, under their names and with their meaning.
// Memory of the device is ordinary memory. A stream is a thread that does its work in order, with delays by a seed, so that
// what no event orders happens in another order each time.
//
// What is wrong on a GPU goes wrong here: a copy first fills its target with a pattern, so that a reader who comes too early
// gets wrong numbers (and the thread sanitizer sees the race); freed memory is poisoned, and a copy that uses it fails; the
// memory of the host in a copy must be pinned; the first failure of a stream fails all later calls.
#include "fake_cuda.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>

namespace {

constexpr int kSuccess = 0, kInvalid = 1, kNotReady = 600, kIllegalAddress = 700, kCapturing = 900;
constexpr int kToDevice = 1, kToHost = 2, kOnDevice = 3, kRelaxed = 2;
constexpr int kNumDevices = 2;
constexpr int kCopyPattern = 0xA5, kFreedPattern = 0xDB;
constexpr int kDelaysUs[] = {0, 0, 0, 0, 10, 50, 150};

// Blocks of memory by their addresses. Freed ones stay, poisoned, so that nobody else gets them.
class Blocks {
 public:
  int allocate(void** memory, std::size_t bytes) {
    auto block = std::make_unique<std::byte[]>(std::max<std::size_t>(bytes, 1));
    *memory = block.get();
    const std::lock_guard lock(mutex_);
    blocks_[reinterpret_cast<std::uintptr_t>(*memory)] = {std::move(block), bytes, true};
    return kSuccess;
  }
  int free(void* memory) {
    const std::lock_guard lock(mutex_);
    const auto found = blocks_.find(reinterpret_cast<std::uintptr_t>(memory));
    if (found == blocks_.end() || !found->second.alive) return kInvalid;
    found->second.alive = false;
    poisoned_ += found->second.bytes;
    if (poisoned_ < kMostPoisoned) {
      std::memset(memory, kFreedPattern, found->second.bytes);
    } else {  // let it go
      poisoned_ -= found->second.bytes;
      blocks_.erase(found);
    }
    return kSuccess;
  }
  bool has(const void* from, std::size_t bytes) {
    const auto begin = reinterpret_cast<std::uintptr_t>(from);
    const std::lock_guard lock(mutex_);
    auto after = blocks_.upper_bound(begin);
    if (after == blocks_.begin()) return false;
    const auto& [address, block] = *std::prev(after);
    return block.alive && begin + bytes <= address + block.bytes;
  }

 private:
  static constexpr std::size_t kMostPoisoned = std::size_t{64} << 20;
  struct Block {
    std::unique_ptr<std::byte[]> memory;
    std::size_t bytes;
    bool alive;
  };
  std::mutex mutex_;
  std::map<std::uintptr_t, Block> blocks_;
  std::size_t poisoned_ = 0;
};

struct Process {
  Blocks device, pinned;
  std::atomic<std::uint64_t> seed{0}, num_streams{0}, counts[fake_num_counts]{};
  std::atomic<int> error{kSuccess};
  std::atomic<bool> capturing{false}, strict{false};
  std::atomic<int (*)(const void*)> ask{nullptr};
  std::mutex mutex;
  std::map<std::string, std::pair<int, int>> planned;  // by function: calls until then, code
};

Process& process() {
  static Process* const once = new Process;  // threads may outlive static objects
  return *once;
}

thread_local bool relaxed = false;
thread_local int current_device = 0;

// The code with which a call of this function fails, or success.
int failure_of(const char* function) {
  Process& all = process();
  const std::lock_guard lock(all.mutex);
  if (const auto planned = all.planned.find(function); planned != all.planned.end() && planned->second.first-- == 0) {
    const int code = planned->second.second;
    all.planned.erase(planned);
    return code;
  }
  return all.error;
}

// The same of a call that no thread may make while another one captures.
int unsafe_failure_of(const char* function) {
  if (process().capturing && !relaxed) return kCapturing;
  return failure_of(function);
}

// One recording of an event.
class Reached {
 public:
  void set() {
    const std::lock_guard lock(mutex_);
    reached_ = true;
    changed_.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return reached_; });
  }
  bool is_set() {
    const std::lock_guard lock(mutex_);
    return reached_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
};

// An event stands for its last recording; one that was never recorded is reached.
class Event {
 public:
  std::shared_ptr<Reached> renew() {
    const std::lock_guard lock(mutex_);
    return last_ = std::make_shared<Reached>();
  }
  std::shared_ptr<Reached> last() {
    const std::lock_guard lock(mutex_);
    return last_;
  }

 private:
  std::mutex mutex_;
  std::shared_ptr<Reached> last_;
};

class Stream {
 public:
  using Work = std::function<int()>;

  Stream() {
    const std::uint64_t seed = process().seed, number = process().num_streams++;
    if (seed) random_.seed(1000 * seed + number);
    delays_ = seed != 0;
    std::thread([this] { run(); }).detach();
  }
  void queue(Work work) {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    changed_.notify_all();
  }
  // Ends the thread after the work that is queued.
  void destroy() { queue(nullptr); }

 private:
  void delay() {
    if (!delays_) return;
    const int us = kDelaysUs[random_() % std::size(kDelaysUs)];
    if (us) std::this_thread::sleep_for(std::chrono::microseconds(us));
  }
  void run() {
    while (true) {
      Work work;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return !work_.empty(); });
        work = std::move(work_.front());
        work_.pop_front();
      }
      if (!work) break;
      delay();
      if (const int code = work(); code != kSuccess) {
        int none = kSuccess;
        process().error.compare_exchange_strong(none, code);
      }
    }
    delete this;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> work_;
  std::mt19937_64 random_;
  bool delays_ = false;
};

struct Copy {
  std::byte* to;
  const std::byte* from;
  std::size_t to_pitch, from_pitch, row_bytes, rows;
  int direction;

  bool may_be_used() const {
    Process& all = process();
    const auto span = [&](std::size_t pitch) { return rows ? (rows - 1) * pitch + row_bytes : 0; };
    const auto ask = all.ask.load();
    const auto is_given = [&](const std::byte* memory, std::size_t pitch, bool on_host) {
      if (on_host) return all.pinned.has(memory, span(pitch));
      return (!all.strict || all.device.has(memory, span(pitch))) && (!ask || ask(memory));
    };
    return is_given(to, to_pitch, direction == kToHost) && is_given(from, from_pitch, direction == kToDevice);
  }
  int run() const {
    if (process().error) return kSuccess;  // nothing runs after a failure
    if (!may_be_used()) return kIllegalAddress;
    for (std::size_t row = 0; row < rows; ++row) std::memset(to + row * to_pitch, kCopyPattern, row_bytes);
    if (process().seed) std::this_thread::yield();
    for (std::size_t row = 0; row < rows; ++row) std::memcpy(to + row * to_pitch, from + row * from_pitch, row_bytes);
    return kSuccess;
  }
};

int queue_copy(const Copy& copy, void* stream) {
  if (copy.direction != kToDevice && copy.direction != kToHost && copy.direction != kOnDevice) return kInvalid;
  ++process().counts[fake_copies];
  static_cast<Stream*>(stream)->queue([copy] { return copy.run(); });
  return kSuccess;
}

}  // namespace

extern "C" {

void fake_cuda_seed(std::uint64_t seed) {
  process().seed = seed;
  process().num_streams = 0;
}
void fake_cuda_fail(const char* function, int nth, int code) {
  const std::lock_guard lock(process().mutex);
  process().planned[function] = {nth, code};
}
void fake_cuda_break(void* stream, int code) {
  int none = kSuccess;
  if (stream) static_cast<Stream*>(stream)->queue([code] { return code; });
  else process().error.compare_exchange_strong(none, code);
}
void fake_cuda_reset(void) {
  const std::lock_guard lock(process().mutex);
  process().planned.clear();
  process().error = kSuccess;
}
void fake_cuda_capture(int on) { process().capturing = on != 0; }
void fake_cuda_strict(int on) { process().strict = on != 0; }
void fake_cuda_ask(int (*is_alive)(const void*)) { process().ask = is_alive; }
std::uint64_t fake_cuda_count(int what) { return process().counts[what]; }

int cudaMalloc(void** memory, std::size_t bytes) {
  if (const int code = unsafe_failure_of("cudaMalloc")) return code;
  return process().device.allocate(memory, bytes);
}
int cudaFree(void* memory) { return process().device.free(memory); }
int cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  if (const int code = unsafe_failure_of("cudaHostAlloc")) return code;
  return process().pinned.allocate(memory, bytes);
}
int cudaFreeHost(void* memory) { return process().pinned.free(memory); }

int cudaStreamCreateWithPriority(void** stream, unsigned, int) {
  if (const int code = unsafe_failure_of("cudaStreamCreateWithPriority")) return code;
  *stream = new Stream;
  return kSuccess;
}
int cudaStreamDestroy(void* stream) {
  static_cast<Stream*>(stream)->destroy();
  return kSuccess;
}
int cudaStreamSynchronize(void* stream) {
  if (const int code = unsafe_failure_of("cudaStreamSynchronize")) return code;
  const auto reached = std::make_shared<Reached>();
  static_cast<Stream*>(stream)->queue([reached] {
    reached->set();
    return kSuccess;
  });
  reached->wait();
  return process().error;
}
int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  if (const int code = failure_of("cudaStreamWaitEvent")) return code;
  ++process().counts[fake_stream_waits];
  if (auto last = static_cast<Event*>(event)->last()) {
    static_cast<Stream*>(stream)->queue([last] {
      last->wait();
      return kSuccess;
    });
  }
  return kSuccess;
}
int cudaLaunchHostFunc(void* stream, void (*function)(void*), void* argument) {
  if (const int code = failure_of("cudaLaunchHostFunc")) return code;
  static_cast<Stream*>(stream)->queue([function, argument] {
    if (!process().error) function(argument);
    return kSuccess;
  });
  return kSuccess;
}

int cudaEventCreateWithFlags(void** event, unsigned) {
  if (const int code = failure_of("cudaEventCreateWithFlags")) return code;
  *event = new Event;
  return kSuccess;
}
int cudaEventDestroy(void* event) {
  delete static_cast<Event*>(event);
  return kSuccess;
}
int cudaEventRecord(void* event, void* stream) {
  if (const int code = failure_of("cudaEventRecord")) return code;
  ++process().counts[fake_records];
  static_cast<Stream*>(stream)->queue([reached = static_cast<Event*>(event)->renew()] {
    reached->set();
    return kSuccess;
  });
  return kSuccess;
}
int cudaEventQuery(void* event) {
  if (const int code = unsafe_failure_of("cudaEventQuery")) return code;
  ++process().counts[fake_queries];
  const auto last = static_cast<Event*>(event)->last();
  if (last && !last->is_set()) return kNotReady;
  return process().error;
}
int cudaEventSynchronize(void* event) {
  if (const int code = unsafe_failure_of("cudaEventSynchronize")) return code;
  ++process().counts[fake_synchronizes];
  if (const auto last = static_cast<Event*>(event)->last()) last->wait();
  return process().error;
}

int cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, int direction, void* stream) {
  if (const int code = failure_of("cudaMemcpyAsync")) return code;
  return queue_copy({static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes, bytes, bytes, 1, direction}, stream);
}
int cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t row_bytes,
                      std::size_t rows, int direction, void* stream) {
  if (const int code = failure_of("cudaMemcpy2DAsync")) return code;
  if (row_bytes > to_pitch || row_bytes > from_pitch) return kInvalid;
  return queue_copy({static_cast<std::byte*>(to), static_cast<const std::byte*>(from), to_pitch, from_pitch, row_bytes, rows, direction},
                    stream);
}

int cudaSetDevice(int device) {
  if (const int code = failure_of("cudaSetDevice")) return code;
  if (device < 0 || device >= kNumDevices) return kInvalid;
  current_device = device;
  return kSuccess;
}
int cudaGetDevice(int* device) {
  if (const int code = failure_of("cudaGetDevice")) return code;
  *device = current_device;
  return kSuccess;
}
int cudaThreadExchangeStreamCaptureMode(int* mode) {
  const int before = relaxed ? kRelaxed : 0;
  relaxed = *mode == kRelaxed;
  *mode = before;
  return kSuccess;
}
const char* cudaGetErrorName(int code) {
  switch (code) {
    case kInvalid: return "cudaErrorInvalidValue";
    case 2: return "cudaErrorMemoryAllocation";
    case kNotReady: return "cudaErrorNotReady";
    case kIllegalAddress: return "cudaErrorIllegalAddress";
    case 719: return "cudaErrorLaunchFailure";
    case kCapturing: return "cudaErrorStreamCaptureUnsupported";
    default: return "cudaErrorUnknown";
  }
}
const char* cudaGetErrorString(int code) {
  switch (code) {
    case 2: return "out of memory";
    case kIllegalAddress: return "an illegal memory access was encountered";
    case 719: return "unspecified launch failure";
    case kCapturing: return "operation not permitted when stream is capturing";
    default: return "a failure of the fake runtime";
  }
}

}  // extern "C"
