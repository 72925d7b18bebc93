#include <chrono>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include <sys/socket.h>

#include "check.h"
#include "engine_group.h"
#include "transport/address.h"

namespace engine_faults_test {

using namespace shoal_test;
using shoal::Engine;
using shoal::FrameType;
using shoal::GroupError;
using shoal::Kind;

// The message of the failure of an operation that one rank has begun.
std::string why_it_fails(Engine& engine, std::uint64_t handle) {
  try {
    CHECK(engine.wait(handle, kDeadlineS));
    return "it did not fail";
  } catch (const GroupError& error) {
    return error.what();
  }
}

TEST_OVER_EACH(engine_abort_frees_all_waiters_everywhere) {
  for (const Placement& placement : placements()) {
    Group group(placement);
    const int last = group.size() - 1;
    std::atomic<int> waiting{0};
    group.each([&](int rank, Engine& engine) {
      if (rank == last) {  // it never begins the operation
        while (waiting < last) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        engine.abort("the reason");
        CHECK(contains(engine.error(), "the reason"));
        return;
      }
      std::vector<float> x(50'000, 1.0f);
      const std::uint64_t first = submit(engine, Kind::all_reduce, x.data(), x.data(), x.size());
      const std::uint64_t second = submit(engine, Kind::broadcast, x.data(), x.data(), x.size(), shoal::Combine::sum, last);
      std::atomic<bool> ended{false};
      engine.then(second, [&] { ended = true; });
      waiting.fetch_add(1);
      std::thread other([&] { CHECK(contains(why_it_fails(engine, second), "the reason")); });
      CHECK(contains(why_it_fails(engine, first), "the reason"));
      other.join();
      while (!ended) std::this_thread::yield();
      CHECK(contains(CHECK_THROWS(GroupError, submit(engine, Kind::all_reduce, x.data(), x.data(), x.size())), "the reason"));
    });
  }
}

TEST_OVER_EACH(engine_all_ranks_abort_and_close_at_once) {
  for (int round = 0; round < 3; ++round) {
    for (const Placement& placement : placements()) {
      Group group(placement);
      group.each([&](int rank, Engine& engine) {
        std::vector<float> x(20'000, 1.0f);
        try {
          const std::uint64_t handle = submit(engine, Kind::all_reduce, x.data(), x.data(), x.size());
          if (rank % 2) engine.abort("each for itself");
          std::thread closing([&] { engine.close(); });
          try {
            engine.wait(handle, kDeadlineS);
          } catch (const GroupError&) {
          }
          closing.join();
        } catch (const GroupError&) {
          engine.close();
        }
      });
    }
  }
}

// A helper goes while sums are under way: the same bits come out, and no exception.
TEST_OVER_EACH(engine_a_helper_is_lost_in_the_middle) {
  for (const auto& [hosts, num_helpers] : {std::pair{std::vector<std::string>{"a", "b", "c"}, 2},
                                           {{"a", "b", "c"}, 1},
                                           {{"a", "a", "b", "b"}, 2}}) {
    const Placement placement{"", hosts, num_helpers};
    Group group(placement, [](shoal::EngineOptions& options) { options.min_window_bytes = options.window_bytes = 32 << 10; });
    constexpr std::size_t kCount = 60'000;
    constexpr int kOps = 30;
    std::vector<std::vector<float>> inputs;
    for (int rank = 0; rank < group.size(); ++rank) inputs.push_back(values<float>(kCount, static_cast<std::uint64_t>(rank)));
    const auto sum = in_promised_order(hosts, inputs, [](float a, float b) { return a + b; });
    std::atomic<int> ended{0};
    std::thread killer([&] {
      while (ended < 3) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      group.helpers.back()->stop();
      group.helpers.back().reset();
    });
    group.each([&](int rank, Engine& engine) {
      for (int k = 0; k < kOps; ++k) {
        auto x = inputs[static_cast<std::size_t>(rank)];
        run(engine, Kind::all_reduce, x.data(), x.data(), kCount);
        ended.fetch_add(1);
        CHECK(x == sum);
      }
    });
    killer.join();
    int lost = 0;
    group.each([&](int, Engine& engine) {
      CHECK_EQ(engine.error(), "");
      for (const std::string& event : engine.take_events()) {
        if (contains(event, "helper")) __atomic_fetch_add(&lost, 1, __ATOMIC_RELAXED);
      }
    });
    CHECK(lost > 0);
  }
}

// Rank 0 hears from rank 1 that the helper is lost, while its own connection stands and takes no more: what is queued
// there points into memory that the caller has back once the stand-ins have answered.
TEST(engine_what_is_queued_for_a_lost_helper_is_dropped) {
  std::atomic<bool> goes_on{false};
  std::set<int> heard;
  PlayedHelper* self = nullptr;
  PlayedHelper helper([&](int rank, const shoal::FrameHeader& header, const shoal::Payload&) {
    if (header.type != FrameType::push || !heard.insert(rank).second || heard.size() < 2) return;
    self->drop(1);
    while (!goes_on) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  self = &helper;
  Group group({"", {"a", "b"}, 0, {helper.port()}, {2}}, [](shoal::EngineOptions& options) {
    options.min_window_bytes = options.window_bytes = 64 << 20;
    options.peer_grace_s = 0.5;
  });
  group.each([&](int, Engine& engine) {
    std::vector<float> x(2'000'000, 1.0f);
    run(engine, Kind::all_reduce, x.data(), x.data(), x.size());
    CHECK(x == std::vector<float>(x.size(), 2.0f));
  });
  goes_on = true;
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the helper reads, and rank 0 could write
  group.each([&](int, Engine& engine) { CHECK_EQ(engine.error(), ""); });
}

// Its host answers, and its connections stand.
TEST(engine_a_helper_that_stands_still_is_replaced) {
  PlayedHelper helper([](int, const shoal::FrameHeader&, const shoal::Payload&) {});
  Group group({"", {"a", "b"}, 0, {helper.port()}}, [](shoal::EngineOptions& options) { options.helper_patience_s = 0.6; });
  group.each([&](int, Engine& engine) {
    std::vector<float> x(300'000, 1.0f);
    run(engine, Kind::all_reduce, x.data(), x.data(), x.size());
    CHECK(x == std::vector<float>(x.size(), 2.0f));
    CHECK(engine.lost_helpers() == std::vector<std::string>{"played"});
  });
}

// The helper has answered rank 0, which has all it wants and closes; rank 1 needs its result again.
TEST(engine_a_helper_is_lost_after_a_rank_has_left) {
  PlayedHelper* self = nullptr;
  shoal::BufferPool pool;
  shoal::WeightBudget budget;
  shoal::SumServer server(
      pool, budget, 2,
      [&](int rank, const shoal::FrameHeader& header, const shoal::Payload& payload) {
        if (rank == 0) self->send(rank, header, payload);
      },
      [](const shoal::SumServer::Conflict&) { check::fail(__FILE__, __LINE__, "a conflict"); });
  PlayedHelper helper([&](int rank, const shoal::FrameHeader& header, shoal::Payload payload) {
    if (header.type == FrameType::push) CHECK_EQ(server.contribute({rank, rank}, header, std::move(payload)), "");
    if (header.type != FrameType::goodbye || rank != 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // without its waiting, rank 0 is gone
    for (int each : {0, 1}) self->drop(each);
  });
  self = &helper;
  Group group({"", {"a", "b"}, 0, {helper.port()}, {2}});
  group.each([&](int, Engine& engine) {
    std::vector<float> x(1000, 1.0f);
    must_end(engine, submit(engine, Kind::all_reduce, x.data(), x.data(), x.size(), shoal::Combine::sum, 0, 5.0));
    CHECK(x == std::vector<float>(x.size(), 2.0f));
    engine.close();
  });
}

// A helper that keeps weights is lost between the confirmation of a copy and its answers: the rank that has the copy
// answers with weights that it has written over the sum it was sent.
TEST(engine_weights_of_a_copy_have_a_checksum_of_their_own) {
  PlayedHelper* self = nullptr;
  shoal::BufferPool pool;
  shoal::WeightBudget budget;
  shoal::SumServer server(
      pool, budget, 3,
      [&](int rank, const shoal::FrameHeader& header, const shoal::Payload& payload) { self->send(rank, header, payload); },
      [](const shoal::SumServer::Conflict&) { check::fail(__FILE__, __LINE__, "a conflict"); },
      [&](shoal::FrameHeader header, const shoal::Payload& sum) {
        header.type = FrameType::copy;
        self->send(0, header, sum);
        return 0;
      });
  PlayedHelper helper([&](int rank, const shoal::FrameHeader& header, shoal::Payload payload) {
    const bool copied = header.type == FrameType::copied;
    if (header.type == FrameType::push) CHECK_EQ(server.contribute({rank, rank}, header, std::move(payload)), "");
    if (copied && header.kind != Kind::update) CHECK_EQ(server.confirm_copy(rank, header), "");
    if (copied && header.kind == Kind::update) {
      for (int each : {0, 1, 2}) self->drop(each);
    }
  });
  self = &helper;
  Group group({"", {"a", "b", "c"}, 0, {helper.port()}, {3}});
  group.each([&](int rank, Engine& engine) {
    const auto served = [&](Kind kind, shoal::Element element, void* data, std::size_t count, std::uint32_t step, std::uint32_t rule) {
      shoal::OpSpec spec;
      spec.kind = kind;
      spec.element = element;
      spec.combine = kind == Kind::update ? shoal::Combine::sum : shoal::Combine::bor;
      spec.count = count;
      spec.input = spec.output = static_cast<std::byte*>(data);
      spec.timeout_s = kDeadlineS;
      spec.shape = {static_cast<std::int64_t>(count)};
      spec.step = step;
      spec.rule = rule;
      spec.copied = true;
      must_end(engine, engine.submit(spec));
    };
    struct {
      std::uint32_t head[4] = {1, 0, 1, 0};  // SGD
      double group[6] = {0.5, 0, 0, 0, 0, 0};
    } options;
    std::vector<float> weights(500, rank == 0 ? 2.0f : 0.0f), gradient(500, 1.0f);
    served(Kind::load, shoal::Element::int32, weights.data(), weights.size(), 0, 0);
    served(Kind::configure, shoal::Element::uint8, &options, sizeof options, 0, 0);
    served(Kind::update, shoal::Element::float32, gradient.data(), gradient.size(), 1, 1);
    CHECK(gradient == std::vector<float>(500, 0.5f));
  });
}

TEST_OVER_EACH(engine_all_helpers_are_lost_and_workers_do_not_serve) {
  Group group({"", {"a", "b"}, 1}, [](shoal::EngineOptions& options) { options.workers_serve = false; });
  group.each([&](int, Engine& engine) {
    std::vector<float> x(50'000, 1.0f);
    run(engine, Kind::all_reduce, x.data(), x.data(), x.size());
  });
  group.helpers[0].reset();
  group.each([&](int, Engine& engine) {
    std::vector<float> x(50'000, 1.0f);
    std::string why;
    try {
      why = why_it_fails(engine, submit(engine, Kind::all_reduce, x.data(), x.data(), x.size()));
    } catch (const GroupError& error) {
      why = error.what();
    }
    CHECK(contains(why, "no server is left"));
  });
}

// Who leaves early does no harm to those who want nothing more of it.
TEST_OVER_EACH(engine_one_rank_closes_early) {
  for (const Placement& placement : placements()) {
    Group group(placement);
    group.each([&](int rank, Engine& engine) {
      std::vector<float> x(30'000, 1.0f);
      run(engine, Kind::all_reduce, x.data(), x.data(), x.size());
      CHECK_EQ(x[0], static_cast<float>(group.size()));
      if (rank == 0) engine.close();
      else std::this_thread::sleep_for(std::chrono::milliseconds(10));
      CHECK_EQ(engine.error(), "");
    });
    group.each([&](int rank, Engine& engine) {
      if (rank == 0) return;
      std::vector<float> x(10, 1.0f);
      std::string why;
      try {
        why = why_it_fails(engine, submit(engine, Kind::all_reduce, x.data(), x.data(), x.size()));
      } catch (const GroupError& error) {
        why = error.what();
      }
      CHECK(contains(why, "rank 0 (127.0.0.1, pid 1000) has left the group"));
    });
  }
}

// Servers close as soon as their own part has ended, with results kept back for a rank that has not begun.
TEST_OVER_EACH(engine_results_kept_back_survive_the_servers_close) {
  for (const auto& hosts : {std::vector<std::string>{"a", "b", "c"}, {"a", "b", "b", "c"}}) {
    const int n = static_cast<int>(hosts.size());
    Group group({"", hosts}, [](shoal::EngineOptions& options) { options.unexpected_bytes = 16 << 10; });
    constexpr std::size_t kCount = 300'000;
    const auto sent = values<float>(kCount, 5);
    group.each([&](int rank, Engine& engine) {
      if (rank == n - 1) std::this_thread::sleep_for(std::chrono::milliseconds(300));
      auto x = rank == 0 ? sent : std::vector<float>(kCount);
      run(engine, Kind::broadcast, x.data(), x.data(), kCount);
      CHECK(x == sent);
      engine.close();
    });
  }
}

// Ranks 1 and 2 are rank 0's neighbours; rank 3 hears it from rank 2, of its own host.
TEST_OVER_EACH(engine_a_loss_is_told_to_ranks_that_are_no_neighbours) {
  Group group({"two hosts of two", {"a", "a", "b", "b"}});
  group.engines[0].reset();
  for (const int rank : {1, 2, 3}) {
    Engine& engine = group.engine(rank);
    await([&] { return !engine.error().empty() && !engine.lost_ranks().empty(); }, "the loss was told");
    CHECK(engine.lost_ranks() == std::vector<int>{0});
    CHECK(contains(engine.error(), "rank 0 (127.0.0.1, pid 1000) was lost: its engine was destroyed"));
  }
}

TEST_OVER_EACH(engine_destroyed_with_operations_under_way) {
  for (const Placement& placement : placements()) {
    const std::size_t n = placement.hosts.size();
    std::vector<float> x(100'000, 1.0f);
    std::vector<std::vector<float>> gathered(n, std::vector<float>(n * x.size())), sums(n, x);
    Group group(placement);
    const int last = group.size() - 1;
    for (int rank = 0; rank < last; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      submit(group.engine(rank), Kind::all_gather, x.data(), gathered[r].data(), x.size());
      submit(group.engine(rank), Kind::all_reduce, x.data(), sums[r].data(), x.size());
    }
    for (auto& engine : group.engines) engine.reset();
  }
}

TEST_OVER_EACH(engine_a_passed_deadline_names_who_is_missing) {
  Group group({"", {"a", "b"}});
  group.each([&](int rank, Engine& engine) {
    if (rank == 1) return;
    std::vector<float> x(10, 1.0f);
    const std::uint64_t handle = submit(engine, Kind::all_reduce, x.data(), x.data(), x.size(), shoal::Combine::sum, 0, 0.5);
    CHECK(!engine.wait(handle, 0.0));
    const std::string why = why_it_fails(engine, handle);
    CHECK(contains(why, "all_reduce of float32[10] (sum)"));
    CHECK(contains(why, "rank 1 (127.0.0.1, pid 1001) has not begun it"));
  });
}

TEST_OVER_EACH(engine_ranks_that_ask_for_different_things_are_named) {
  for (const Placement& placement : placements()) {
    Group group(placement);
    group.each([&](int rank, Engine& engine) {
      std::vector<float> x(200, 1.0f);
      const std::size_t count = rank + 1 == group.size() ? 200 : 100;
      std::string why;
      try {
        why = why_it_fails(engine, submit(engine, Kind::all_reduce, x.data(), x.data(), count));
      } catch (const GroupError& error) {
        why = error.what();
      }
      CHECK(contains(why, "float32[100]"));
      CHECK(contains(why, "float32[200]"));
    });
  }
}

TEST_OVER_EACH(engine_what_cannot_be_is_refused_at_once) {
  Group group({"", {"a", "b"}});
  std::vector<float> x(10, 1.0f);
  for (auto combine : {shoal::Combine::band, shoal::Combine::bor, shoal::Combine::bxor}) {
    const std::string why = CHECK_THROWS(std::invalid_argument, submit(group.engine(0), Kind::all_reduce, x.data(), x.data(), x.size(), combine));
    CHECK(contains(why, "needs integers"));
  }
  for (int root : {-1, 2}) {
    for (Kind kind : {Kind::broadcast, Kind::reduce}) {
      CHECK(contains(CHECK_THROWS(std::invalid_argument, submit(group.engine(0), kind, x.data(), x.data(), x.size(), shoal::Combine::sum, root)), "root"));
    }
  }
  std::vector<std::int32_t> whole(10, 1);
  const auto avg = [&] { return submit(group.engine(0), Kind::all_reduce, whole.data(), whole.data(), whole.size(), shoal::Combine::avg); };
  CHECK(contains(CHECK_THROWS(std::invalid_argument, avg()), "an average needs floating-point elements, not int32"));
  group.each([&](int, Engine& engine) {  // the group is none the worse for it
    std::vector<float> y(10, 1.0f);
    run(engine, Kind::all_reduce, y.data(), y.data(), y.size());
    CHECK_EQ(y[9], 2.0f);
  });
}

// Memory that is read and written must be the same element's, or a later chunk reads what an earlier one wrote.
TEST_OVER_EACH(engine_outputs_that_overlap_their_input_askew_are_refused) {
  for (const std::vector<std::string>& hosts : {std::vector<std::string>{"a", "b"}, {"a", "a"}}) {
    Group group({"", hosts});
    group.each([&](int rank, Engine& engine) {
      std::vector<float> x(40, 1.0f);
      const auto refused = [&](Kind kind, const float* input, float* output) {
        const std::string why = CHECK_THROWS(std::invalid_argument, submit(engine, kind, input, output, 10));
        CHECK(contains(why, "overlaps the input"));
      };
      const std::ptrdiff_t own = 10 * rank, others = 10 * (1 - rank);
      for (Kind kind : {Kind::all_reduce, Kind::reduce}) {
        refused(kind, x.data(), x.data() + 1);
        refused(kind, x.data() + 9, x.data());
      }
      refused(Kind::reduce_scatter, x.data(), x.data() + others);
      refused(Kind::reduce_scatter, x.data(), x.data() + own + 1);
      refused(Kind::reduce_scatter, x.data() + 9, x.data());
      refused(Kind::all_gather, x.data() + others, x.data());
      refused(Kind::all_gather, x.data() + own + 1, x.data());
      run(engine, Kind::reduce_scatter, x.data(), x.data() + own, 10);  // in place
      CHECK_EQ(x[static_cast<std::size_t>(own)], 2.0f);
      run(engine, Kind::reduce_scatter, x.data() + 20, x.data(), 10);  // beside each other
      CHECK_EQ(x[0], 2.0f);
      run(engine, Kind::all_gather, x.data() + own, x.data(), 10);
      CHECK_EQ(x[19], x[9]);
    });
  }
}

TEST(engine_options_out_of_range_are_refused_by_name) {
  const auto refused = [](const std::string& name, const std::function<void(shoal::EngineOptions&)>& change) {
    shoal::EngineOptions options;
    change(options);
    CHECK(contains(CHECK_THROWS(std::invalid_argument, shoal::Engine(options)), name + " is "));
  };
  refused("shared_chunk_bytes", [](shoal::EngineOptions& options) { options.shared_chunk_bytes = 0; });
  for (std::size_t bytes : {std::size_t{64}, std::size_t{1000}, std::size_t{65'000}, std::size_t{100'000},
                            std::size_t{32} << 20, ~std::size_t{127}}) {
    refused("chunk_bytes", [&](shoal::EngineOptions& options) { options.chunk_bytes = bytes; });
    refused("shared_chunk_bytes", [&](shoal::EngineOptions& options) { options.shared_chunk_bytes = bytes; });
  }
  for (std::size_t slots : {std::size_t{0}, std::size_t{65}, std::size_t{400}, ~std::size_t{0}}) {
    refused("num_slots", [&](shoal::EngineOptions& options) { options.num_slots = slots; });
  }
  for (int connections : {-1, 0, 65}) {
    refused("connections_per_peer", [&](shoal::EngineOptions& options) { options.connections_per_peer = connections; });
  }
}

TEST(engine_options_at_the_ends_of_their_ranges_work) {
  for (std::size_t chunk : {std::size_t{128}, std::size_t{8} << 20}) {
    for (std::size_t slots : {std::size_t{1}, std::size_t{64}}) {
      if (chunk > 128 && slots > 1) continue;  // half a gigabyte of shared memory
      for (const std::vector<std::string>& hosts : {std::vector<std::string>{"a", "a"}, {"a", "a", "b"}}) {
        Group group({"", hosts}, [&](shoal::EngineOptions& options) {
          options.chunk_bytes = options.shared_chunk_bytes = chunk;
          options.num_slots = slots;
        });
        group.each([&](int, Engine& engine) {
          for (std::size_t count : {std::size_t{1000}, std::size_t{5} << 18}) {
            if (chunk == 128 && count > 1000) continue;
            std::vector<double> x(count, 1.0);
            run(engine, Kind::all_reduce, x.data(), x.data(), x.size());
            CHECK(x == std::vector<double>(count, static_cast<double>(group.size())));
          }
        });
      }
    }
  }
}

// ---- strangers ------------------------------------------------------------------------------------------

int knock(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const shoal::SocketAddress to("127.0.0.1", port);
  CHECK_EQ(connect(fd, to.get(), to.size), 0);
  return fd;
}

TEST_OVER_EACH(engine_strangers_do_no_harm_while_it_runs) {
  Group group({"", {"a", "b"}, 1});
  std::atomic<bool> over{false};
  const std::vector<int> ports{group.engine(0).port(), group.engine(1).port(), group.helpers[0]->port()};
  std::thread stranger([&] {
    std::mt19937_64 random(1);
    for (int k = 0; k < 60 || !over; ++k) {
      const int fd = knock(ports[static_cast<std::size_t>(k) % ports.size()]);
      shoal::Bytes bytes = shoal::random_bytes(1 + random() % 300);
      if (k % 2) {  // half of them begin well
        const shoal::Bytes hello = shoal::Bytes{'S', 'H', 'O', 'A', 'L', 0, 0, 4};
        std::copy_n(hello.begin(), std::min(hello.size(), bytes.size()), bytes.begin());
      }
      [[maybe_unused]] const ssize_t sent = send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      close(fd);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  group.each([&](int, Engine& engine) {
    for (int k = 0; k < 50; ++k) {
      std::vector<float> x(10'000, 1.0f);
      run(engine, Kind::all_reduce, x.data(), x.data(), x.size());
      CHECK_EQ(x[0], 2.0f);
    }
  });
  over = true;
  stranger.join();
  CHECK(group.engine(0).counters().at("strangers_dropped") > 0);
}

TEST_OVER_EACH(engine_a_wrong_secret_is_refused_and_said) {
  shoal::EngineOptions options;
  options.size = 2;
  options.group = "g";
  options.secret = kSecret;
  options.network_threads = carrier.threads;
  options.fabric = carrier.fabric;
  Engine first(options);
  options.rank = 1;
  options.secret = {'o', 't', 'h', 'e', 'r'};
  Engine second(options);
  const std::vector<shoal::PeerInfo> peers{{"a", "127.0.0.1", first.port(), 0, 1}, {"b", "127.0.0.1", second.port(), 1, 2}};
  const int caller = peers[0].place().name() > peers[1].place().name() ? 0 : 1;
  on_threads(2, [&](int rank) {
    const std::string why = CHECK_THROWS(std::runtime_error, (rank ? second : first).connect(peers, {}, {0, 1}, "unused", 1.0));
    CHECK(contains(why, rank == caller ? "does not know the job's secret" : "did not connect to rank"));
  });
}

}  // namespace engine_faults_test
