#include "engine/served_weights.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <utility>

#include "base/machine_memory.h"
#include "engine/reduce.h"
#include "engine/errors.h"
#include "optim/adafactor.h"
#include "optim/elementwise.h"
#include "optim/unit_sums.h"

namespace shoal {

namespace {

using Optimizer = Rule::Optimizer;
using Coefficients = std::array<float, kCoefficients>;

constexpr float kMaxColumns = 1 << 24;  // whole numbers below it are exact
constexpr std::size_t kGroupBytes = sizeof(GroupOptions);
static_assert(kServedUnit == kSumUnit && sizeof(UnitSums) == kSums * sizeof(double));
static_assert(sizeof(Motion) <= sizeof(Coefficients));

std::string name_of_piece(const FrameHeader& header) {
  return "piece " + std::to_string(header.chunk) + " of tensor " + std::to_string(header.table);
}

std::string too_early(const FrameHeader& header) {
  return "a " + std::string(name_of(header.kind)) + " of " + name_of_piece(header) + ", whose gradient has not come or needs none";
}

bool needs_norms(Optimizer optimizer) { return optimizer >= Optimizer::lamb; }

Element element_of(Kind kind) {
  if (kind == Kind::configure) return Element::uint8;
  return kind == Kind::update || kind == Kind::collect ? Element::float32 : Element::int32;
}

MomentsTensor moments_of(std::array<std::vector<float>, 3>& slots, const float* grad, std::uint32_t step) {
  return {slots[0].data(), grad, slots[1].data(), slots[2].data(), slots[0].size(), static_cast<double>(step)};
}

LambOptions lamb_options(const GroupOptions& o) { return {o[0], o[1], o[2], o[3], o[4], 1.0, o[5] != 0.0, true}; }

MomentsOptions lans_options(const GroupOptions& o) { return {o[0], o[1], o[2], o[3], o[4], 1.0}; }

// The kernels give the same bits for a tensor that is cut anywhere.
void step_elementwise(std::array<std::vector<float>, 3>& slots, Optimizer optimizer, const GroupOptions& o,
                      const float* grad, std::uint32_t step) {
  if (optimizer == Optimizer::adamw) {
    const MomentsTensor tensor = moments_of(slots, grad, step);
    adamw_step(std::span(&tensor, 1), {o[0], o[1], o[2], o[3], o[4], 1.0}, 1);
    return;
  }
  const MomentumTensor tensor{slots[0].data(), grad, slots[1].data(), slots[0].size()};
  sgd_step(std::span(&tensor, 1), {o[0], o[1], o[2], 1.0, o[3] != 0.0}, 1);
}

// Rounds as workers do, which multiply their gradients before the step.
void scale_gradient(std::vector<float>& grad, float factor) {
  if (factor == 1.0f) return;
  for (float& each : grad) each *= factor;
}

// Reads the coefficients. Returns an empty string, or what is wrong.
std::string read_coefficients(Coefficients& to, const FrameHeader& header, const std::byte* data, std::size_t bytes) {
  if (bytes != sizeof to) return "coefficients of " + std::to_string(bytes) + " bytes for " + name_of_piece(header);
  std::memcpy(to.data(), data, sizeof to);
  const bool finite = std::ranges::all_of(to, [](float each) { return std::isfinite(each); });
  return finite ? "" : "coefficients that are not finite for " + name_of_piece(header);
}

}  // namespace

WeightBudget::WeightBudget(std::size_t bytes) : max_bytes(bytes ? bytes : half_of_memory()) {}

void ServedWeights::clear() {
  pieces_.clear();
  rules_.clear();
  budget_.used_bytes -= std::exchange(used_bytes_, 0);
}

bool ServedWeights::is_early(const FrameHeader& header) const {
  const Kind kind = header.kind;
  if (kind != Kind::update && !sends_coefficients(kind)) return false;
  const auto piece = pieces_.find({header.table, header.chunk});
  if (piece == pieces_.end()) return false;
  const auto rule = rules_.find(piece->second.model);
  return header.rule == (rule == rules_.end() ? 0 : rule->second.number) + 1;
}

std::string ServedWeights::take(const FrameHeader& header, Payload& sum) {
  const Kind kind = header.kind;
  const Element given = header.input, answer = header.element;
  const bool answers = returns_weights(kind) ? answer == Element::float32 || answer == Element::bfloat16 : answer == given;
  if (given != element_of(kind) || !answers || sum.size() == 0 || sum.size() % size_of(given) != 0) {
    return "a " + std::string(name_of(kind)) + " of " + std::to_string(sum.size()) + " bytes of " +
           std::string(name_of(given)) + " for " + std::string(name_of(answer));
  }
  switch (kind) {
    case Kind::configure: return configure(header.table, sum.data(), sum.size());
    case Kind::load: return load(header, sum.data(), sum.size());
    case Kind::dump: return dump(header, sum);
    case Kind::collect: return collect(header, sum);
    case Kind::measure: return measure(header, sum);
    case Kind::factor: return factor(header, sum);
    case Kind::normalise: return normalise(header, sum);
    case Kind::apply: return apply(header, sum);
    default: return update(header, sum);
  }
}

std::string ServedWeights::configure(std::uint32_t model, const std::byte* data, std::size_t bytes) {
  std::array<std::uint32_t, 4> head{};
  static_assert(sizeof head == kOptionHeadBytes);
  if (bytes < sizeof head) return "options of " + std::to_string(bytes) + " bytes";
  std::memcpy(head.data(), data, sizeof head);
  const auto [number, optimizer, num_groups, zero] = head;
  if (optimizer > static_cast<std::uint32_t>(Optimizer::adafactor) || zero != 0 || bytes > kMaxOptionBytes ||
      bytes != sizeof head + num_groups * kGroupBytes) {
    return "options of " + std::to_string(bytes) + " bytes for optimizer " + std::to_string(optimizer) + " with " +
           std::to_string(num_groups) + " groups";
  }
  if (model >= kMaxModels) return "options of model " + std::to_string(model);
  const auto known = rules_.find(model);
  const std::uint32_t last = known == rules_.end() ? 0 : known->second.number;
  if (number != last + 1) return "options number " + std::to_string(number) + " after number " + std::to_string(last);
  Rule rule{number, static_cast<Optimizer>(optimizer), {}};
  rule.groups.resize(num_groups);
  std::memcpy(rule.groups.data(), data + sizeof head, num_groups * kGroupBytes);
  for (const auto& group : rule.groups) {
    for (const double value : group) {
      if (!std::isfinite(value)) return "options that are not finite";
    }
  }
  reserve(num_groups * kGroupBytes);
  Rule& in_force = rules_[model];
  const std::size_t freed = in_force.groups.size() * kGroupBytes;
  in_force = std::move(rule);
  used_bytes_ -= freed;
  budget_.used_bytes -= freed;
  return "";
}

void ServedWeights::reserve(std::size_t bytes) {
  if (budget_.used_bytes.fetch_add(bytes) + bytes > budget_.max_bytes) {
    budget_.used_bytes -= bytes;
    throw GroupFailure("a server has no memory left: weights, optimizer state and options need more than the " +
                       std::to_string(budget_.max_bytes) + " bytes that it keeps; use more helpers, or give them more "
                       "memory (shoal serve --weights-mib)");
  }
  used_bytes_ += bytes;
}

// Makes a slot of so many numbers, all 0, within the budget.
void ServedWeights::make_room(std::vector<float>& slot, std::size_t count) {
  if (!slot.empty()) return;
  reserve(count * sizeof(float));
  slot.assign(count, 0.0f);
}

void ServedWeights::make_state(Piece& piece, const Rule& rule, const GroupOptions& options) {
  const bool moments = rule.optimizer == Optimizer::adamw || rule.optimizer == Optimizer::lamb ||
                       rule.optimizer == Optimizer::lans;
  const bool plain = rule.optimizer == Optimizer::sgd && options[1] == 0.0;
  const std::size_t slots = moments ? 2 : plain ? 0 : 1;
  for (std::size_t slot = 1; slot <= slots; ++slot) make_room(piece.slots[slot], piece.slots[0].size());
}

// The weights of a piece, rounded to nearest even if they are asked for as bfloat16.
Payload ServedWeights::weights_of(const Piece& piece, const FrameHeader& header) {
  const Element answer = header.element;
  const std::vector<float>& weights = piece.slots[0];
  Payload reply = pool_.payload(weights.size() * size_of(answer));
  combine_in_order(reply.writable(), {weights.data()}, weights.size(), {Combine::sum, answer, Element::float32, 1});
  return reply;
}

Payload ServedWeights::reply_of(const void* sums, std::size_t bytes) {
  Payload reply = pool_.payload(bytes);
  std::memcpy(reply.writable(), sums, bytes);
  return reply;
}

std::string ServedWeights::load(const FrameHeader& header, const std::byte* data, std::size_t bytes) {
  if (header.root < 0 || header.root >= kSlots) return "slot " + std::to_string(header.root) + " of a tensor";
  if (header.rule >= kMaxModels) return "weights of model " + std::to_string(header.rule);
  const Key key{header.table, header.chunk};
  if (!pieces_.count(key)) reserve(kPieceBytes);
  Piece& piece = pieces_[key];
  const std::size_t count = bytes / sizeof(float);
  const auto& weights = piece.slots[0];
  if (header.root == 0 ? !weights.empty() && weights.size() != count : weights.size() != count) {
    return name_of_piece(header) + " of " + std::to_string(count) + " numbers where " + std::to_string(weights.size()) +
           " weights are kept";
  }
  if (header.root != 0 && piece.step != header.step) {
    return "state after " + std::to_string(header.step) + " updates for weights after " + std::to_string(piece.step);
  }
  std::vector<float>& slot = piece.slots[static_cast<std::size_t>(header.root)];
  make_room(slot, count);
  std::memcpy(slot.data(), data, bytes);
  piece.step = header.step;
  piece.model = header.rule;
  piece.phase = Phase::idle;
  return "";
}

std::string ServedWeights::dump(const FrameHeader& header, Payload& sum) {
  const auto found = pieces_.find({header.table, header.chunk});
  if (header.root < 0 || header.root >= kSlots || found == pieces_.end()) {
    return "slot " + std::to_string(header.root) + " of " + name_of_piece(header) + ", which is not kept here";
  }
  const std::vector<float>& slot = found->second.slots[static_cast<std::size_t>(header.root)];
  if (slot.size() * sizeof(float) != sum.size() || found->second.step != header.step) {
    return std::to_string(sum.size()) + " bytes of " + name_of_piece(header) + " after " + std::to_string(header.step) +
           " updates, where " + std::to_string(slot.size() * sizeof(float)) + " bytes after " +
           std::to_string(found->second.step) + " are kept";
  }
  std::memcpy(sum.writable(), slot.data(), sum.size());
  return "";
}

ServedWeights::Target ServedWeights::target_of(const FrameHeader& header) {
  const auto found = pieces_.find({header.table, header.chunk});
  if (found == pieces_.end() || found->second.slots[0].empty()) {
    return {.wrong = "an update of " + name_of_piece(header) + ", which is not kept here"};
  }
  Piece& piece = found->second;
  if (header.step != piece.step + 1) {
    return {.wrong = "update number " + std::to_string(header.step) + " of " + name_of_piece(header) + ", which has taken " +
                     std::to_string(piece.step)};
  }
  if (header.kind == Kind::collect) return {&piece, nullptr, nullptr, ""};
  const Rule& rule = rules_[piece.model];
  if (header.rule != rule.number || header.root < 0 || static_cast<std::size_t>(header.root) >= rule.groups.size()) {
    return {.wrong = "an update by group " + std::to_string(header.root) + " of options number " +
                     std::to_string(header.rule) + ", where number " + std::to_string(rule.number) + " with " +
                     std::to_string(rule.groups.size()) + " groups is in force"};
  }
  return {&piece, &rule, &rule.groups[static_cast<std::size_t>(header.root)], ""};
}

std::string ServedWeights::update(const FrameHeader& header, Payload& sum) {
  Target at = target_of(header);
  if (!at.wrong.empty()) return at.wrong;
  Piece& piece = *at.piece;
  if (piece.slots[0].size() * sizeof(float) != sum.size() || needs_norms(at.rule->optimizer)) {
    return "a gradient of " + std::to_string(sum.size()) + " bytes for optimizer " +
           std::to_string(static_cast<int>(at.rule->optimizer)) + " and " + name_of_piece(header) + ", of which " +
           std::to_string(piece.slots[0].size() * sizeof(float)) + " bytes are kept";
  }
  make_state(piece, *at.rule, *at.options);
  piece.step = header.step;
  piece.phase = Phase::idle;
  step_elementwise(piece.slots, at.rule->optimizer, *at.options, reinterpret_cast<const float*>(sum.data()), piece.step);
  if (header.element == Element::float32) std::memcpy(sum.writable(), piece.slots[0].data(), sum.size());
  else sum = weights_of(piece, header);
  return "";
}

std::string ServedWeights::collect(const FrameHeader& header, Payload& sum) {
  Target at = target_of(header);
  if (!at.wrong.empty()) return at.wrong;
  Piece& piece = *at.piece;
  const bool is_early = piece.phase == Phase::idle || piece.phase == Phase::collected;
  if (piece.slots[0].size() * sizeof(float) != sum.size() || !is_early) {
    return "a gradient of " + std::to_string(sum.size()) + " bytes for " + name_of_piece(header) + ", of which " +
           std::to_string(piece.slots[0].size() * sizeof(float)) + " bytes are kept, " +
           (is_early ? "before an update" : "in the middle of an update");
  }
  make_room(piece.grad, piece.slots[0].size());
  std::memcpy(piece.grad.data(), sum.data(), sum.size());
  piece.phase = Phase::collected;
  std::vector<UnitSums> sums(num_units(piece.grad.size()));
  squares_of_units(piece.grad.data(), piece.grad.size(), sums.data());
  sum = reply_of(sums.data(), sums.size() * sizeof(UnitSums));
  return "";
}

std::string ServedWeights::measure(const FrameHeader& header, Payload& sum) {
  Target at = target_of(header);
  Coefficients given{};
  if (at.wrong.empty()) at.wrong = read_coefficients(given, header, sum.data(), sum.size());
  if (!at.wrong.empty()) return at.wrong;
  Piece& piece = *at.piece;
  if (piece.phase != Phase::collected || !needs_norms(at.rule->optimizer)) return too_early(header);
  make_state(piece, *at.rule, *at.options);
  piece.phase = Phase::measured;
  scale_gradient(piece.grad, given[0]);
  std::vector<UnitSums> sums(num_units(piece.grad.size()));
  if (at.rule->optimizer == Optimizer::lamb) {
    lamb_measure(moments_of(piece.slots, piece.grad.data(), header.step), lamb_options(*at.options), sums.data());
  } else if (at.rule->optimizer == Optimizer::lans) {
    lans_measure(moments_of(piece.slots, piece.grad.data(), header.step), lans_options(*at.options), sums.data());
  } else if (at.rule->optimizer == Optimizer::lars) {
    const MomentumTensor tensor{piece.slots[0].data(), piece.grad.data(), piece.slots[1].data(), piece.grad.size()};
    lars_measure(tensor, (*at.options)[0], sums.data());
  } else if (at.rule->optimizer == Optimizer::adafactor) {
    const auto eps1 = static_cast<float>((*at.options)[0]);
    adafactor_normalise(piece.grad.data(), piece.slots[1].data(), piece.grad.size(), given[1], eps1);
    adafactor_measure(piece.slots[0].data(), piece.grad.data(), piece.grad.size(), sums.data());
  } else {
    squares_of_units(piece.grad.data(), piece.grad.size(), sums.data());
  }
  sum = reply_of(sums.data(), sums.size() * sizeof(UnitSums));
  return "";
}

std::string ServedWeights::factor(const FrameHeader& header, Payload& sum) {
  Target at = target_of(header);
  Coefficients given{};
  if (at.wrong.empty()) at.wrong = read_coefficients(given, header, sum.data(), sum.size());
  if (!at.wrong.empty()) return at.wrong;
  Piece& piece = *at.piece;
  if (piece.phase != Phase::collected || at.rule->optimizer != Optimizer::adafactor) return too_early(header);
  const bool in_row = given[1] >= 1.0f && given[1] < kMaxColumns && given[2] >= 0.0f && given[2] < given[1];
  if (!in_row || std::floor(given[1]) != given[1] || piece.grad.size() > kFactorPart) {
    return "a row of " + std::to_string(given[1]) + " columns for " + name_of_piece(header) + " of " +
           std::to_string(piece.grad.size()) + " numbers, which begins at " + std::to_string(given[2]);
  }
  piece.part = {piece.grad.size(), static_cast<std::size_t>(given[2]), static_cast<std::size_t>(given[1])};
  piece.phase = Phase::factored;
  scale_gradient(piece.grad, given[0]);
  std::vector<float> sums(factor_numbers(piece.part.columns));
  adafactor_squares(piece.grad.data(), piece.part, sums.data());
  sum = reply_of(sums.data(), sums.size() * sizeof(float));
  return "";
}

std::string ServedWeights::normalise(const FrameHeader& header, Payload& sum) {
  Target at = target_of(header);
  if (!at.wrong.empty()) return at.wrong;
  Piece& piece = *at.piece;
  if (piece.phase != Phase::factored) return too_early(header);
  std::vector<float> factors(factor_numbers(piece.part.columns));
  if (sum.size() != factors.size() * sizeof(float)) {
    return std::to_string(sum.size()) + " bytes of factors for " + name_of_piece(header) + " with " +
           std::to_string(piece.part.columns) + " columns";
  }
  std::memcpy(factors.data(), sum.data(), sum.size());
  piece.phase = Phase::measured;
  adafactor_normalise(piece.grad.data(), piece.part, factors.data());
  std::vector<UnitSums> sums(num_units(piece.grad.size()));
  adafactor_measure(piece.slots[0].data(), piece.grad.data(), piece.grad.size(), sums.data());
  sum = reply_of(sums.data(), sums.size() * sizeof(UnitSums));
  return "";
}

std::string ServedWeights::apply(const FrameHeader& header, Payload& sum) {
  Target at = target_of(header);
  Coefficients given{};
  if (at.wrong.empty()) at.wrong = read_coefficients(given, header, sum.data(), sum.size());
  if (!at.wrong.empty()) return at.wrong;
  Piece& piece = *at.piece;
  const Optimizer optimizer = at.rule->optimizer;
  if (piece.phase != (needs_norms(optimizer) ? Phase::measured : Phase::collected)) {
    return "an apply to " + name_of_piece(header) + ", whose gradient has not come or was not measured";
  }
  if (optimizer != Optimizer::adafactor) make_state(piece, *at.rule, *at.options);  // a matrix has none here
  piece.step = header.step;
  piece.phase = Phase::idle;
  if (optimizer == Optimizer::lamb) {
    lamb_move(moments_of(piece.slots, piece.grad.data(), piece.step), lamb_options(*at.options), given[0]);
  } else if (optimizer == Optimizer::lans) {
    lans_move(moments_of(piece.slots, piece.grad.data(), piece.step), lans_options(*at.options), {given[0], given[1]});
  } else if (optimizer == Optimizer::adafactor) {
    adafactor_move(piece.slots[0].data(), piece.grad.data(), piece.grad.size(), {given[0], given[1]});
  } else if (needs_norms(optimizer)) {
    const MomentumTensor tensor{piece.slots[0].data(), piece.grad.data(), piece.slots[1].data(), piece.grad.size()};
    move_by(tensor, {given[0], given[1], given[2], given[3], given[4], given[5]});
  } else {
    scale_gradient(piece.grad, given[0]);
    step_elementwise(piece.slots, optimizer, *at.options, piece.grad.data(), piece.step);
  }
  sum = weights_of(piece, header);
  return "";
}

}  // namespace shoal
