// Description of a collective: its kind, element type and reduction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "optim/factor_parts.h"
#include "transport/frame.h"

namespace shoal {

// Returns whether every host contributes; the other kinds move one rank's data.
inline bool adds_up(Kind kind) { return kind != Kind::broadcast && kind != Kind::all_gather; }

// Returns whether an operation consists of messages between two ranks each (engine/messages.h).
inline bool by_messages(Kind kind) { return kind >= Kind::all_to_all && kind <= Kind::recv; }
// Returns whether an operation concerns the weights that servers keep (engine/served_weights.h).
inline bool is_served(Kind kind) { return kind >= Kind::configure; }
// Returns whether contributions are kCoefficients floats, or factors, and not the tensor's elements.
inline bool sends_coefficients(Kind kind) { return kind >= Kind::measure; }
inline constexpr std::size_t kCoefficients = 8;
// Returns whether an operation is on a matrix whose second moment is factored, and each chunk has its own coefficients.
inline bool is_factored(Kind kind) { return kind == Kind::factor || kind == Kind::normalise; }
// Returns whether a result consists of kSums doubles for each kServedUnit elements of a chunk, and not of elements.
inline bool returns_sums(Kind kind) { return kind == Kind::collect || kind == Kind::measure || kind == Kind::normalise; }
inline constexpr std::size_t kServedUnit = 2048, kSums = 3;
// Elements of a tensor that stay together on a server.
inline constexpr std::uint64_t kServedBlock = 16384;
// Options of a configure: a head, and for each of its groups some numbers (engine/served_weights.h).
inline constexpr std::size_t kOptionHeadBytes = 4 * sizeof(std::uint32_t), kOptionsOfGroup = 6, kMaxOptionGroups = 4096;
inline constexpr std::size_t kMaxOptionBytes = kOptionHeadBytes + kMaxOptionGroups * kOptionsOfGroup * sizeof(double);
// Returns whether a result consists of weights.
inline bool returns_weights(Kind kind) { return kind == Kind::update || kind == Kind::apply; }
// Returns whether an operation changes what servers keep: where there is a second copy, it has to change first.
inline bool changes_weights(Kind kind) { return kind == Kind::load || kind >= Kind::update; }
// Returns the rank that has the second copy of a helper's piece, and takes over its chunk once the helper is lost.
inline int buddy_of(std::uint32_t table, std::uint64_t chunk, int size) {
  return static_cast<int>((table + chunk) % static_cast<std::uint64_t>(size));
}
// Returns whether every rank gets the sum of all.
inline bool sums_for_all(Kind kind) {
  return kind == Kind::all_reduce || kind == Kind::barrier || is_served(kind);
}
// Returns whether only two ranks take part: it has no number in the group's order.
inline bool is_message(Kind kind) { return kind == Kind::send || kind == Kind::recv; }

inline bool is_half(Element element) { return element == Element::float16 || element == Element::bfloat16; }

std::size_t size_of(Element element);

std::string_view name_of(Kind kind);
std::string_view name_of(Element element);
std::string_view name_of(Combine combine);

// Parse a name. Throw std::invalid_argument with the known names.
Kind kind_named(std::string_view name);
Element element_named(std::string_view name);
Combine combine_named(std::string_view name);

// The elements that a rank exchanges with another one.
struct Block {
  std::byte* data = nullptr;
  std::uint64_t count = 0;
};

// An operation as one rank submits it. `count` is the number of elements of the tensor; of the input for all_gather,
// of the output for reduce_scatter. The memory belongs to the caller and must stay valid until the operation
// completes.
struct OpSpec {
  Kind kind = Kind::barrier;
  Element element = Element::uint8;
  Combine combine = Combine::sum;
  std::uint64_t count = 0;
  int root = 0;      // of a message: the other rank; -1 to receive from any
  int priority = 0;  // of an all_reduce; 0: in call order; else among those with a priority, higher first
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  double timeout_s = 0;
  std::vector<std::int64_t> shape;
  std::string name;  // of a delegated operation
  std::vector<Block> inputs, outputs;  // by rank: all_to_all has both, a gather's root outputs, a scatter's inputs
  int tag = 0;                         // of a message
  std::int32_t* source = nullptr;      // of a receive: the rank that has sent is written here
  // Of an operation on weights that servers keep, see engine/served_weights.h. `root` is the slot or the group of options.
  std::uint32_t table = 0, step = 0, rule = 0;
  std::uint64_t place = 0;  // of the tensor's first block among those of all tensors
  Element weights = Element::float32;  // type in which an update or apply answers; or bfloat16
  std::uint32_t columns = 0;  // of a matrix whose second moment is factored; else 0
  bool copied = false;  // ranks have a second copy of what helpers keep
};

// Bytes of the sums or factors of a chunk of a matrix (optim/adafactor.h).
inline std::size_t factor_bytes(const OpSpec& spec) { return factor_numbers(spec.columns) * sizeof(float); }
// Bytes of a chunk's coefficients, and from those of one chunk to those of the next: 0 where all have the same.
inline std::size_t coefficient_bytes(const OpSpec& spec) {
  return spec.kind == Kind::normalise ? factor_bytes(spec) : kCoefficients * sizeof(float);
}
inline std::size_t input_stride(const OpSpec& spec) { return is_factored(spec.kind) ? coefficient_bytes(spec) : 0; }

// Describes an operation for messages: "all_reduce of float32[1024, 30] (sum)".
std::string describe(const OpSpec& spec);

// Number of this rank's first message; operations of the whole group have lower ones.
inline constexpr std::uint64_t kFirstMessage = std::uint64_t{1} << 63;

// Returns "operation #17", or "message #17".
inline std::string numbered(std::uint64_t seq) {
  return seq < kFirstMessage ? "operation #" + std::to_string(seq) : "message #" + std::to_string(seq - kFirstMessage);
}

}  // namespace shoal
