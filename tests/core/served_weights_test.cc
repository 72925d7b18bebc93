#include "engine/served_weights.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "base/crc32c.h"
#include "check.h"
#include "engine/errors.h"
#include "engine/sum_server.h"
#include "optim/adafactor.h"
#include "optim/lamb.h"

namespace served_weights_test {

using namespace shoal;

FrameHeader header_of(Kind kind, int root = 0, std::uint32_t step = 0, std::uint32_t rule = 0) {
  const bool sums = kind == Kind::update || kind == Kind::collect;
  const Element element = kind == Kind::configure ? Element::uint8 : sums ? Element::float32 : Element::int32;
  FrameHeader header;
  header.type = FrameType::push;
  header.kind = kind;
  header.input = element;
  header.element = returns_weights(kind) ? Element::float32 : element;
  header.root = root;
  header.step = step;
  header.rule = rule;
  header.table = kind == Kind::configure ? 0 : 5;  // a model, or a tensor
  return header;
}

// SGD without momentum and decay.
std::vector<std::byte> options(std::uint32_t number, double rate, std::uint32_t num_groups = 1, std::uint32_t optimizer = 0,
                               double second = 0) {
  const std::uint32_t head[4] = {number, optimizer, num_groups, 0};
  const double group[6] = {rate, second, second, second, 0, 0};
  std::vector<std::byte> data(sizeof head + sizeof group);
  std::memcpy(data.data(), head, sizeof head);
  std::memcpy(data.data() + sizeof head, group, sizeof group);
  return data;
}

// As a connection makes it: nobody else has it, and the sender has told the checksum.
Payload received(const void* data, std::size_t bytes) {
  static BufferPool pool;
  std::shared_ptr<std::byte> buffer = pool.take(bytes);
  if (bytes) std::memcpy(buffer.get(), data, bytes);
  return Payload::received(std::move(buffer), bytes, crc32c(data, bytes));
}

// Takes a sum, and replaces it by the answer.
std::string take(ServedWeights& weights, const FrameHeader& header, std::vector<float>& values) {
  Payload sum = received(values.data(), values.size() * sizeof(float));
  const std::string wrong = weights.take(header, sum);
  if (wrong.empty()) std::memcpy(values.data(), sum.data(), sum.size());
  return wrong;
}

std::string take(ServedWeights& weights, const FrameHeader& header, const std::vector<std::byte>& data) {
  Payload sum = received(data.data(), data.size());
  return weights.take(header, sum);
}

// Takes a phase of an update and returns its reply.
template <class Number>
std::vector<Number> phase(ServedWeights& weights, Kind kind, std::uint32_t step, std::vector<float> given) {
  Payload sum = received(given.data(), given.size() * sizeof(float));
  const FrameHeader header = header_of(kind, 0, step, kind == Kind::collect ? 0 : 1);
  CHECK_EQ(weights.take(header, sum), "");
  std::vector<Number> numbers(sum.size() / sizeof(Number));
  std::memcpy(numbers.data(), sum.data(), sum.size());
  return numbers;
}

std::vector<float> coefficients(float first) { return {first, 0, 0, 0, 0, 0, 0, 0}; }

TEST(served_weights_are_loaded_updated_and_dumped) {
  BufferPool pool;
  WeightBudget budget(1 << 20);
  {
    ServedWeights weights(pool, budget);
    std::vector<float> values{1, 2, 3}, gradient{2, 4, 8}, dumped(3);
    CHECK_EQ(take(weights, header_of(Kind::load), values), "");
    CHECK_EQ(take(weights, header_of(Kind::configure), options(1, 0.5)), "");
    CHECK_EQ(take(weights, header_of(Kind::update, 0, 1, 1), gradient), "");
    CHECK(gradient == (std::vector<float>{0, 0, -1}));
    CHECK_EQ(take(weights, header_of(Kind::dump, 0, 1), dumped), "");
    CHECK(dumped == gradient);
    CHECK_EQ(budget.used_bytes.load(), kPieceBytes + 12 + 48);
  }
  CHECK_EQ(budget.used_bytes.load(), 0u);
}

TEST(served_weights_name_what_a_correct_rank_never_sends) {
  BufferPool pool;
  WeightBudget budget(1 << 20);
  ServedWeights weights(pool, budget);
  std::vector<float> values{1, 2, 3}, other{1, 2};
  const auto wrong = [&](const FrameHeader& header, std::vector<float>& sent, const char* part) {
    const std::string said = take(weights, header, sent);
    if (!contains(said, part)) check::fail(__FILE__, __LINE__, "'" + said + "' lacks '" + part + "'");
  };
  wrong(header_of(Kind::update, 0, 1), values, "which is not kept here");
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
  halves.input = Element::bfloat16;
  wrong(halves, values, "a update of 12 bytes of bfloat16");
  FrameHeader bytes = header_of(Kind::update, 0, 1, 1);
  bytes.element = Element::int8;
  wrong(bytes, values, "for int8");
}

TEST(served_weights_stay_within_the_budget) {
  BufferPool pool;
  WeightBudget budget(kPieceBytes + 20);
  ServedWeights weights(pool, budget);
  std::vector<float> values{1, 2, 3};
  CHECK_EQ(take(weights, header_of(Kind::load), values), "");
  std::string said;
  try {
    take(weights, header_of(Kind::load, 1), values);
  } catch (const GroupFailure& full) {
    said = full.what();
  }
  CHECK(contains(said, "more than the 276 bytes"));
  CHECK_EQ(budget.used_bytes.load(), kPieceBytes + 12);
}

// Options count as weights do, those in force; so do tensors of next to nothing.
TEST(served_weights_of_many_options_and_pieces_stay_within_the_budget) {
  BufferPool pool;
  WeightBudget budget(2 * 4096 * 48);
  ServedWeights weights(pool, budget);
  const auto configure = [&](std::uint32_t model, std::uint32_t number, std::uint32_t num_groups) {
    std::vector<std::byte> data(16 + num_groups * 48);
    const std::uint32_t head[4] = {number, 0, num_groups, 0};
    std::memcpy(data.data(), head, sizeof head);
    FrameHeader header = header_of(Kind::configure);
    header.table = model;
    return take(weights, header, data);
  };
  for (std::uint32_t number = 1; number <= 5; ++number) CHECK_EQ(configure(0, number, 4000), "");
  CHECK_EQ(budget.used_bytes.load(), 4000u * 48);
  CHECK(contains(configure(1, 1, 4097), "with 4097 groups"));
  CHECK_EQ(configure(1, 1, 4096), "");
  CHECK(contains(CHECK_THROWS(GroupFailure, configure(2, 1, 4096)), "--weights-mib"));
  CHECK_EQ(budget.used_bytes.load(), 8096u * 48);
  CHECK_EQ(configure(1, 2, 1), "");
  std::vector<float> value{1};
  FrameHeader load = header_of(Kind::load);
  const auto load_many = [&] {
    for (; load.chunk < 4096; ++load.chunk) CHECK_EQ(take(weights, load, value), "");
  };
  CHECK(contains(CHECK_THROWS(GroupFailure, load_many()), "--weights-mib"));
  CHECK_EQ(load.chunk, (budget.max_bytes - 4001 * 48) / (kPieceBytes + 4));
  weights.clear();
  CHECK_EQ(budget.used_bytes.load(), 0u);
}

TEST(served_weights_take_a_step_in_phases) {
  BufferPool pool;
  WeightBudget budget(1 << 20);
  ServedWeights weights(pool, budget);
  const std::size_t count = kSumUnit + 5;
  std::vector<float> w(count), g(count), m(count, 0.0f), v(count, 0.0f), scaled(count);
  for (std::size_t k = 0; k < count; ++k) {
    w[k] = 0.01f * static_cast<float>(k % 97) - 0.3f;
    g[k] = 0.02f * static_cast<float>(k % 89) - 0.7f;
    scaled[k] = g[k] * 0.3f;
  }
  CHECK_EQ(take(weights, header_of(Kind::load), w), "");
  CHECK_EQ(take(weights, header_of(Kind::configure), options(1, 0.5, 1, 2, 0.9)), "");  // LAMB
  CHECK(contains(take(weights, header_of(Kind::update, 0, 1, 1), g), "for optimizer 2"));
  std::vector<float> none = coefficients(1);
  CHECK(contains(take(weights, header_of(Kind::measure, 0, 1, 1), none), "whose gradient has not come"));
  phase<double>(weights, Kind::collect, 1, w);  // a step that is given up
  const auto squares = phase<double>(weights, Kind::collect, 1, g);
  CHECK_EQ(squares.size(), 6u);
  const ConstTensor whole{g.data(), count};
  CHECK_EQ(squares[0] + squares[3], sum_of_squares(std::span(&whole, 1), 1));
  CHECK(contains(take(weights, header_of(Kind::apply, 0, 1, 1), none), "was not measured"));

  const auto sums = phase<double>(weights, Kind::measure, 1, coefficients(0.3f));
  CHECK(contains(take(weights, header_of(Kind::collect, 0, 1), g), "in the middle of an update"));
  const LambOptions lamb{0.5, 0.9, 0.9, 0.9, 0.0, 1.0, false, true};
  const MomentsTensor tensor{w.data(), scaled.data(), m.data(), v.data(), count, 1.0};
  const float step_size = lamb_step_size(lamb, sums[1] + sums[4], sums[2] + sums[5]);
  std::vector<float> infinite = coefficients(std::numeric_limits<float>::infinity()), few{1};
  CHECK(contains(take(weights, header_of(Kind::apply, 0, 1, 1), infinite), "not finite"));
  CHECK(contains(take(weights, header_of(Kind::apply, 0, 1, 1), few), "coefficients of 4 bytes"));
  const auto after = phase<float>(weights, Kind::apply, 1, coefficients(step_size));
  lamb_step(std::span(&tensor, 1), lamb, 1);
  CHECK(after == w);
  CHECK(contains(take(weights, header_of(Kind::apply, 0, 1, 1), none), "which has taken 1"));
}

TEST(served_weights_have_rows_and_columns_of_a_matrix) {
  BufferPool pool;
  WeightBudget budget(1 << 20);
  ServedWeights weights(pool, budget);
  constexpr std::size_t kColumns = 31, kRows = 70, kCount = kColumns * kRows;
  std::vector<float> w(kCount), g(kCount), rows(kRows), columns(kColumns), none{1};
  for (std::size_t k = 0; k < kCount; ++k) {
    w[k] = 0.01f * static_cast<float>(k % 97) - 0.3f;
    g[k] = 0.02f * static_cast<float>(k % 89) - 0.7f;
  }
  CHECK_EQ(take(weights, header_of(Kind::load), w), "");
  CHECK_EQ(take(weights, header_of(Kind::configure), options(1, 1e-30, 1, 6)), "");  // Adafactor
  std::vector<float> given{0.3f, kColumns, 0, 0, 0, 0, 0, 0}, outside{1, 4, 4, 0, 0, 0, 0, 0}, part{1, 4.5, 0, 0, 0, 0, 0, 0};
  CHECK(contains(take(weights, header_of(Kind::factor, 0, 1, 1), given), "whose gradient has not come"));
  phase<double>(weights, Kind::collect, 1, g);
  CHECK(contains(take(weights, header_of(Kind::normalise, 0, 1, 1), none), "whose gradient has not come"));
  CHECK(contains(take(weights, header_of(Kind::factor, 0, 1, 1), outside), "a row of 4.0"));
  CHECK(contains(take(weights, header_of(Kind::factor, 0, 1, 1), part), "a row of 4.5"));
  const auto sums = phase<float>(weights, Kind::factor, 1, given);
  CHECK_EQ(sums.size(), factor_numbers(kColumns));
  std::vector<float> factors(sums.size()), row_var(kRows), col_var(kColumns);
  adafactor_decide(sums.data(), kCount, kColumns, 1.0, 1e-30, row_var.data(), col_var.data(), factors.data());
  CHECK(contains(take(weights, header_of(Kind::collect, 0, 1), g), "in the middle of an update"));
  CHECK(contains(take(weights, header_of(Kind::normalise, 0, 1, 1), none), "4 bytes of factors"));
  const auto squares = phase<double>(weights, Kind::normalise, 1, factors);
  const UnitSums total{0, squares[1] + squares[4], squares[2] + squares[5]};
  const AdafactorMove move = adafactor_move_of(0.1, 0.0, total, kCount);
  const auto after = phase<float>(weights, Kind::apply, 1, {move.keep, move.size, 0, 0, 0, 0, 0, 0});
  const AdafactorTensor tensor{w.data(), g.data(), rows.data(), columns.data(), kCount, kColumns, 1.0};
  adafactor_step(std::span(&tensor, 1), {0.1, 1e-30, 0.0, static_cast<double>(0.3f)}, 1);
  CHECK(after == w);
  CHECK(row_var == rows);
  CHECK(col_var == columns);
}

TEST(served_weights_answer_in_bfloat16_and_stay_float32) {
  BufferPool pool;
  WeightBudget budget(1 << 20);
  ServedWeights weights(pool, budget);
  std::vector<float> values{1.00390625f, 1.01171875f}, gradient{0, 0}, kept(2);  // halfway between two of bfloat16
  CHECK_EQ(take(weights, header_of(Kind::load), values), "");
  CHECK_EQ(take(weights, header_of(Kind::configure), options(1, 0.5)), "");
  Payload sum = received(gradient.data(), 8);
  FrameHeader update = header_of(Kind::update, 0, 1, 1);
  update.element = Element::bfloat16;
  CHECK_EQ(weights.take(update, sum), "");
  CHECK_EQ(sum.size(), 4u);
  std::uint16_t halves[2];
  std::memcpy(halves, sum.data(), sizeof halves);
  CHECK_EQ(halves[0], 0x3f80u);  // to even: 1 and 1.015625
  CHECK_EQ(halves[1], 0x3f82u);
  CHECK_EQ(take(weights, header_of(Kind::dump, 0, 1), kept), "");
  CHECK(kept == values);
}

TEST(served_weights_of_two_models_have_options_of_their_own) {
  BufferPool pool;
  WeightBudget budget(1 << 20);
  ServedWeights weights(pool, budget);
  std::vector<float> values{1, 2}, gradient{2, 2};
  FrameHeader load = header_of(Kind::load), configure = header_of(Kind::configure), update = header_of(Kind::update, 0, 1, 1);
  CHECK_EQ(take(weights, load, values), "");
  load.rule = 1;
  load.table = 6;
  CHECK_EQ(take(weights, load, values), "");
  CHECK_EQ(take(weights, configure, options(1, 0.5)), "");
  update.table = 6;
  CHECK(weights.is_early(update));
  configure.table = 1;
  CHECK_EQ(take(weights, configure, options(1, 1.0)), "");
  CHECK(!weights.is_early(update));
  CHECK_EQ(take(weights, update, gradient), "");
  CHECK(gradient == (std::vector<float>{-1, 0}));
  configure.table = 4096;
  CHECK(contains(take(weights, configure, options(1, 1.0)), "options of model 4096"));
}

// Frames may overtake each other on several connections: an update waits for its options.
TEST(served_weights_wait_for_options_that_an_update_has_overtaken) {
  BufferPool pool;
  WeightBudget budget(1 << 20);
  std::vector<std::pair<Kind, std::vector<float>>> answers;
  SumServer server(
      pool, budget, 2,
      [&](int, const FrameHeader& header, const Payload& payload) {
        std::vector<float> values(payload.size() / sizeof(float));
        std::memcpy(values.data(), payload.data(), values.size() * sizeof(float));
        answers.emplace_back(header.kind, std::move(values));
      },
      [](const SumServer::Conflict&) { check::fail(__FILE__, __LINE__, "a conflict"); });
  const auto push = [&](FrameHeader header, std::uint64_t seq, int host, const void* data, std::size_t bytes) {
    header.seq = seq;
    header.host = static_cast<std::uint16_t>(host);
    header.needed = 2;
    header.combine = header.kind == Kind::update ? Combine::sum : Combine::bor;
    CHECK_EQ(server.contribute({host, host}, header, received(data, bytes)), "");
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

// Two servers and the frames between them: a helper, and the rank that has a copy of its weights.
struct Pair {
  struct Answer {
    int peer;
    FrameType type;
    std::uint64_t seq;
    std::vector<float> values;
    bool operator==(const Answer&) const = default;
  };
  using Answers = std::vector<Answer>;

  BufferPool pool;
  WeightBudget budget{1 << 20};
  Answers of_helper, of_rank;
  std::vector<std::pair<FrameHeader, Payload>> copies;
  SumServer helper{pool, budget, 2, answers(of_helper), conflict, [this](const FrameHeader& header, const Payload& sum) {
                     copies.emplace_back(header, sum);
                     return 1;
                   }};
  SumServer rank{pool, budget, 2, answers(of_rank), conflict};

  static void conflict(const SumServer::Conflict&) { check::fail(__FILE__, __LINE__, "a conflict"); }
  static SumServer::Answer answers(Answers& to) {
    return [&to](int peer, const FrameHeader& header, Payload payload) {
      std::vector<float> values(payload.size() / sizeof(float));
      if (payload.size()) std::memcpy(values.data(), payload.data(), payload.size());
      CHECK_EQ(payload.checksum(), received(values.data(), payload.size()).checksum());
      to.push_back({peer, header.type, header.seq, std::move(values)});
    };
  }
  static FrameHeader header(Kind kind, std::uint64_t seq, std::uint8_t redo, int host = 0) {
    const bool updates = kind == Kind::update;
    FrameHeader header = header_of(kind, 0, updates || kind == Kind::dump ? 1 : 0, updates ? 1 : 0);
    header.seq = seq;
    header.redo = redo;
    header.host = static_cast<std::uint16_t>(host);
    header.needed = 2;
    header.combine = kind == Kind::update ? Combine::sum : Combine::bor;
    return header;
  }
  static Payload payload(const void* data, std::size_t bytes) { return received(data, bytes); }
  static Payload payload(const std::vector<float>& values) { return payload(values.data(), values.size() * sizeof(float)); }
  static void push(SumServer& to, Kind kind, std::uint64_t seq, std::uint8_t redo, const Payload& given) {
    for (int host : {0, 1}) CHECK_EQ(to.contribute({host, host}, header(kind, seq, redo, host), given), "");
  }
  // Hands the newest copy to the rank.
  std::string copy() {
    const Payload& sum = copies.back().second;
    return rank.take_copy(7, copies.back().first, payload(sum.data(), sum.size()));
  }
  std::string confirm(int peer) { return helper.confirm_copy(peer, copies.back().first); }
  void configure() {
    const auto rule = options(1, 0.5);
    for (SumServer* each : {&helper, &rank}) push(*each, Kind::configure, 1, 0, payload(rule.data(), rule.size()));
    of_helper.clear();
    of_rank.clear();
  }
};

TEST(served_weights_with_a_copy_are_answered_when_the_copy_has_the_sum) {
  Pair on;
  const std::vector<float> weights{2, 2}, gradient{1, 2}, stepped{1, 0};
  Pair::push(on.helper, Kind::load, 0, 2, Pair::payload(weights));
  CHECK(on.of_helper.empty());
  CHECK(contains(on.confirm(0), "that it has taken a copy"));  // not the rank that has it
  CHECK_EQ(on.copy(), "");
  CHECK(on.of_rank == (Pair::Answers{{7, FrameType::copied, 0, {}}}));
  CHECK_EQ(on.confirm(1), "");
  CHECK(on.of_helper == (Pair::Answers{{0, FrameType::result, 0, weights}, {1, FrameType::result, 0, weights}}));
  CHECK(contains(on.confirm(1), "that it has taken a copy"));  // again
  on.configure();
  Pair::push(on.helper, Kind::update, 2, 2, Pair::payload(gradient));
  CHECK_EQ(on.copy(), "");
  CHECK(on.of_helper.empty());
  // the helper is lost: rank 1 has no answer, while rank 0 might have
  on.of_rank.clear();
  CHECK_EQ(on.rank.contribute({1, 1}, Pair::header(Kind::update, 2, 1, 1), Pair::payload(gradient)), "");
  CHECK(on.of_rank == (Pair::Answers{{1, FrameType::result, 2, stepped}}));
  for (SumServer* each : {&on.helper, &on.rank}) CHECK_EQ(each->held_bytes(), 0u);
}

TEST(served_weights_are_not_sent_to_the_rank_that_has_taken_the_step) {
  Pair on;
  const std::vector<float> weights{2, 2}, gradient{1, 2}, stepped{1, 0};
  Pair::push(on.helper, Kind::load, 0, 2, Pair::payload(weights));
  CHECK_EQ(on.copy(), "");
  CHECK_EQ(on.confirm(1), "");
  on.configure();
  const FrameHeader update = Pair::header(Kind::update, 2, 2, 1);
  CHECK_EQ(on.rank.weights_of_copy(update).size(), 0u);  // no sum has come
  Pair::push(on.helper, Kind::update, 2, 2, Pair::payload(gradient));
  CHECK_EQ(on.copy(), "");
  CHECK_EQ(on.confirm(1), "");
  CHECK(on.of_helper == (Pair::Answers{{0, FrameType::result, 2, stepped}, {1, FrameType::result, 2, {}}}));
  const Payload here = on.rank.weights_of_copy(update);
  CHECK_EQ(here.size(), stepped.size() * sizeof(float));
  CHECK(std::memcmp(here.data(), stepped.data(), here.size()) == 0);
  on.rank.forget_below(3);
  CHECK_EQ(on.rank.weights_of_copy(update).size(), 0u);
}

TEST(served_weights_of_a_lost_helper_go_on_from_the_copy) {
  Pair on;
  const std::vector<float> weights{2, 2}, gradient{1, 2}, stepped{1, 0};
  Pair::push(on.helper, Kind::load, 0, 2, Pair::payload(weights));
  CHECK_EQ(on.copy(), "");
  on.configure();
  Pair::push(on.rank, Kind::update, 2, 1, Pair::payload(gradient));  // the copy never came
  CHECK(on.of_rank == (Pair::Answers{{0, FrameType::result, 2, stepped}, {1, FrameType::result, 2, stepped}}));
  Pair::push(on.helper, Kind::update, 2, 2, Pair::payload(gradient));
  CHECK_EQ(on.copy(), "");  // late: the same sum is not taken twice
  const auto rule = options(1, 0.5);
  Pair::push(on.rank, Kind::configure, 3, 1, Pair::payload(rule.data(), rule.size()));  // the helper's; it has its own
  Pair::push(on.rank, Kind::dump, 4, 1, Pair::payload({0, 0}));
  CHECK(on.of_rank.back() == (Pair::Answer{1, FrameType::result, 4, stepped}));
  FrameHeader supplied = Pair::header(Kind::update, 5, 1);
  supplied.type = FrameType::supply;
  CHECK(contains(on.rank.supply({0, 0}, supplied, Pair::payload(weights)), "supplied or sent again"));
}

TEST(served_weights_wait_for_options_that_a_copy_has_overtaken) {
  Pair on;
  const std::vector<float> weights{2, 2}, gradient{1, 2}, stepped{1, 0};
  Pair::push(on.helper, Kind::load, 0, 2, Pair::payload(weights));
  CHECK_EQ(on.copy(), "");
  on.of_rank.clear();
  FrameHeader update = Pair::header(Kind::update, 2, 2);
  CHECK_EQ(on.rank.take_copy(7, update, Pair::payload({2, 4})), "");
  CHECK(on.of_rank.empty());
  CHECK(contains(on.rank.take_copy(7, update, Pair::payload({2, 4})), "a second copy"));
  Pair::push(on.rank, Kind::update, 2, 1, Pair::payload(gradient));
  const auto rule = options(1, 0.5);
  Pair::push(on.rank, Kind::configure, 1, 0, Pair::payload(rule.data(), rule.size()));
  const Pair::Answers last(on.of_rank.end() - 3, on.of_rank.end());
  CHECK(last == (Pair::Answers{{7, FrameType::copied, 2, {}}, {0, FrameType::result, 2, stepped}, {1, FrameType::result, 2, stepped}}));
  CHECK_EQ(on.rank.held_bytes(), 0u);
}

TEST(served_weights_name_copies_that_cannot_be) {
  Pair on;
  const std::vector<float> weights{2, 2};
  CHECK(contains(on.rank.take_copy(7, Pair::header(Kind::dump, 0, 2), Pair::payload(weights)), "a copy of a dump"));
  FrameHeader alone = Pair::header(Kind::load, 0, 2);
  alone.needed = 1;
  CHECK(contains(on.rank.take_copy(7, alone, Pair::payload(weights)), "from 1 hosts"));
  CHECK(contains(on.rank.contribute({0, 0}, Pair::header(Kind::load, 0, 2), Pair::payload(weights)), "that is to be copied"));
  CHECK(contains(on.helper.contribute({0, 0}, Pair::header(Kind::dump, 0, 2), Pair::payload(weights)), "that is to be copied"));
  CHECK(contains(on.helper.contribute({0, 0}, Pair::header(Kind::load, 0, 1), Pair::payload(weights)), "supplied or sent again"));
}

}  // namespace served_weights_test
