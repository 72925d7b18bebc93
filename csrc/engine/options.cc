#include "engine/options.h"

#include <stdexcept>

#include "engine/host_stage.h"
#include "transport/identity.h"

namespace shoal {

namespace {

constexpr std::size_t kMaxChunkBytes = kMaxPayload / 2;  // 16-bit elements may be sent as 32-bit ones
constexpr std::size_t kMaxThreads = 16;
constexpr std::size_t kMaxWindowBytes = std::size_t{1} << 30;  // that the servers of a group may have to hold for each rank

}  // namespace

const std::vector<OptionRange>& option_ranges() {
  using Options = EngineOptions;
  static const std::vector<OptionRange> ranges{
      {"chunk_bytes", 0, kMaxChunkBytes, kChunkUnitBytes, [](const Options& o) { return o.chunk_bytes; }},
      {"shared_chunk_bytes", kChunkUnitBytes, kMaxChunkBytes, kChunkUnitBytes,
       [](const Options& o) { return o.shared_chunk_bytes; }},
      {"num_slots", 1, SharedSegment::kSignatures / kSlotsBetweenHosts, 1, [](const Options& o) { return o.num_slots; }},
      {"min_window_bytes", 0, kMaxWindowBytes, 1, [](const Options& o) { return o.min_window_bytes; }},
      {"window_bytes", 1, kMaxWindowBytes, 1, [](const Options& o) { return o.window_bytes; }},
      {"connections_per_peer", 1, kMaxDataConnections, 1,
       [](const Options& o) { return static_cast<std::size_t>(o.connections_per_peer); }},
      {"network_threads", 1, kMaxThreads, 1, [](const Options& o) { return static_cast<std::size_t>(o.network_threads); }},
  };
  return ranges;
}

void require_possible(const EngineOptions& options) {
  for (const OptionRange& range : option_ranges()) {
    const std::size_t value = range.value(options);
    if (range.least <= value && value <= range.most && value % range.unit == 0) continue;
    throw std::invalid_argument(std::string(range.name) + " is " + std::to_string(value) + "; it is a multiple of " +
                                std::to_string(range.unit) + " from " + std::to_string(range.least) + " to " +
                                std::to_string(range.most));
  }
}

}  // namespace shoal
