// Records which functions of the core run for one all_reduce of one chunk, from the C interface until its wait returns.
//
// Two engines in one process, each on a host of its own. Rank 1 serves the chunk and has contributed; what is recorded is
// the way of rank 0's contribution to it, and of the sum back. Compiled with -finstrument-functions by one_gradient.py.
// Prints "<thread> <address of the function> <1: called, 0: returned>", one a line.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "c_api/group.h"
#include "engine/engine.h"

#define UNSEEN __attribute__((no_instrument_function))

namespace {

struct Event {
  unsigned thread;
  void* function;
  bool called;
};

constexpr std::size_t kMaxEvents = 1 << 20;
Event events[kMaxEvents];
std::size_t num_events = 0;  // by the compiler's atomic operations: std::atomic's functions would be recorded too
bool recording = false;
unsigned num_threads = 0;
thread_local unsigned thread_number = ~0u;

UNSEEN void record(void* function, bool called) {
  if (!__atomic_load_n(&recording, __ATOMIC_RELAXED)) return;
  if (thread_number == ~0u) thread_number = __atomic_fetch_add(&num_threads, 1, __ATOMIC_RELAXED);
  const std::size_t at = __atomic_fetch_add(&num_events, 1, __ATOMIC_RELAXED);
  if (at < kMaxEvents) events[at] = {thread_number, function, called};
}

constexpr double kTimeoutS = 30;
constexpr std::size_t kCount = 1024;

UNSEEN void fail(const char* what) {
  std::fprintf(stderr, "one_gradient: %s\n", what);
  std::exit(1);
}

UNSEEN shoal_handle submit(shoal_group* group, float* data) {
  shoal_operation operation{};
  operation.struct_size = sizeof operation;
  operation.kind = SHOAL_ALL_REDUCE;
  operation.dtype = SHOAL_FLOAT32;
  operation.input = data;
  operation.output = data;
  operation.count = kCount;
  shoal_handle handle = SHOAL_NO_HANDLE;
  if (shoal_submit(group, &operation, 1, &handle) != SHOAL_SUCCESS) fail(shoal_last_error());
  return handle;
}

UNSEEN void wait(shoal_group* group, shoal_handle handle) {
  if (shoal_wait(group, handle, kTimeoutS) != SHOAL_SUCCESS) fail(shoal_last_error());
}

}  // namespace

extern "C" {
UNSEEN void __cyg_profile_func_enter(void* function, void*) { record(function, true); }
UNSEEN void __cyg_profile_func_exit(void* function, void*) { record(function, false); }
}

int main() {
  std::vector<std::shared_ptr<shoal::Engine>> engines;
  std::vector<shoal::PeerInfo> peers;
  for (int rank = 0; rank < 2; ++rank) {
    shoal::EngineOptions options;
    options.rank = rank;
    options.size = 2;
    options.group = "g";
    options.secret = {'s'};
    options.share_connections = false;
    engines.push_back(std::make_shared<shoal::Engine>(options));
    peers.push_back({rank ? "b" : "a", "127.0.0.1", engines.back()->port(), rank, 1000 + rank});
  }
  std::thread other([&] { engines[1]->connect(peers, {}, {1}, "one-gradient", kTimeoutS); });
  engines[0]->connect(peers, {}, {1}, "one-gradient", kTimeoutS);
  other.join();
  std::vector<shoal_group*> groups;
  for (int rank = 0; rank < 2; ++rank) groups.push_back(shoal::share_engine(engines[static_cast<std::size_t>(rank)], rank, 2));
  std::vector<float> first(kCount, 1), second(kCount, 2);
  for (const bool recorded : {false, true}) {  // the first one may differ
    const shoal_handle served = submit(groups[1], second.data());
    while (engines[1]->counters().at("held_bytes") == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    __atomic_store_n(&recording, recorded, __ATOMIC_RELAXED);
    wait(groups[0], submit(groups[0], first.data()));
    __atomic_store_n(&recording, false, __ATOMIC_RELAXED);
    wait(groups[1], served);
  }
  if (num_events > kMaxEvents) fail("too many calls to record");
  for (std::size_t k = 0; k < num_events; ++k) std::printf("%u %p %d\n", events[k].thread, events[k].function, events[k].called);
  std::fflush(stdout);
  for (const auto& engine : engines) engine->close();
}
