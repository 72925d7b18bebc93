#include "engine/types.h"

#include <array>
#include <numeric>
#include <stdexcept>

namespace shoal {

namespace {

constexpr std::array<std::string_view, kNumKinds> kKinds = {
    "all_reduce", "reduce",     "broadcast", "all_gather", "reduce_scatter", "barrier",
    "delegated",  "all_to_all", "gather",    "scatter",    "send",           "recv",
    "configure",  "load",       "dump",      "update",     "collect",        "measure",
    "factor",     "normalise",  "apply"};
constexpr std::array<std::string_view, kNumElements> kElements = {"float32", "float64", "float16", "bfloat16",
                                                       "int8",    "uint8",   "int32",   "int64"};
constexpr std::array<std::string_view, kNumCombines> kCombines = {"sum", "avg",  "prod", "min",
                                                       "max", "band", "bor",  "bxor"};

template <class Enum, std::size_t N>
Enum named(const std::array<std::string_view, N>& names, std::string_view name, const char* what) {
  for (std::size_t k = 0; k < N; ++k) {
    if (names[k] == name) return static_cast<Enum>(k);
  }
  std::string all;
  for (std::string_view known : names) all += (all.empty() ? "" : ", ") + std::string(known);
  throw std::invalid_argument(std::string(what) + " '" + std::string(name) + "' must be one of " + all);
}

std::size_t elements_of(const std::vector<std::int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), std::size_t{1},
                         [](std::size_t product, std::int64_t side) { return product * static_cast<std::size_t>(side); });
}

}  // namespace

std::size_t size_of(Element element) {
  constexpr std::array<std::size_t, kNumElements> sizes = {4, 8, 2, 2, 1, 1, 4, 8};
  return sizes[static_cast<std::size_t>(element)];
}

std::string_view name_of(Kind kind) { return kKinds[static_cast<std::size_t>(kind)]; }
std::string_view name_of(Element element) { return kElements[static_cast<std::size_t>(element)]; }
std::string_view name_of(Combine combine) { return kCombines[static_cast<std::size_t>(combine)]; }

Kind kind_named(std::string_view name) { return named<Kind>(kKinds, name, "the collective"); }
Element element_named(std::string_view name) { return named<Element>(kElements, name, "the element type"); }
Combine combine_named(std::string_view name) { return named<Combine>(kCombines, name, "the operation"); }

std::string describe(const OpSpec& spec) {
  std::string text(spec.kind == Kind::delegated ? std::string_view(spec.name) : name_of(spec.kind));
  if (spec.kind == Kind::barrier) return text;
  if (spec.kind == Kind::configure) return "an update on servers by " + spec.name;
  text += " of " + std::string(name_of(spec.element)) + "[";
  for (std::size_t k = 0; k < spec.shape.size(); ++k) text += (k ? ", " : "") + std::to_string(spec.shape[k]);
  text += "]";
  const bool whole = spec.kind == Kind::all_reduce || spec.kind == Kind::reduce || spec.kind == Kind::broadcast;
  if (whole && spec.count < elements_of(spec.shape)) {
    text += " in parts, as from a GPU, this one of " + std::to_string(spec.count) + " elements";
  }
  const bool reduces = spec.kind == Kind::all_reduce || spec.kind == Kind::reduce || spec.kind == Kind::reduce_scatter;
  if (reduces) text += " (" + std::string(name_of(spec.combine)) + ")";
  if (spec.priority) text += " with a priority";
  if (spec.kind == Kind::broadcast) text += " from rank " + std::to_string(spec.root);
  if (spec.kind == Kind::reduce || spec.kind == Kind::gather) text += " to rank " + std::to_string(spec.root);
  if (spec.kind == Kind::scatter) text += " from rank " + std::to_string(spec.root);
  if (spec.kind == Kind::send) text += " to rank " + std::to_string(spec.root);
  if (spec.kind == Kind::recv) text += spec.root < 0 ? " from any rank" : " from rank " + std::to_string(spec.root);
  if (is_served(spec.kind)) {
    text += " of tensor " + std::to_string(spec.table) + " on servers, number " + std::to_string(spec.root) + ", at step " +
            std::to_string(spec.step);
  }
  if (is_message(spec.kind)) text += " of the group (tag " + std::to_string(spec.tag) + ")";
  return text;
}

}  // namespace shoal
