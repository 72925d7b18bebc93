#include "engine/options.h"

#include <stdexcept>

#include "engine/host_stage.h"
#include "transport/identity.h"

namespace shoal {

namespace {

constexpr std::size_t kChunkUnitBytes = 128;             // 16 elements of the widest type
constexpr std::size_t kMaxChunkBytes = kMaxPayload / 2;  // 16-bit elements may be sent as 32-bit ones
constexpr std::size_t kMaxThreads = 16;

}  // namespace

void require_possible(const EngineOptions& options) {
  const auto within = [](const char* name, std::size_t value, std::size_t least, std::size_t most, std::size_t unit) {
    if (least <= value && value <= most && value % unit == 0) return;
    throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; it is a multiple of " +
                                std::to_string(unit) + " from " + std::to_string(least) + " to " + std::to_string(most));
  };
  if (options.chunk_bytes) within("chunk_bytes", options.chunk_bytes, kChunkUnitBytes, kMaxChunkBytes, kChunkUnitBytes);
  within("shared_chunk_bytes", options.shared_chunk_bytes, kChunkUnitBytes, kMaxChunkBytes, kChunkUnitBytes);
  within("num_slots", options.num_slots, 1, SharedSegment::kSignatures / kSlotsBetweenHosts, 1);
  within("connections_per_peer", static_cast<std::size_t>(options.connections_per_peer), 1, kMaxDataConnections, 1);
  within("network_threads", static_cast<std::size_t>(options.network_threads), 1, kMaxThreads, 1);
}

}  // namespace shoal
