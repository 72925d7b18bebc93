#include "optim/adafactor.h"

#include <array>
#include <cmath>
#include <vector>

#include "base/parallel.h"
#include "optim/lamb.h"

namespace shoal {
namespace {

constexpr double kLeastRms = 1e-3;  // of the weights, to which a step is relative
constexpr std::size_t kSquareLanes = 16;
constexpr std::size_t kUnitsOfPart = kFactorPart / kSumUnit;

float narrow(double x) { return static_cast<float>(x); }

// Calls `visit(row, slot, begin, count)` for each row that a part touches: its elements from `begin` are in the row of
// number `row`, counted from the first one, and belong to the columns' numbers from `slot` on.
template <class Visit>
void for_rows(const FactorPart& part, const Visit& visit) {
  std::size_t row = 0, column = part.offset;
  for (std::size_t begin = 0; begin < part.count; ++row, column = 0) {
    const std::size_t end = std::min(begin + part.columns - column, part.count);
    // the columns' numbers of a row wrap where the part began within one
    for (std::size_t at = begin; at < end;) {
      const std::size_t slot = at % part.columns, count = std::min(end - at, part.columns - slot);
      visit(row, slot, at, count);
      at += count;
    }
    begin = end;
  }
}

// Sums squares in sixteen lanes, and adds them to `columns`.
float squares_of_row(const float* grad, float* columns, std::size_t count) {
  std::array<float, kSquareLanes> lanes{};
  const std::size_t whole = count / kSquareLanes * kSquareLanes;
  for (std::size_t at = 0; at < whole; at += kSquareLanes) {
    for (std::size_t k = 0; k < kSquareLanes; ++k) {
      const float square = grad[at + k] * grad[at + k];
      lanes[k] += square;
      columns[at + k] += square;
    }
  }
  for (std::size_t at = whole; at < count; ++at) {
    const float square = grad[at] * grad[at];
    lanes[at - whole] += square;
    columns[at] += square;
  }
  float total = 0.0f;
  for (const float lane : lanes) total += lane;
  return total;
}

// Calls `visit(part, numbers, first_row)` for each part of a matrix, with its numbers among those of all parts.
template <class Number, class Visit>
void for_parts(std::size_t count, std::size_t columns, Number* numbers, const Visit& visit) {
  for (std::size_t begin = 0; begin < count; begin += kFactorPart, numbers += factor_numbers(columns)) {
    visit(FactorPart{std::min(kFactorPart, count - begin), begin % columns, columns}, numbers, begin / columns);
  }
}

// Returns the rows that a part touches, and its numbers of columns.
std::size_t rows_of(const FactorPart& part) { return (part.offset + part.count + part.columns - 1) / part.columns; }
std::size_t slots_of(const FactorPart& part) { return std::min(part.count, part.columns); }

void blend(const std::vector<double>& sums, double length, double share, double eps1, float* into) {
  for (std::size_t k = 0; k < sums.size(); ++k) {
    into[k] = narrow(into[k] + share * (sums[k] / length + eps1 - into[k]));
  }
}

void scale_part(float* to, const float* grad, std::size_t count, float scale) {
  for (std::size_t k = 0; k < count; ++k) to[k] = scale == 1.0f ? grad[k] : grad[k] * scale;
}

// Takes the step of one tensor, in passes over its parts.
class Stepper {
 public:
  Stepper(const AdafactorTensor& tensor, const AdafactorOptions& options, int num_threads, Level level)
      : tensor_(tensor), options_(options), num_threads_(num_threads), level_(level), units_(num_units(tensor.count)),
        grad_sums_(units_.size()) {}

  Norms run() {
    const std::size_t columns = tensor_.columns;
    if (columns != 0) {
      std::vector<float> sums(factor_parts(tensor_.count) * factor_numbers(columns));
      factors_.resize(sums.size());
      over_parts([&](std::size_t index, float* update) {
        adafactor_squares(update, part_at(index), sums.data() + index * factor_numbers(columns));
      });
      adafactor_decide(sums.data(), tensor_.count, columns, tensor_.share, options_.eps1, tensor_.row_var, tensor_.col_var,
                       factors_.data());
    }
    over_parts([&](std::size_t index, float* update) {
      const std::size_t begin = index * kFactorPart, count = part_at(index).count;
      squares_of_units(update, count, grad_sums_.data() + index * kUnitsOfPart, level_);
      normalise(index, update, true);
      adafactor_measure(tensor_.weight + begin, update, count, units_.data() + index * kUnitsOfPart, level_);
    });
    double ignored = 0.0, grad_sq = 0.0;
    const UnitSums total = total_of(units_, ignored);
    const AdafactorMove move = adafactor_move_of(options_.learning_rate, options_.weight_decay, total, tensor_.count);
    over_parts([&](std::size_t index, float* update) {
      normalise(index, update, false);
      adafactor_move(tensor_.weight + index * kFactorPart, update, part_at(index).count, move);
    });
    total_of(grad_sums_, grad_sq);
    return {grad_sq, total.weight_sq};
  }

 private:
  FactorPart part_at(std::size_t index) const {
    const std::size_t begin = index * kFactorPart;
    return {std::min(kFactorPart, tensor_.count - begin), tensor_.columns ? begin % tensor_.columns : 0, tensor_.columns};
  }

