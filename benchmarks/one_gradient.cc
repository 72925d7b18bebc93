// Records which functions of the process group and of the core run for one all_reduce of one chunk, from torch's call until
// its work's wait returns.
//
// Two engines in one process, each on a host of its own. Rank 1 serves the chunk and has contributed; what is recorded is
// the way of rank 0's contribution to it, and of the sum back. Compiled with -finstrument-functions by one_gradient.py, and
// loaded by a Python with torch. Prints "<thread> <address of the function> <1: called, 0: returned>", one a line.
#include <dlfcn.h>

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
#include "group.cc"

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
constexpr std::chrono::seconds kTimeout{30};
constexpr std::int64_t kCount = 1024;

UNSEEN void fail(const char* what) {
  std::fprintf(stderr, "one_gradient: %s\n", what);
  std::exit(1);
}

}  // namespace

extern "C" {
UNSEEN void __cyg_profile_func_enter(void* function, void*) { record(function, true); }
UNSEEN void __cyg_profile_func_exit(void* function, void*) { record(function, false); }
}

extern "C" UNSEEN void record_gradient() {
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
  std::vector<c10::intrusive_ptr<c10d::Backend>> groups;
  std::vector<std::vector<at::Tensor>> gradients;
  for (int rank = 0; rank < 2; ++rank) {
    auto* group = shoal::share_engine(engines[static_cast<std::size_t>(rank)], rank, 2);
    const py::gil_scoped_acquire gil;
    groups.push_back(shoal_torch::create(py::none(), py::none(), reinterpret_cast<std::uintptr_t>(group), rank, 2, kTimeout));
    gradients.push_back({at::ones({kCount})});
  }
  for (const bool recorded : {false, true}) {  // the first one may differ
    const auto served = groups[1]->allreduce(gradients[1]);
    while (engines[1]->counters().at("held_bytes") == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    __atomic_store_n(&recording, recorded, __ATOMIC_RELAXED);
    groups[0]->allreduce(gradients[0])->wait();
    __atomic_store_n(&recording, false, __ATOMIC_RELAXED);
    served->wait();
  }
  if (num_events > kMaxEvents) fail("too many calls to record");
  Dl_info library;
  if (!dladdr(reinterpret_cast<void*>(&record_gradient), &library)) fail("its address is not known");
  for (std::size_t k = 0; k < num_events; ++k) {
    const auto address = static_cast<char*>(events[k].function) - static_cast<char*>(library.dli_fbase);
    std::printf("%u 0x%tx %d\n", events[k].thread, address, events[k].called);
  }
  std::fflush(stdout);
  std::_Exit(0);  // Python's objects of the groups have not to be destroyed
}
