#include "optim/unit_sums.h"

#include <vector>

#include "check.h"
#include "optim/lamb.h"
#include "optim/momentum.h"

namespace unit_sums_test {

using namespace shoal;

constexpr std::size_t kCount = 2 * kBlock + 3 * kSumUnit + 13;
#ifdef __SANITIZE_THREAD__
constexpr int kThreads = 1;  // the kernels are compiled without the sanitizer, which would not see them wait
#else
constexpr int kThreads = 2;
#endif
constexpr std::size_t kPieces[] = {kSumUnit, 4 * kSumUnit, kBlock, kCount};

std::vector<float> made(int seed) {
  std::vector<float> values(kCount);
  std::uint32_t state = 17u + static_cast<std::uint32_t>(seed);
  for (float& each : values) {
    state = state * 1664525u + 1013904223u;
    each = static_cast<float>(state >> 8) * (2.0f / (1 << 24)) - 1.0f;
  }
  return values;
}

// Calls `each(begin, count)` for pieces of the tensor.
template <class Each>
void over_pieces(std::size_t piece, const Each& each) {
  for (std::size_t begin = 0; begin < kCount; begin += piece) each(begin, std::min(piece, kCount - begin));
}

UnitSums total(const std::vector<UnitSums>& units) {
  double grad_sq = 0.0;
  const UnitSums all = total_of(units, grad_sq);
  CHECK_EQ(grad_sq, all.grad_sq);
  return all;
}

TEST(unit_sums_of_pieces_are_those_of_the_tensor) {
  const std::vector<float> values = made(1);
  const ConstTensor tensor{values.data(), kCount};
  for (const std::size_t piece : kPieces) {
    std::vector<UnitSums> units(num_units(kCount));
    over_pieces(piece, [&](std::size_t begin, std::size_t count) {
      squares_of_units(values.data() + begin, count, &units[begin / kSumUnit]);
    });
    CHECK_EQ(total(units).grad_sq, sum_of_squares(std::span(&tensor, 1), 2));
  }
}

// Weights and moments before their third step.
struct Moments {
  std::vector<float> weights = made(1), grads = made(2), exp_avg = made(3), exp_avg_sq = std::vector<float>(kCount, 0.3f);

  MomentsTensor at(std::size_t begin = 0, std::size_t count = kCount) {
    return {&weights[begin], &grads[begin], &exp_avg[begin], &exp_avg_sq[begin], count, 3.0};
  }
  bool operator==(const Moments&) const = default;
};

TEST(unit_sums_give_the_bits_of_lamb) {
  const LambOptions options{0.01, 0.9, 0.999, 1e-6, 0.01, 1.0, true, true};
  Moments whole;
  const MomentsTensor tensor = whole.at();
  lamb_step(std::span(&tensor, 1), options, kThreads);
  for (const std::size_t piece : kPieces) {
    Moments cut;
    std::vector<UnitSums> units(num_units(kCount));
    over_pieces(piece, [&](std::size_t begin, std::size_t count) {
      lamb_measure(cut.at(begin, count), options, &units[begin / kSumUnit]);
    });
    const UnitSums all = total(units);
    const float step_size = lamb_step_size(options, all.weight_sq, all.other_sq);
    over_pieces(piece, [&](std::size_t begin, std::size_t count) { lamb_move(cut.at(begin, count), options, step_size); });
    CHECK(cut == whole);
  }
}

TEST(unit_sums_give_the_bits_of_lans) {
  const MomentsOptions options{0.01, 0.9, 0.999, 1e-6, 0.01, 0.25};
  Moments whole;
  const MomentsTensor tensor = whole.at();
  lans_step(std::span(&tensor, 1), options, kThreads);
  for (const std::size_t piece : kPieces) {
    Moments cut;
    std::vector<UnitSums> units(num_units(kCount));
    over_pieces(piece, [&](std::size_t begin, std::size_t count) {
      squares_of_units(&cut.grads[begin], count, &units[begin / kSumUnit]);
    });
    MomentsOptions normalised = options;
    normalised.grad_scale = lans_grad_scale(options, total(units).grad_sq);
    over_pieces(piece, [&](std::size_t begin, std::size_t count) {
      lans_measure(cut.at(begin, count), normalised, &units[begin / kSumUnit]);
    });
    const LansSteps steps = lans_step_sizes(options, total(units));
    over_pieces(piece, [&](std::size_t begin, std::size_t count) { lans_move(cut.at(begin, count), normalised, steps); });
    CHECK(cut == whole);
  }
}

TEST(unit_sums_give_the_bits_of_lars_and_novograd) {
  for (const bool clips : {false, true}) {
    const LarsOptions options{0.5, 0.9, 0.01, 0.02, 0.0, 1.0, clips, true, true};
    std::vector<float> w = made(1), m = made(3);
    const std::vector<float> g = made(2), w0 = w, m0 = m;
    const MomentumTensor whole{w.data(), g.data(), m.data(), kCount};
    lars_step(std::span(&whole, 1), options, kThreads);
    for (const std::size_t piece : kPieces) {
      std::vector<float> pw = w0, pm = m0;
      std::vector<UnitSums> units(num_units(kCount));
      const auto at = [&](std::size_t begin, std::size_t count) { return MomentumTensor{&pw[begin], &g[begin], &pm[begin], count}; };
      over_pieces(piece, [&](std::size_t begin, std::size_t count) {
        lars_measure(at(begin, count), options.weight_decay, &units[begin / kSumUnit]);
      });
      const Motion motion = lars_motion(options, total(units));
      over_pieces(piece, [&](std::size_t begin, std::size_t count) { move_by(at(begin, count), motion); });
      CHECK(pw == w && pm == m);
    }
  }
  const NovoGradOptions options{0.1, 0.95, 0.98, 1e-8, 0.01, 1.0, true, true, false, true};
  std::vector<float> w = made(1), m = made(3), pw = w, pm = m;
  const std::vector<float> g = made(2);
  float norm_sq = 7.0f, piece_norm_sq = 7.0f;
  const MomentumTensor whole{w.data(), g.data(), m.data(), kCount};
  const NovoGradState state{&norm_sq, 2.0};
  novograd_step(std::span(&whole, 1), std::span(&state, 1), options, kThreads);
  std::vector<UnitSums> units(num_units(kCount));
  squares_of_units(g.data(), kCount, units.data());
  move_by({pw.data(), g.data(), pm.data(), kCount}, novograd_motion(options, {&piece_norm_sq, 2.0}, total(units).grad_sq));
  CHECK(pw == w && pm == m && piece_norm_sq == norm_sq);
}

}  // namespace unit_sums_test
