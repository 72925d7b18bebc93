#include "optim/elementwise.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "base/parallel.h"
#include "base/simd.h"

namespace shoal {
namespace {

struct AdamWBlock {
  float* weight;
  const float* grad;
  float* exp_avg;
  float* exp_avg_sq;
};

struct AdamWCoefficients {
  float keep, one_minus_beta1, beta2, one_minus_beta2, root_unbias2, eps, minus_step, grad_scale;
};

struct SgdBlock {
  float* weight;
  const float* grad;
  float* momentum;  // or null
};

struct SgdCoefficients {
  float weight_decay, momentum, minus_rate, grad_scale;
  bool nesterov;
};

}  // namespace

#define SHOAL_KERNELS "optim/elementwise_kernels.inc"
#include "base/every_level.inc"

namespace {

struct Kernels {
  Norms (*adamw)(const AdamWCoefficients&, const AdamWBlock&, std::size_t count);
  Norms (*sgd)(const SgdCoefficients&, const SgdBlock&, std::size_t count);
};

Kernels kernels_of(Level level) {
  require_level(level);
  switch (level) {
#if defined(__x86_64__)
    case Level::avx512: return {avx512::adamw_block, avx512::sgd_block};
    case Level::avx2: return {avx2::adamw_block, avx2::sgd_block};
#endif
    default: return {portable::adamw_block, portable::sgd_block};
  }
}

// Runs `update(piece)` for each block of the tensors and adds its norms up in the order of the blocks.
template <class Tensor, class Update>
Norms over_blocks(std::span<const Tensor> tensors, int num_threads, const Update& update) {
  const Plan plan = plan_of(tensors);
  std::vector<Norms> of_piece(plan.pieces.size());
  Claims claims(plan.pieces.size());
  run_on_threads(threads_for(tensors, num_threads), [&] {
    for (std::size_t at; claims.next(at);) of_piece[at] = update(plan.pieces[at]);
  });
  Norms norms{0.0, 0.0};
  for (const Norms& piece : of_piece) {
    norms.grad_sq += piece.grad_sq;
    norms.weight_sq += piece.weight_sq;
  }
  return norms;
}

AdamWCoefficients coefficients(const MomentsOptions& o, double step) {
  const auto f = [](double x) { return static_cast<float>(x); };
  const double unbias1 = 1.0 - std::pow(o.beta1, step), unbias2 = 1.0 - std::pow(o.beta2, step);
  return {f(1.0 - o.learning_rate * o.weight_decay), f(1.0 - o.beta1), f(o.beta2), f(1.0 - o.beta2),
          f(std::sqrt(unbias2)), f(o.eps), f(-(o.learning_rate / unbias1)), f(o.grad_scale)};
}

}  // namespace

Norms adamw_step(std::span<const MomentsTensor> tensors, const MomentsOptions& options, int num_threads, Level level) {
  const Kernels kernels = kernels_of(level);
  std::vector<AdamWCoefficients> of_tensor;
  for (const MomentsTensor& tensor : tensors) of_tensor.push_back(coefficients(options, tensor.step));
  return over_blocks(tensors, num_threads, [&](const Piece& piece) {
    const MomentsTensor& t = tensors[piece.tensor];
    const AdamWBlock block{t.weight + piece.begin, t.grad + piece.begin, t.exp_avg + piece.begin,
                           t.exp_avg_sq + piece.begin};
    return kernels.adamw(of_tensor[piece.tensor], block, piece.count);
  });
}

Norms sgd_step(std::span<const MomentumTensor> tensors, const SgdOptions& o, int num_threads, Level level) {
  const Kernels kernels = kernels_of(level);
  const auto f = [](double x) { return static_cast<float>(x); };
  const SgdCoefficients c{f(o.weight_decay), f(o.momentum), f(-o.learning_rate), f(o.grad_scale), o.nesterov};
  return over_blocks(tensors, num_threads, [&](const Piece& piece) {
    const MomentumTensor& t = tensors[piece.tensor];
    const bool has_momentum = o.momentum != 0.0;
    return kernels.sgd(
        c, {t.weight + piece.begin, t.grad + piece.begin, has_momentum ? t.momentum + piece.begin : nullptr},
        piece.count);
  });
}

}  // namespace shoal
