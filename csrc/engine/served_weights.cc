#include "engine/served_weights.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <utility>

#include "optim/elementwise.h"

namespace shoal {

namespace {

constexpr std::size_t kGroupBytes = 6 * sizeof(double);

std::string name_of_piece(const FrameHeader& header) {
  return "piece " + std::to_string(header.chunk) + " of tensor " + std::to_string(header.table);
}

std::size_t half_of_memory() {
  const auto pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGE_SIZE);
  return pages > 0 && size > 0 ? static_cast<std::size_t>(pages) * static_cast<std::size_t>(size) / 2 : std::size_t{1} << 32;
}

}  // namespace

WeightBudget::WeightBudget(std::size_t bytes) : max_bytes(bytes ? bytes : half_of_memory()) {}

void ServedWeights::clear() {
  pieces_.clear();
  rule_ = {};
  budget_.used_bytes -= std::exchange(used_bytes_, 0);
}

std::string ServedWeights::take(const FrameHeader& header, std::byte* sum, std::size_t bytes) {
  const auto kind = static_cast<Kind>(header.kind);
  const Element element = kind == Kind::configure ? Element::uint8 : kind == Kind::update ? Element::float32 : Element::int32;
  if (static_cast<Element>(header.element) != element || static_cast<Element>(header.input) != element || bytes == 0) {
    return "a " + std::string(name_of(kind)) + " of " + std::to_string(bytes) + " bytes of " +
           std::string(name_of(static_cast<Element>(header.element)));
  }
  switch (kind) {
    case Kind::configure: return configure(sum, bytes);
    case Kind::load: return load(header, sum, bytes);
    case Kind::dump: return dump(header, sum, bytes);
    default: return update(header, sum, bytes);
  }
}

std::string ServedWeights::configure(const std::byte* data, std::size_t bytes) {
  std::array<std::uint32_t, 4> head{};
  if (bytes < sizeof head) return "options of " + std::to_string(bytes) + " bytes";
  std::memcpy(head.data(), data, sizeof head);
  const auto [number, optimizer, num_groups, zero] = head;
  if (optimizer > static_cast<std::uint32_t>(Rule::Optimizer::adamw) || zero != 0 || bytes != sizeof head + num_groups * kGroupBytes) {
    return "options of " + std::to_string(bytes) + " bytes for optimizer " + std::to_string(optimizer) + " with " +
           std::to_string(num_groups) + " groups";
  }
  if (number != rule_.number + 1) {
    return "options number " + std::to_string(number) + " after number " + std::to_string(rule_.number);
  }
  Rule rule{number, static_cast<Rule::Optimizer>(optimizer), {}};
  rule.groups.resize(num_groups);
  std::memcpy(rule.groups.data(), data + sizeof head, num_groups * kGroupBytes);
  for (const auto& group : rule.groups) {
    for (const double value : group) {
      if (!std::isfinite(value)) return "options that are not finite";
    }
  }
  rule_ = std::move(rule);
  return "";
}

// Makes a slot of so many numbers, all 0, within the budget.
std::string ServedWeights::make_room(std::vector<float>& slot, std::size_t count) {
  if (!slot.empty()) return "";
  const std::size_t bytes = count * sizeof(float);
  if (budget_.used_bytes.fetch_add(bytes) + bytes > budget_.max_bytes) {
    budget_.used_bytes -= bytes;
    return "the weights and their state need more than the " + std::to_string(budget_.max_bytes) +
           " bytes that this server keeps; use more helpers, or give them more memory";
  }
  used_bytes_ += bytes;
  slot.assign(count, 0.0f);
  return "";
}

std::string ServedWeights::load(const FrameHeader& header, const std::byte* data, std::size_t bytes) {
  if (header.root < 0 || header.root >= kSlots) return "slot " + std::to_string(header.root) + " of a tensor";
  Piece& piece = pieces_[{header.table, header.chunk}];
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
  if (std::string wrong = make_room(slot, count); !wrong.empty()) return wrong;
  std::memcpy(slot.data(), data, bytes);
  piece.step = header.step;
  return "";
}

std::string ServedWeights::dump(const FrameHeader& header, std::byte* data, std::size_t bytes) {
  const auto found = pieces_.find({header.table, header.chunk});
  if (header.root < 0 || header.root >= kSlots || found == pieces_.end()) {
    return "slot " + std::to_string(header.root) + " of " + name_of_piece(header) + ", which is not kept here";
  }
  const std::vector<float>& slot = found->second.slots[static_cast<std::size_t>(header.root)];
  if (slot.size() * sizeof(float) != bytes || found->second.step != header.step) {
    return std::to_string(bytes) + " bytes of " + name_of_piece(header) + " after " + std::to_string(header.step) +
           " updates, where " + std::to_string(slot.size() * sizeof(float)) + " bytes after " +
           std::to_string(found->second.step) + " are kept";
  }
  std::memcpy(data, slot.data(), bytes);
  return "";
}

std::string ServedWeights::update(const FrameHeader& header, std::byte* data, std::size_t bytes) {
  const auto found = pieces_.find({header.table, header.chunk});
  if (found == pieces_.end() || found->second.slots[0].size() * sizeof(float) != bytes) {
    return "a gradient of " + std::to_string(bytes) + " bytes for " + name_of_piece(header) + ", of which " +
           std::to_string(found == pieces_.end() ? 0 : found->second.slots[0].size() * sizeof(float)) + " bytes are kept";
  }
  Piece& piece = found->second;
  if (header.rule != rule_.number || header.root < 0 || static_cast<std::size_t>(header.root) >= rule_.groups.size()) {
    return "an update by group " + std::to_string(header.root) + " of options number " + std::to_string(header.rule) +
           ", where number " + std::to_string(rule_.number) + " with " + std::to_string(rule_.groups.size()) +
           " groups is in force";
  }
  if (header.step != piece.step + 1) {
    return "update number " + std::to_string(header.step) + " of " + name_of_piece(header) + ", which has taken " +
           std::to_string(piece.step);
  }
  const auto& options = rule_.groups[static_cast<std::size_t>(header.root)];
  const bool adamw = rule_.optimizer == Rule::Optimizer::adamw;
  const std::size_t count = bytes / sizeof(float);
  for (int slot = 1; slot <= (adamw ? 2 : options[1] != 0.0 ? 1 : 0); ++slot) {
    if (std::string wrong = make_room(piece.slots[static_cast<std::size_t>(slot)], count); !wrong.empty()) return wrong;
  }
  piece.step = header.step;
  step(piece, options, reinterpret_cast<const float*>(data));
  std::memcpy(data, piece.slots[0].data(), bytes);
  return "";
}

// The kernels give the same bits for a tensor that is cut anywhere.
void ServedWeights::step(Piece& piece, const std::array<double, 6>& options, const float* grad) const {
  float *weight = piece.slots[0].data(), *first = piece.slots[1].data(), *second = piece.slots[2].data();
  const std::size_t count = piece.slots[0].size();
  if (rule_.optimizer == Rule::Optimizer::adamw) {
    const MomentsTensor tensor{weight, grad, first, second, count, static_cast<double>(piece.step)};
    const AdamWOptions given{options[0], options[1], options[2], options[3], options[4], 1.0};
    adamw_step(std::span(&tensor, 1), given, 1);
    return;
  }
  const MomentumTensor tensor{weight, grad, first, count};
  sgd_step(std::span(&tensor, 1), {options[0], options[1], options[2], 1.0, options[3] != 0.0}, 1);
}

}  // namespace shoal
