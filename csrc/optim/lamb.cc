#include "optim/lamb.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/parallel.h"
#include "base/simd.h"

namespace shoal {
namespace {

// The unit of work and of the sums of squares: its boundaries never depend on the number of threads.
constexpr std::size_t kBlock = 16384;
constexpr std::size_t kLaneUnits = 16;
// Pass 1 and pass 2 follow each other over a wave of tensors of about this many elements, so that pass 2
// finds what pass 1 has touched last (12 bytes an element) in the caches; a larger tensor is a wave alone.
constexpr std::size_t kWaveElements = std::size_t{1} << 19;
constexpr std::size_t kElementsPerThread = 32768;

struct Block {
  float* weight;
  const float* grad;
  float* exp_avg;
  float* exp_avg_sq;
};

struct BlockSums {
  double grad_sq, weight_sq, update_sq;
};

struct BlockOptions {
  float beta1, one_minus_beta1, beta2, one_minus_beta2, unbias1, unbias2, eps, weight_decay, grad_scale;
};

}  // namespace

#define SHOAL_LEVEL portable
#define SHOAL_TARGET
#include "optim/lamb_kernels.inc"
#undef SHOAL_LEVEL
#undef SHOAL_TARGET

#if defined(__x86_64__)
#define SHOAL_LEVEL avx2
#define SHOAL_TARGET [[gnu::target("avx2,f16c")]]
#include "optim/lamb_kernels.inc"
#undef SHOAL_LEVEL
#undef SHOAL_TARGET

#define SHOAL_LEVEL avx512
#define SHOAL_TARGET [[gnu::target("avx512f")]]
#include "optim/lamb_kernels.inc"
#undef SHOAL_LEVEL
#undef SHOAL_TARGET
#endif

namespace {

struct Kernels {
  BlockSums (*moments)(const BlockOptions&, const Block&, std::size_t count);
  void (*apply)(const BlockOptions&, const Block&, std::size_t count, float step_size);
  double (*squares)(const float*, std::size_t count);
};

Kernels kernels_of(Level level) {
  const std::vector<Level> levels = supported_levels();
  if (std::find(levels.begin(), levels.end(), level) == levels.end()) {
    throw std::invalid_argument("this processor cannot run the level '" + std::string(name_of(level)) + "'");
  }
  switch (level) {
#if defined(__x86_64__)
    case Level::avx512: return {avx512::moments_block, avx512::apply_block, avx512::squares_block};
    case Level::avx2: return {avx2::moments_block, avx2::apply_block, avx2::squares_block};
#endif
    default: return {portable::moments_block, portable::apply_block, portable::squares_block};
  }
}

int threads_for(std::size_t num_elements, int num_threads) {
  if (num_threads < 1) {
    throw std::invalid_argument("num_threads=" + std::to_string(num_threads) + " must be at least 1");
  }
  const std::size_t worthwhile = 1 + num_elements / kElementsPerThread;
  return static_cast<int>(std::min(static_cast<std::size_t>(num_threads), worthwhile));
}

BlockOptions block_options(const LambOptions& o, double step) {
  const auto unbias = [&](double beta) { return o.bias_correction ? 1.0 / (1.0 - std::pow(beta, step)) : 1.0; };
  const auto f = [](double x) { return static_cast<float>(x); };
  return {f(o.beta1), f(1.0 - o.beta1), f(o.beta2), f(1.0 - o.beta2), f(unbias(o.beta1)), f(unbias(o.beta2)),
          f(o.eps),   f(o.weight_decay), f(o.grad_scale)};
}

// A block of one tensor, as an item of work.
struct Piece {
  std::size_t tensor;
  std::size_t begin;
  std::size_t count;
};

// All the blocks, and where each tensor's blocks begin (with one bound past the last).
struct Plan {
  std::vector<Piece> pieces;
  std::vector<std::size_t> first_of_tensor;
};

template <class Tensor>
Plan plan_of(std::span<const Tensor> tensors) {
  Plan plan;
  for (std::size_t tensor = 0; tensor < tensors.size(); ++tensor) {
    plan.first_of_tensor.push_back(plan.pieces.size());
    for (std::size_t begin = 0; begin < tensors[tensor].count; begin += kBlock) {
      plan.pieces.push_back({tensor, begin, std::min(kBlock, tensors[tensor].count - begin)});
    }
  }
  plan.first_of_tensor.push_back(plan.pieces.size());
  return plan;
}

// One call's update, shared by its threads.
class Step {
 public:
  Step(std::span<const LambTensor> tensors, const LambOptions& options, const Kernels& kernels)
      : tensors_(tensors), options_(options), kernels_(kernels), plan_(plan_of(tensors)) {
    sums_.resize(plan_.pieces.size());
    for (const LambTensor& tensor : tensors) block_options_.push_back(block_options(options, tensor.step));
    order_waves();
    claims_.emplace(tasks_.size());
    missing_ = std::vector<std::atomic<std::size_t>>(waves_.size());
    for (std::size_t wave = 0; wave < waves_.size(); ++wave) missing_[wave] = waves_[wave].num_blocks + 1;
    step_size_.resize(tensors.size());
  }

