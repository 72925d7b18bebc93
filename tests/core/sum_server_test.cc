#include "engine/sum_server.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"
#include "engine/types.h"

namespace sum_server_test {

using shoal::BufferPool;
using shoal::Combine;
using shoal::Element;
using shoal::FrameHeader;
using shoal::FrameType;
using shoal::Payload;
using shoal::SumServer;

struct Answered {
  int peer;
  FrameHeader header;
  std::vector<float> values;
};

// A server for a group of hosts; peer p contributes for host p modulo 10.
struct Fixture {
  explicit Fixture(int hosts = 2) : num_hosts(hosts) {}

  int num_hosts;
  BufferPool pool;
  shoal::WeightBudget budget;
  std::vector<Answered> answers;
  std::vector<SumServer::Conflict> conflicts;
  SumServer server{pool, budget, num_hosts,
                   [this](int peer, const FrameHeader& header, const Payload& payload) {
                     std::vector<float> values(payload.size() / sizeof(float));
                     if (!values.empty()) std::memcpy(values.data(), payload.data(), values.size() * sizeof(float));
                     answers.push_back({peer, header, std::move(values)});
                   },
                   [this](const SumServer::Conflict& conflict) { conflicts.push_back(conflict); }};

  std::string contribute(int peer, const FrameHeader& header, Payload payload) {
    return server.contribute({peer, peer % 10}, header, std::move(payload));
  }
  std::string supply(int peer, const FrameHeader& header, Payload payload) {
    return server.supply({peer, peer % 10}, header, std::move(payload));
  }
};

FrameHeader header_of(int host, int needed, std::uint64_t seq = 3, std::uint64_t chunk = 4) {
  FrameHeader header;
  header.type = FrameType::push;
  header.host = static_cast<std::uint16_t>(host);
  header.needed = static_cast<std::uint16_t>(needed);
  header.seq = seq;
  header.chunk = chunk;
  header.signature = 99;
  return header;
}

Payload payload_of(std::vector<float> values) {
  const auto owner = std::make_shared<std::vector<float>>(std::move(values));
  return {reinterpret_cast<const std::byte*>(owner->data()), owner->size() * sizeof(float), owner};
}

// 1e8 + 1 - 1e8 is 0 in fp32, any order that adds the large ones first gives 1.
TEST(sum_server_adds_in_host_order_whatever_arrives_first) {
  const std::vector<float> values{1e8f, 1.0f, -1e8f, 3.0f};
  const float expected = ((values[0] + values[1]) + values[2]) + values[3];
  std::vector<int> order{0, 1, 2, 3};
  do {
    Fixture f(4);
    for (int host : order) {
      CHECK(f.answers.empty());
      CHECK_EQ(f.contribute(10 + host, header_of(host, 4), payload_of({values[static_cast<std::size_t>(host)]})), "");
    }
    CHECK_EQ(f.answers.size(), 4u);
    for (const Answered& each : f.answers) {
      CHECK(each.values == std::vector<float>{expected});
      CHECK(each.header.type == FrameType::result);
      CHECK_EQ(static_cast<int>(each.header.host), each.peer - 10);
    }
    CHECK_EQ(f.server.held_bytes(), 0u);
    CHECK_EQ(f.server.num_summed(), 1u);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(sum_server_a_duplicate_counts_once) {
  Fixture f;
  for (int k = 0; k < 3; ++k) CHECK_EQ(f.contribute(0, header_of(0, 2), payload_of({5.0f})), "");
  CHECK(f.answers.empty());
  CHECK_EQ(f.server.held_bytes(), sizeof(float));
  f.contribute(1, header_of(1, 2), payload_of({2.0f}));
  CHECK_EQ(f.answers.size(), 2u);
  CHECK(f.answers[1].values == std::vector<float>{7.0f});
}

TEST(sum_server_late_contributors_are_answered_after_a_redo) {
  Fixture f;
  FrameHeader again = header_of(0, 2);
  again.redo = 1;
  f.contribute(0, again, payload_of({1.0f}));
  f.contribute(1, header_of(1, 2), payload_of({2.0f}));
  CHECK_EQ(f.answers.size(), 2u);
  f.contribute(1, header_of(1, 2), payload_of({2.0f}));
  CHECK_EQ(f.answers.size(), 3u);
  CHECK(f.answers[2].peer == 1 && f.answers[2].values == std::vector<float>{3.0f});
  f.server.forget_below(3);
  f.contribute(0, again, payload_of({1.0f}));
  CHECK_EQ(f.answers.size(), 4u);
  f.server.forget_below(4);  // now it begins again
  f.contribute(0, again, payload_of({1.0f}));
  CHECK_EQ(f.answers.size(), 4u);
}

// A worker that has the sum supplies it: those who wait and those who come later have the same bits.
TEST(sum_server_supplied_results_go_to_waiting_and_late_contributors) {
  Fixture f(3);
  const auto again = [](int host) {
    FrameHeader header = header_of(host, 3);
    header.redo = 1;
    return header;
  };
  f.contribute(2, again(2), payload_of({1.0f, 1.0f}));
  FrameHeader supply = again(0);
  supply.type = FrameType::supply;
  CHECK_EQ(f.supply(0, supply, payload_of({7.0f, 8.0f})), "");
  CHECK_EQ(f.supply(0, supply, payload_of({7.0f, 8.0f})), "");
  CHECK_EQ(f.answers.size(), 1u);
  CHECK_EQ(f.answers[0].peer, 2);
  CHECK_EQ(static_cast<int>(f.answers[0].header.host), 2);
  f.contribute(1, again(1), payload_of({1.0f, 1.0f}));
  CHECK_EQ(f.answers.size(), 2u);
  CHECK_EQ(f.answers[1].peer, 1);
  for (const Answered& each : f.answers) {
    CHECK(each.header.type == FrameType::result);
    CHECK((each.values == std::vector<float>{7.0f, 8.0f}));
  }
  CHECK_EQ(f.server.held_bytes(), 0u);
  CHECK_EQ(f.supply(1, again(1), payload_of({7.0f, 9.0f})), "");
  REQUIRE(f.conflicts.size() == 1);  // of two ranks that have the sum, one lies
  CHECK(f.conflicts[0].first.peer == 0 && f.conflicts[0].second.peer == 1);
}

TEST(sum_server_a_supply_before_any_contribution) {
  Fixture f;
  FrameHeader again = header_of(0, 2), other = header_of(1, 2);
  again.redo = other.redo = 1;
  CHECK_EQ(f.supply(0, again, payload_of({4.0f})), "");
  CHECK(f.answers.empty());
  f.contribute(0, again, payload_of({1.0f}));
  f.contribute(1, other, payload_of({1.0f}));
  CHECK_EQ(f.answers.size(), 2u);
}

// Contributions that were not sent again say that this is the chunk's own server, which has no result but its own.
TEST(sum_server_a_supply_of_what_it_sums_itself_is_a_lie) {
  for (const bool before : {true, false}) {
    Fixture f;
    if (!before) f.contribute(0, header_of(0, 2), payload_of({1.0f}));
    CHECK_EQ(f.supply(1, header_of(1, 2), payload_of({1e6f})), "");
    if (before) f.contribute(0, header_of(0, 2), payload_of({1.0f}));
    CHECK(f.answers.empty());
    REQUIRE(f.conflicts.size() == 1);
    CHECK(f.conflicts[0].first.peer == 1 && f.conflicts[0].first.sent == "the result of a lost server");
    CHECK(f.conflicts[0].second.peer == 0 && f.conflicts[0].second.sent == "1 elements of float32 (all_reduce, sum) to sum");
  }
}

TEST(sum_server_another_signature_names_both_senders) {
  Fixture f;
  f.contribute(10, header_of(0, 2), payload_of({1.0f}));
  FrameHeader other = header_of(1, 2);
  other.signature = 100;
  CHECK_EQ(f.contribute(11, other, payload_of({1.0f})), "");
  CHECK_EQ(f.supply(11, other, payload_of({1.0f})), "");
  CHECK_EQ(f.conflicts.size(), 2u);
  for (const SumServer::Conflict& each : f.conflicts) {
    CHECK(each.seq == 3 && each.chunk == 4);
    CHECK(each.first.peer == 10 && each.first.signature == 99 && each.second.peer == 11 && each.second.signature == 100);
  }
  CHECK(f.answers.empty());
}

TEST(sum_server_contributions_that_do_not_fit_name_both_senders) {
  Fixture f;
  CHECK_EQ(f.contribute(10, header_of(0, 2), payload_of({1.0f})), "");
  CHECK_EQ(f.contribute(11, header_of(1, 2), payload_of({1.0f, 2.0f})), "");
  FrameHeader other = header_of(1, 2);
  other.element = other.input = Element::int32;
  CHECK_EQ(f.contribute(11, other, payload_of({1.0f})), "");
  CHECK_EQ(f.supply(11, header_of(1, 2), payload_of({1.0f, 2.0f})), "");
  REQUIRE(f.conflicts.size() == 3);
  CHECK_EQ(f.conflicts[0].first.sent, "1 elements of float32 (all_reduce, sum)");
  CHECK_EQ(f.conflicts[0].second.sent, "2 elements of float32 (all_reduce, sum)");
  CHECK_EQ(f.conflicts[1].second.sent, "1 elements of int32 (all_reduce, sum)");
  CHECK(f.answers.empty());
  CHECK_EQ(f.contribute(11, header_of(1, 2), payload_of({2.0f})), "");  // the honest one is still heard
  CHECK_EQ(f.answers.size(), 2u);
}

// The process knows on which host a peer is, and how many there are: a frame's word does not count against that.
TEST(sum_server_frames_in_the_name_of_another_host) {
  Fixture f;
  for (const FrameHeader& wrong : {header_of(0, 0), header_of(2, 2), header_of(1, 2), header_of(0, 3), header_of(0, 60'000)}) {
    CHECK(f.contribute(10, wrong, payload_of({1.0f})).find("where host 0 of 2 was expected") != std::string::npos);
    CHECK(f.supply(10, wrong, payload_of({1.0f})).find("where host 0 of 2 was expected") != std::string::npos);
  }
  CHECK_EQ(f.contribute(10, header_of(0, 2), payload_of({1.0f})), "");
  CHECK(f.answers.empty());
}

// One frame must not end a server: a divisor of 256 is 0 as an int8.
TEST(sum_server_averages_of_integers_are_refused) {
  for (int element = 4; element < 8; ++element) {
    for (int divisor : {1, 2, 128, 255, 256, 512}) {
      Fixture f;
      for (int host = 0; host < 2; ++host) {
        FrameHeader header = header_of(host, 2);
        header.element = header.input = static_cast<Element>(element);
        header.combine = Combine::avg;
        header.divisor = static_cast<std::uint16_t>(divisor);
        const std::string wrong = f.contribute(host, header, payload_of({1.0f, 2.0f}));
        CHECK(wrong.find("an average needs floating-point elements") != std::string::npos);
        CHECK(!f.supply(host, header, payload_of({1.0f, 2.0f})).empty());
      }
      CHECK(f.answers.empty());
    }
  }
}

// Any bytes with good checksums may come from a peer whose memory is bad: every pair of types, any operation, any
// length is answered or refused, never read or written outside its memory (the address sanitizer watches).
TEST(sum_server_survives_every_combination_of_codes) {
  int refused = 0, summed = 0;
  for (int element = 0; element < 8; ++element) {
    for (int input = 0; input < 8; ++input) {
      for (int combine = 0; combine < 8; ++combine) {
        for (std::size_t bytes : {0, 1, 7, 24, 4096}) {
         for (int divisor : {0, 1, 256, 65'535}) {
          Fixture f;
          bool bad = false;
          for (int host = 0; host < 2; ++host) {
            FrameHeader header = header_of(host, 2);
            header.element = static_cast<Element>(element);
            header.input = static_cast<Element>(input);
            header.combine = static_cast<Combine>(combine);
            header.divisor = static_cast<std::uint16_t>(divisor);
            const auto owner = std::make_shared<std::vector<std::byte>>(bytes);
            bad = bad || !f.contribute(host, header, {owner->data(), bytes, owner}).empty();
          }
          CHECK_EQ(f.answers.size(), bad ? 0u : 2u);
          ++(bad ? refused : summed);
         }
        }
      }
    }
  }
  CHECK(refused > 0 && summed > 0);
}

TEST(sum_server_chunks_do_not_mix) {
  Fixture f;
  for (std::uint64_t chunk = 0; chunk < 50; ++chunk) f.contribute(0, header_of(0, 2, 1, chunk), payload_of({static_cast<float>(chunk)}));
  for (std::uint64_t chunk = 50; chunk-- > 0;) f.contribute(1, header_of(1, 2, 1, chunk), payload_of({0.5f}));
  CHECK_EQ(f.answers.size(), 100u);
  for (const Answered& each : f.answers) CHECK(each.values == std::vector<float>{static_cast<float>(each.header.chunk) + 0.5f});
}

}  // namespace sum_server_test