  // Calls `work(index, gradient)` for each part on threads, with a scaled copy of its gradient.
  template <class Work>
  void over_parts(const Work& work) const {
    Claims claims(factor_parts(tensor_.count));
    run_on_threads(threads_for(std::span(&tensor_, 1), num_threads_), [&] {
      std::array<float, kFactorPart> copy;
      for (std::size_t index; claims.next(index);) {
        scale_part(copy.data(), tensor_.grad + index * kFactorPart, part_at(index).count, narrow(options_.grad_scale));
        work(index, copy.data());
      }
    });
  }

  void normalise(std::size_t index, float* update, bool takes_in) const {
    const FactorPart part = part_at(index);
    if (tensor_.columns != 0) {
      adafactor_normalise(update, part, factors_.data() + index * factor_numbers(tensor_.columns));
    } else if (takes_in) {
      adafactor_normalise(update, tensor_.row_var + index * kFactorPart, part.count, narrow(tensor_.share),
                          narrow(options_.eps1));
    } else {
      const float* variance = tensor_.row_var + index * kFactorPart;
      for (std::size_t k = 0; k < part.count; ++k) update[k] /= std::sqrt(variance[k]);
    }
  }

  const AdafactorTensor& tensor_;
  const AdafactorOptions& options_;
  const int num_threads_;
  const Level level_;
  std::vector<UnitSums> units_, grad_sums_;
  std::vector<float> factors_;
};

}  // namespace

void adafactor_squares(const float* grad, const FactorPart& part, float* sums) {
  std::fill_n(sums, factor_numbers(part.columns), 0.0f);
  float* columns = sums + factor_rows(part.columns);
  for_rows(part, [&](std::size_t row, std::size_t slot, std::size_t begin, std::size_t count) {
    sums[row] += squares_of_row(grad + begin, columns + slot, count);
  });
}

void adafactor_decide(const float* sums, std::size_t count, std::size_t columns, double share, double eps1, float* row_var,
                      float* col_var, float* factors) {
  const std::size_t rows = count / columns;
  std::vector<double> of_rows(rows), of_columns(columns);
  for_parts(count, columns, sums, [&](const FactorPart& part, const float* numbers, std::size_t first) {
    for (std::size_t k = 0; k < rows_of(part); ++k) of_rows[first + k] += numbers[k];
    numbers += factor_rows(columns);
    for (std::size_t k = 0; k < slots_of(part); ++k) of_columns[(part.offset + k) % columns] += numbers[k];
  });
  blend(of_rows, static_cast<double>(columns), share, eps1, row_var);
  blend(of_columns, static_cast<double>(rows), share, eps1, col_var);
  double mean = 0.0;
  for (std::size_t k = 0; k < rows; ++k) mean += row_var[k];
  mean /= static_cast<double>(rows);
  for_parts(count, columns, factors, [&](const FactorPart& part, float* numbers, std::size_t first) {
    std::fill_n(numbers, factor_numbers(columns), 0.0f);
    for (std::size_t k = 0; k < rows_of(part); ++k) numbers[k] = narrow(1.0 / std::sqrt(row_var[first + k] / mean));
    numbers += factor_rows(columns);
    for (std::size_t k = 0; k < slots_of(part); ++k) {
      numbers[k] = narrow(1.0 / std::sqrt(static_cast<double>(col_var[(part.offset + k) % columns])));
    }
  });
}

void adafactor_normalise(float* grad, const FactorPart& part, const float* factors) {
  const float* columns = factors + factor_rows(part.columns);
  for_rows(part, [&](std::size_t row, std::size_t slot, std::size_t begin, std::size_t count) {
    for (std::size_t k = 0; k < count; ++k) grad[begin + k] = grad[begin + k] * factors[row] * columns[slot + k];
  });
}

void adafactor_normalise(float* grad, float* variance, std::size_t count, float share, float eps1) {
  for (std::size_t k = 0; k < count; ++k) {
    variance[k] += share * (grad[k] * grad[k] + eps1 - variance[k]);
    grad[k] /= std::sqrt(variance[k]);
  }
}

void adafactor_measure(const float* weights, const float* updates, std::size_t count, UnitSums* sums, Level level) {
  std::vector<UnitSums> of_weights(num_units(count));
  squares_of_units(weights, count, of_weights.data(), level);
  squares_of_units(updates, count, sums, level);
  for (std::size_t k = 0; k < of_weights.size(); ++k) sums[k] = {0.0, of_weights[k].grad_sq, sums[k].grad_sq};
}

AdafactorMove adafactor_move_of(double learning_rate, double weight_decay, const UnitSums& total, std::size_t count) {
  const auto rms = [&](double sum) { return std::sqrt(sum / static_cast<double>(count)); };
  const double size = learning_rate * std::max(rms(total.weight_sq), kLeastRms) / std::max(rms(total.other_sq), 1.0);
  return {narrow(1.0 - learning_rate * weight_decay), narrow(size)};
}

void adafactor_move(float* weights, const float* updates, std::size_t count, const AdafactorMove& move) {
  for (std::size_t k = 0; k < count; ++k) weights[k] = weights[k] * move.keep - updates[k] * move.size;
}

Norms adafactor_step(std::span<const AdafactorTensor> tensors, const AdafactorOptions& options, int num_threads, Level level) {
  Norms norms{0.0, 0.0};
  for (const AdafactorTensor& tensor : tensors) {
    const Norms of_tensor = Stepper(tensor, options, num_threads, level).run();
    norms.grad_sq += of_tensor.grad_sq;
    norms.weight_sq += of_tensor.weight_sq;
  }
  return norms;
}

}  // namespace shoal