  // On each thread: claims tasks in order. A task of pass 2 waits for the norms of its wave, that is for
  // the few blocks that other threads are still working on.
  void run() {
    for (std::size_t at; claims_->next(at);) {
      const Task& task = tasks_[at];
      std::atomic<std::size_t>& missing = missing_[task.wave];
      if (task.pass == 1) {
        take_moments(task.piece);
        if (missing.fetch_sub(1) == 2) {  // the last block: only the norms are missing
          for (std::size_t t = waves_[task.wave].first; t < waves_[task.wave].end; ++t) {
            step_size_[t] = static_cast<float>(options_.learning_rate * trust_ratio(t));
          }
          missing.store(0);
          missing.notify_all();
        }
      } else {
        for (std::size_t left; (left = missing.load()) != 0;) missing.wait(left);
        apply(task.piece);
      }
    }
  }

  LambNorms norms() const {
    LambNorms norms{0.0, 0.0};
    for (const BlockSums& sums : sums_) {
      norms.grad_sq += sums.grad_sq;
      norms.weight_sq += sums.weight_sq;
    }
    return norms;
  }

 private:
  struct Task {
    std::size_t piece;
    std::size_t wave;
    int pass;
  };
  struct Wave {  // the tensors [first, end)
    std::size_t first;
    std::size_t end;
    std::size_t num_blocks;
  };

  // Pass 1 over a wave, then pass 2 backwards: the blocks that pass 1 has left in the caches come first.
  void order_waves() {
    for (std::size_t first = 0, end; first < tensors_.size(); first = end) {
      std::size_t num_elements = tensors_[first].count;
      for (end = first + 1; end < tensors_.size(); ++end) {
        num_elements += tensors_[end].count;
        if (num_elements > kWaveElements) break;
      }
      const std::size_t begin_block = plan_.first_of_tensor[first], end_block = plan_.first_of_tensor[end];
      for (std::size_t at = begin_block; at < end_block; ++at) tasks_.push_back({at, waves_.size(), 1});
      for (std::size_t at = end_block; at-- > begin_block;) tasks_.push_back({at, waves_.size(), 2});
      waves_.push_back({first, end, end_block - begin_block});
    }
  }

  void take_moments(std::size_t at) {
    const Piece& piece = plan_.pieces[at];
    sums_[at] = kernels_.moments(block_options_[piece.tensor], block_of(piece), piece.count);
  }

  void apply(std::size_t at) {
    const Piece& piece = plan_.pieces[at];
    kernels_.apply(block_options_[piece.tensor], block_of(piece), piece.count, step_size_[piece.tensor]);
  }

  double trust_ratio(std::size_t tensor) const {
    if (!options_.trust_ratio) return 1.0;
    double weight_sq = 0.0, update_sq = 0.0;
    for (std::size_t at = plan_.first_of_tensor[tensor]; at < plan_.first_of_tensor[tensor + 1]; ++at) {
      weight_sq += sums_[at].weight_sq;
      update_sq += sums_[at].update_sq;
    }
    return weight_sq > 0.0 && update_sq > 0.0 ? std::sqrt(weight_sq) / std::sqrt(update_sq) : 1.0;
  }

  Block block_of(const Piece& piece) const {
    const LambTensor& t = tensors_[piece.tensor];
    return {t.weight + piece.begin, t.grad + piece.begin, t.exp_avg + piece.begin, t.exp_avg_sq + piece.begin};
  }

  std::span<const LambTensor> tensors_;
  const LambOptions& options_;
  Kernels kernels_;
  Plan plan_;
  std::vector<BlockOptions> block_options_;
  std::vector<BlockSums> sums_;
  std::vector<Task> tasks_;
  std::vector<Wave> waves_;
  std::vector<std::atomic<std::size_t>> missing_;  // 1 + the wave's blocks that pass 1 has not finished, or 0
  std::vector<float> step_size_;                   // learning rate times trust ratio, by tensor
  std::optional<Claims> claims_;
};

template <class Tensor>
std::size_t num_elements(std::span<const Tensor> tensors) {
  std::size_t total = 0;
  for (const Tensor& tensor : tensors) total += tensor.count;
  return total;
}

}  // namespace

LambNorms lamb_step(std::span<const LambTensor> tensors, const LambOptions& options, int num_threads,
                    Level level) {
  Step step(tensors, options, kernels_of(level));
  run_on_threads(threads_for(num_elements(tensors), num_threads), [&] { step.run(); });
  return step.norms();
}

double sum_of_squares(std::span<const ConstTensor> tensors, int num_threads, Level level) {
  const Kernels kernels = kernels_of(level);
  const Plan plan = plan_of(tensors);
  std::vector<double> sums(plan.pieces.size());
  Claims claims(plan.pieces.size());
  run_on_threads(threads_for(num_elements(tensors), num_threads), [&] {
    for (std::size_t at; claims.next(at);) {
      const Piece& piece = plan.pieces[at];
      sums[at] = kernels.squares(tensors[piece.tensor].values + piece.begin, piece.count);
    }
  });
  double total = 0.0;
  for (double sum : sums) total += sum;
  return total;
}

}  // namespace shoal
