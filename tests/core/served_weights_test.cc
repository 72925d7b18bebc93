#include "engine/served_weights.h"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "engine/sum_server.h"

namespace {

using namespace shoal;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

FrameHeader header_of(Kind kind, int root = 0, std::uint32_t step = 0, std::uint32_t rule = 0) {
  const Element element = kind == Kind::configure ? Element::uint8 : kind == Kind::update ? Element::float32 : Element::int32;
  FrameHeader header;
  header.type = FrameType::push;
  header.kind = static_cast<std::uint8_t>(kind);
  header.element = header.input = static_cast<std::uint8_t>(element);
  header.root = root;
  header.step = step;
  header.rule = rule;
  header.table = 5;
  return header;
}

// SGD without momentum and decay.
std::vector<std::byte> options(std::uint32_t number, double rate, std::uint32_t num_groups = 1) {
  const std::uint32_t head[4] = {number, 0, num_groups, 0};
  const double group[6] = {rate, 0, 0, 0, 0, 0};
  std::vector<std::byte> data(sizeof head + sizeof group);
  std::memcpy(data.data(), head, sizeof head);
  std::memcpy(data.data() + sizeof head, group, sizeof group);
  return data;
}

std::string take(ServedWeights& weights, const FrameHeader& header, std::vector<float>& values) {
  return weights.take(header, reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(float));
}

std::string take(ServedWeights& weights, const FrameHeader& header, std::vector<std::byte> data) {
  return weights.take(header, data.data(), data.size());
}

TEST(served_weights_are_loaded_updated_and_dumped) {
  WeightBudget budget(1 << 20);
  {
    ServedWeights weights(budget);
    std::vector<float> values{1, 2, 3}, gradient{2, 4, 8}, dumped(3);
    CHECK_EQ(take(weights, header_of(Kind::load), values), "");
    CHECK_EQ(take(weights, header_of(Kind::configure), options(1, 0.5)), "");
    CHECK_EQ(take(weights, header_of(Kind::update, 0, 1, 1), gradient), "");
    CHECK(gradient == (std::vector<float>{0, 0, -1}));
    CHECK_EQ(take(weights, header_of(Kind::dump, 0, 1), dumped), "");
    CHECK(dumped == gradient);
    CHECK_EQ(budget.used_bytes.load(), 12u);
  }
  CHECK_EQ(budget.used_bytes.load(), 0u);
}

TEST(served_weights_name_what_a_correct_rank_never_sends) {
  WeightBudget budget(1 << 20);
  ServedWeights weights(budget);
  std::vector<float> values{1, 2, 3}, other{1, 2};
  const auto wrong = [&](const FrameHeader& header, std::vector<float>& sent, const char* part) {
    const std::string said = take(weights, header, sent);
    if (!contains(said, part)) check::fail(__FILE__, __LINE__, "'" + said + "' lacks '" + part + "'");
  };
  wrong(header_of(Kind::update, 0, 1), values, "of which 0 bytes are kept");
  wrong(header_of(Kind::dump), values, "which is not kept here");
  wrong(header_of(Kind::load, 1), values, "where 0 weights are kept");
  wrong(header_of(Kind::load, 3), values, "slot 3");
  CHECK_EQ(take(weights, header_of(Kind::load), values), "");
  wrong(header_of(Kind::load), other, "where 3 weights are kept");
  wrong(header_of(Kind::load, 1, 7), values, "state after 7 updates for weights after 0");
  wrong(header_of(Kind::update, 0, 1, 0), values, "number 0 with 0 groups is in force");
  CHECK(contains(take(weights, header_of(Kind::configure), options(2, 0.5)), "number 2 after number 0"));
  CHECK(contains(take(weights, header_of(Kind::configure), options(1, 0.5, 9)), "with 9 groups"));
  CHECK(contains(take(weights, header_of(Kind::configure), options(1, std::nan(""))), "not finite"));
  CHECK(contains(take(weights, header_of(Kind::configure), std::vector<std::byte>(3)), "options of 3 bytes"));
  CHECK_EQ(take(weights, header_of(Kind::configure), options(1, 0.5)), "");
  wrong(header_of(Kind::update, 1, 1, 1), values, "group 1");
  wrong(header_of(Kind::update, 0, 2, 1), values, "which has taken 0");
  wrong(header_of(Kind::update, 0, 1, 1), other, "of which 12 bytes are kept");
  FrameHeader halves = header_of(Kind::update, 0, 1, 1);
  halves.input = static_cast<std::uint8_t>(Element::bfloat16);
  wrong(halves, values, "a update of 12 bytes");
}

TEST(served_weights_stay_within_the_budget) {
  WeightBudget budget(20);
  ServedWeights weights(budget);
  std::vector<float> values{1, 2, 3};
  CHECK_EQ(take(weights, header_of(Kind::load), values), "");
  CHECK(contains(take(weights, header_of(Kind::load, 1), values), "more than the 20 bytes"));
  CHECK_EQ(budget.used_bytes.load(), 12u);
}

// Frames may overtake each other on several connections: an update waits for its options.
TEST(served_weights_wait_for_options_that_an_update_has_overtaken) {
  BufferPool pool;
  WeightBudget budget(1 << 20);
  std::vector<std::pair<Kind, std::vector<float>>> answers;
  SumServer server(
      pool, budget, {2, [](int peer) { return peer; }},
      [&](int, const FrameHeader& header, const Payload& payload) {
        std::vector<float> values(payload.size / sizeof(float));
        std::memcpy(values.data(), payload.data, values.size() * sizeof(float));
        answers.emplace_back(static_cast<Kind>(header.kind), std::move(values));
      },
      [](const SumServer::Conflict&) { check::fail(__FILE__, __LINE__, "a conflict"); });
  const auto push = [&](FrameHeader header, std::uint64_t seq, int host, const void* data, std::size_t bytes) {
    header.seq = seq;
    header.host = static_cast<std::uint16_t>(host);
    header.needed = 2;
    header.combine = static_cast<std::uint8_t>(static_cast<Kind>(header.kind) == Kind::update ? Combine::sum : Combine::bor);
    const auto owner = std::make_shared<std::vector<std::byte>>(bytes);
    std::memcpy(owner->data(), data, bytes);
    CHECK_EQ(server.contribute(host, header, {owner->data(), bytes, owner, 0, false}), "");
  };
  const std::vector<float> weights{4, 4}, none{0, 0}, gradient{1, 2};
  push(header_of(Kind::load), 0, 0, weights.data(), 8);
  push(header_of(Kind::load), 0, 1, none.data(), 8);
  answers.clear();
  for (int host : {0, 1}) push(header_of(Kind::update, 0, 1, 1), 2, host, gradient.data(), 8);
  CHECK(answers.empty());
  const auto rule = options(1, 0.5);
  for (int host : {0, 1}) push(header_of(Kind::configure), 1, host, rule.data(), rule.size());
  CHECK_EQ(answers.size(), 4u);
  CHECK(answers.back().first == Kind::update);
  CHECK(answers.back().second == (std::vector<float>{3, 2}));
  CHECK_EQ(server.held_bytes(), 0u);
}

}  // namespace
