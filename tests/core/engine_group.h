// Runs a whole group in one process: engines as threads, over loopback and shared memory, with helper hosts, on each
// transport in turn.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include <unistd.h>

#include "check.h"
#include "engine/engine.h"
#include "engine/helper.h"

namespace shoal_test {

inline constexpr double kDeadlineS = 30;  // every operation takes less than a second; reached only by a hang

inline const shoal::Bytes kSecret = {'s', 'e', 'c', 'r', 'e', 't'};

inline std::uint64_t count_of(const std::map<std::string, std::uint64_t>& counters, const char* name) {
  return counters.at(name);
}

inline void await(const std::function<bool()>& condition, const char* what) {
  for (const auto until = std::chrono::steady_clock::now() + std::chrono::duration<double>(kDeadlineS);
       std::chrono::steady_clock::now() < until; std::this_thread::sleep_for(std::chrono::milliseconds(10))) {
    if (condition()) return;
  }
  check::fail(__FILE__, __LINE__, std::string(what) + " did not come true in time");
}

// A transport for a group's chunks.
struct Carrier {
  std::string name;
  std::string fabric;  // EngineOptions.fabric
  std::uint64_t shuffle = 0;
  int threads = 1;  // of a process
};

// The thread sanitizer sees processes of several network threads here, and of one in all other tests. libfabric's part
// has one thread: the sanitizer, which it costs most, only sees the tests in ofi_test.cc.
inline const std::vector<Carrier>& carriers() {
  static const std::vector<Carrier> all = {
#if defined(__SANITIZE_THREAD__)
      {"tcp, 3 threads", "", 0, 3},
#else
      {"tcp", ""},
#endif
#if defined(SHOAL_HAS_LIBFABRIC) && !defined(__SANITIZE_THREAD__)
      {"ofi, shuffled", "tcp;ofi_rxm", 7},
#endif
  };
  return all;
}

// An endpoint of ofi_rxm fills 16 MiB of buffers, 40 ms of processor time, and tests open a hundred.
inline const int small_buffers = setenv("FI_OFI_RXM_BUFFER_SIZE", "1024", 0);

inline Carrier carrier;  // of the groups that are made now

struct Over {
  explicit Over(const Carrier& of_now) { carrier = of_now; }
  ~Over() { carrier = {}; }
};

struct RegisteredForEach {
  RegisteredForEach(const std::string& name, void (*run)()) {
    for (const Carrier& each : carriers()) {
      check::tests().push_back({name + " [" + each.name + "]", [each, run] {
                                  const Over over(each);
                                  run();
                                }});
    }
  }
};

// Runs call(0) ... call(n - 1), each on a thread of its own. The first exception comes out.
inline void on_threads(int n, const std::function<void(int)>& call) {
  std::vector<std::exception_ptr> errors(static_cast<std::size_t>(n));
  std::vector<std::thread> threads;
  for (int k = 0; k < n; ++k) {
    threads.emplace_back([&, k] {
      try {
        call(k);
      } catch (...) {
        errors[static_cast<std::size_t>(k)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const auto& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

template <class T>
constexpr shoal::Element element_of() {
  if constexpr (std::is_same_v<T, float>) return shoal::Element::float32;
  else if constexpr (std::is_same_v<T, double>) return shoal::Element::float64;
  else if constexpr (std::is_same_v<T, std::int32_t>) return shoal::Element::int32;
  else if constexpr (std::is_same_v<T, std::int64_t>) return shoal::Element::int64;
  else return shoal::Element::uint8;
}

// A helper that the test plays: all may join, and what a rank sends goes to a function, on the network thread.
class PlayedHelper : private shoal::Sink {
 public:
  using Hear = std::function<void(int rank, const shoal::FrameHeader&, shoal::Payload)>;

  explicit PlayedHelper(Hear hear) : hear_(std::move(hear)), transport_({"127.0.0.1", 0, kSecret}, *this) { transport_.start(); }
  ~PlayedHelper() override { transport_.stop(); }

  int port() const { return transport_.port(); }
  // On the network thread. The rank sees its connections close.
  void drop(int rank) SHOAL_NO_ANALYSIS { transport_.drop(peer_of_.at(rank)); }
  void send(int rank, shoal::FrameHeader header, const shoal::Payload& payload) SHOAL_NO_ANALYSIS {
    header.group = group_;
    transport_.send(peer_of_.at(rank), header, payload);
  }

 private:
  int on_introduction(const shoal::Introduction& who, std::string&) override {
    return number_of_.try_emplace(who.name, static_cast<int>(number_of_.size())).first->second;
  }
  void on_connected(int) override {}
  void on_frame(int peer, const shoal::FrameHeader& header, shoal::Payload payload) override SHOAL_NO_ANALYSIS {
    if (header.type == shoal::FrameType::join) {
      const int rank = shoal::read_join(header, payload).rank;
      rank_of_[peer] = rank;
      peer_of_[rank] = peer;
      group_ = header.group;
      return transport_.send(peer, header, std::move(payload));
    }
    hear_(rank_of_.at(peer), header, std::move(payload));
  }
  void on_down(int, const std::string&) override {}
  void on_tick() override {}
  void on_error(const std::string& what) override { check::fail(__FILE__, __LINE__, what); }

  const Hear hear_;
  std::map<std::string, int> number_of_;
  std::map<int, int> rank_of_, peer_of_;
  std::uint32_t group_ = 0;
  shoal::TcpTransport transport_;
};

struct Placement {
  std::string name;
  std::vector<std::string> hosts;  // of each rank
  int num_helpers = 0;
  std::vector<int> played = {};   // ports of the helpers that the test plays
  std::vector<int> pattern = {};  // empty: every server in turn
};

inline std::vector<Placement> placements() {
  if (!carrier.fabric.empty()) return {{"two hosts", {"a", "b"}}, {"a host of two, a helper", {"a", "a", "b"}, 1}};
  return {{"two hosts", {"a", "b"}},
          {"one host", {"a", "a"}},
          {"two hosts of two", {"a", "a", "b", "b"}},
          {"three and one", {"a", "a", "a", "b"}},
          {"a host with a gap", {"a", "b", "a"}},
          {"three hosts, two helpers", {"a", "b", "c"}, 2},
          {"a host of two, a helper", {"a", "a", "b"}, 1},
          {"eight ranks", {"a", "a", "b", "c", "c", "c", "b", "d"}}};
}

class Group {
 public:
  using Tweak = std::function<void(shoal::EngineOptions&)>;

  explicit Group(const Placement& placement, const Tweak& tweak = {}, const std::string& name = "g") {
    static std::atomic<int> number{0};
    const std::string segment = "test-" + std::to_string(getpid()) + "-" + std::to_string(number++);
    const int n = static_cast<int>(placement.hosts.size());
    std::vector<shoal::HelperInfo> helper_infos;
    for (int k = 0; k < placement.num_helpers; ++k) {
      helpers.push_back(std::make_unique<shoal::HelperServer>("127.0.0.1", 0, kSecret, 0, carrier.fabric, carrier.shuffle, 4096, 0, carrier.threads));
      helpers.back()->start();
      helper_infos.push_back({"127.0.0.1", helpers.back()->port(), "helper" + std::to_string(k)});
    }
    for (int port : placement.played) helper_infos.push_back({"127.0.0.1", port, "played"});
    std::vector<shoal::PeerInfo> peers;
    for (int rank = 0; rank < n; ++rank) {
      shoal::EngineOptions options;
      options.rank = rank;
      options.size = n;
      options.group = name;
      options.secret = kSecret;
      options.network_threads = carrier.threads;
      options.fabric = carrier.fabric;
      options.shuffle = carrier.shuffle ? carrier.shuffle + static_cast<std::uint64_t>(rank) : 0;
      if (tweak) tweak(options);
      engines.push_back(std::make_unique<shoal::Engine>(options));
      peers.push_back({placement.hosts[static_cast<std::size_t>(rank)], options.address, engines.back()->port(), rank, 1000 + rank, engines.back()->public_key()});
    }
    std::vector<int> pattern = placement.pattern;
    for (int server = 0; placement.pattern.empty() && server < n + static_cast<int>(helper_infos.size()); ++server) pattern.push_back(server);
    each([&](int, shoal::Engine& engine) { engine.connect(peers, helper_infos, pattern, segment, kDeadlineS); });
  }

  int size() const { return static_cast<int>(engines.size()); }
  shoal::Engine& engine(int rank) { return *engines[static_cast<std::size_t>(rank)]; }

  // Every rank's part, each on a thread of its own.
  void each(const std::function<void(int, shoal::Engine&)>& call) {
    on_threads(size(), [&](int rank) { call(rank, engine(rank)); });
  }

  void close() {
    each([](int, shoal::Engine& engine) { engine.close(); });
  }

  std::vector<std::unique_ptr<shoal::HelperServer>> helpers;
  std::vector<std::unique_ptr<shoal::Engine>> engines;
};

template <class T>
std::uint64_t submit(shoal::Engine& engine, shoal::Kind kind, const T* input, T* output, std::size_t count,
                     shoal::Combine combine = shoal::Combine::sum, int root = 0, double timeout_s = kDeadlineS) {
  shoal::OpSpec spec;
  spec.kind = kind;
  spec.element = element_of<T>();
  spec.combine = combine;
  spec.count = count;
  spec.root = root;
  spec.input = reinterpret_cast<const std::byte*>(input);
  spec.output = reinterpret_cast<std::byte*>(output);
  spec.timeout_s = timeout_s;
  spec.shape = {static_cast<std::int64_t>(count)};
  return engine.submit(spec);
}

inline void must_end(shoal::Engine& engine, std::uint64_t handle) {
  if (!engine.wait(handle, 2 * kDeadlineS)) throw std::runtime_error("an operation hangs");
}

template <class T>
void run(shoal::Engine& engine, shoal::Kind kind, const T* input, T* output, std::size_t count,
         shoal::Combine combine = shoal::Combine::sum, int root = 0) {
  must_end(engine, submit(engine, kind, input, output, count, combine, root));
}

// Values over many powers of two: another order of addition gives other bits.
template <class T>
std::vector<T> values(std::size_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<T> out(count);
  for (T& x : out) {
    if constexpr (std::is_floating_point_v<T>) {
      x = std::ldexp(static_cast<T>(static_cast<std::int64_t>(random() >> 32) - (1LL << 31)), static_cast<int>(random() % 24) - 40);
    } else {
      x = static_cast<T>(random());
    }
  }
  return out;
}

// The promised order: the ranks of a host one after the other, then the hosts by their lowest rank.
template <class T, class Op>
std::vector<T> in_promised_order(const std::vector<std::string>& hosts, const std::vector<std::vector<T>>& inputs, Op op) {
  std::vector<std::string> names;
  std::vector<std::vector<T>> partial;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto at = static_cast<std::size_t>(std::find(names.begin(), names.end(), hosts[rank]) - names.begin());
    if (at == names.size()) {
      names.push_back(hosts[rank]);
      partial.push_back(inputs[rank]);
      continue;
    }
    for (std::size_t i = 0; i < inputs[rank].size(); ++i) partial[at][i] = op(partial[at][i], inputs[rank][i]);
  }
  std::vector<T> total = partial[0];
  for (std::size_t host = 1; host < partial.size(); ++host) {
    for (std::size_t i = 0; i < total.size(); ++i) total[i] = op(total[i], partial[host][i]);
  }
  return total;
}

}  // namespace shoal_test

// A test that runs once over each transport.
#define TEST_OVER_EACH(name)                                                        \
  static void test_##name();                                                        \
  static const shoal_test::RegisteredForEach registered_##name(#name, test_##name); \
  static void test_##name()
