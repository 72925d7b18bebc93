#include "engine/topology.h"

#include <algorithm>
#include <bit>
#include <map>
#include <set>
#include <stdexcept>

#include "engine/options.h"

namespace shoal {

namespace {

constexpr std::size_t kMinNetworkChunk = 8 << 10;
constexpr std::size_t kMaxMessageBytes = 256 << 10;
constexpr std::size_t kBytesAtServer = 512 << 10;  // of the large messages that all hosts send to one server at once
constexpr std::size_t kBytesQueued = 256 << 10;    // of the usual ones: they fit the queue of a slow link
constexpr std::size_t kMessagesOfServer = 64;      // at least, of an operation with larger messages than usual
constexpr std::size_t kMinSharedChunk = 16 << 10;
constexpr std::int64_t kUnitBytes = 8 << 10;  // of the fused buffer
constexpr std::size_t kLeastBytes = 64;       // an empty chunk still costs a frame

std::uint64_t scramble(std::uint64_t x) {  // finalizer of splitmix64
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

}  // namespace

std::size_t FusedBuffer::next(std::size_t bytes, std::size_t num_places) {
  if (room_.empty()) {
    room_.assign(num_places, 0);
    room_[0] = kUnitBytes;
  }
  while (room_[place_] <= 0) {
    place_ = (place_ + 1) % num_places;
    room_[place_] += kUnitBytes;
  }
  room_[place_] -= static_cast<std::int64_t>(std::max(bytes, kLeastBytes));
  return place_;
}

Topology::Topology(int rank, std::vector<std::string> hosts, int num_helpers, std::vector<int> pattern)
    : rank_(rank), num_helpers_(num_helpers) {
  std::map<std::string, int> index;
  for (std::size_t r = 0; r < hosts.size(); ++r) {
    const auto [found, fresh] = index.try_emplace(hosts[r], static_cast<int>(locals_.size()));
    if (fresh) locals_.emplace_back();
    auto& locals = locals_[static_cast<std::size_t>(found->second)];
    place_of_.push_back(static_cast<int>(locals.size()));
    if (static_cast<int>(r) == rank) local_index_ = place_of_.back();
    locals.push_back(static_cast<int>(r));
    host_of_.push_back(found->second);
    any_host_shared_ = any_host_shared_ || locals.size() > 1;
  }
  if (rank < 0 || rank >= size()) throw std::invalid_argument("the rank is outside the group");
  set_pattern(std::move(pattern));
}

void Topology::set_pattern(std::vector<int> pattern) {
  if (pattern.empty()) throw std::invalid_argument("the pattern of servers is empty");
  for (int server : pattern) {
    if (server < 0 || server >= size() + num_helpers_) {
      throw std::invalid_argument("the pattern names server " + std::to_string(server) + " of " +
                                  std::to_string(size() + num_helpers_));
    }
  }
  std::set<int> links;
  for (int server : pattern) links.insert(is_helper(server) ? num_hosts() + server : host_of(server));
  num_links_ = static_cast<int>(links.size());
  pattern_ = std::move(pattern);
}

int Topology::owner(int host, const OpSpec& spec, std::uint64_t index, const Chunk& chunk) const {
  return owner(host, spec.kind, spec.root, index, chunk.server);
}

int Topology::owner(int host, Kind kind, int root, std::uint64_t index, int server) const {
  if ((kind == Kind::broadcast || kind == Kind::reduce) && host_of(root) == host) return root;
  if (!is_helper(server) && host_of(server) == host) return server;
  if (!is_helper(server)) return partner(host, server);
  const std::vector<int>& ranks = locals(host);
  return ranks[index % ranks.size()];
}

int Topology::partner(int host, int rank) const {
  const std::vector<int>& ranks = locals(host);
  return ranks[static_cast<std::size_t>(place_of_[static_cast<std::size_t>(rank)]) % ranks.size()];
}

bool Topology::exchange(int rank, int other) const {
  return partner(host_of(rank), other) == rank || partner(host_of(other), rank) == other;
}

// A root that shares its host with the server would have to bypass the shared memory to reach it, so it serves
// itself. Elsewhere the rank serves with which it exchanges chunks.
int Topology::server_beside_root(int server, const OpSpec& spec) const {
  if (is_helper(server)) server = static_cast<int>(static_cast<unsigned>(server) % static_cast<unsigned>(size()));
  return host_of(server) == host_of(spec.root) ? spec.root : partner(host_of(server), spec.root);
}

std::size_t Topology::usual_message_bytes() const {
  const std::size_t share = kBytesQueued / static_cast<std::size_t>(num_hosts());
  return std::clamp(share, kMinNetworkChunk, kMessageBytes) / kChunkUnitBytes * kChunkUnitBytes;
}

std::size_t Topology::message_bytes(const OpSpec& spec) const {
  const std::size_t usual = usual_message_bytes();
  if (any_host_shared_ || usual < kMessageBytes) return usual;
  const auto hosts = static_cast<std::size_t>(num_hosts());
  const std::size_t servers = is_fixed(spec.kind) ? 1 : hosts + static_cast<std::size_t>(num_helpers_);
  const std::size_t share = spec.count * size_of(spec.element) / servers / kMessagesOfServer;
  const std::size_t most = std::clamp(kBytesAtServer / hosts, usual, kMaxMessageBytes);
  return std::clamp(share, usual, most) / kChunkUnitBytes * kChunkUnitBytes;
}

std::vector<Chunk> Topology::divide(const OpSpec& spec, const EngineOptions& options, bool urgent,
                                     FusedBuffer& fused) const {
  std::size_t most = num_hosts() == 1 ? options.shared_chunk_bytes : options.chunk_bytes;
  // an urgent operation goes before the next chunk; libfabric's buffers hold one usual message
  if (!most && spec.columns && options.fabric.empty()) most = kMessageBytes;  // the parts of a matrix are no smaller
  if (!most) most = urgent || !options.fabric.empty() ? usual_message_bytes() : message_bytes(spec);
  return is_served(spec.kind) ? cut_served(spec, most) : cut(spec, most, fused);
}

std::vector<Chunk> Topology::cut(const OpSpec& spec, std::size_t max_chunk_bytes, FusedBuffer& fused) const {
  const std::size_t width = size_of(spec.element);
  const bool fixed = is_fixed(spec.kind);
  const bool shared_only = num_hosts() == 1;
  const std::size_t bytes = spec.count * width;
  const std::size_t servers = shared_only ? static_cast<std::size_t>(size())
                                          : static_cast<std::size_t>(num_hosts() + num_helpers_);
  const std::size_t share = fixed ? bytes : bytes / (shared_only ? servers : 4 * servers);
  const std::size_t least = std::min(max_chunk_bytes, shared_only ? kMinSharedChunk : kMinNetworkChunk);
  const std::size_t chunk_bytes = std::clamp(share, least, max_chunk_bytes);
  // Multiples of 16 elements that fit a slot of the shared memory and a message.
  if (max_chunk_bytes < kChunkUnit * width) {
    throw std::invalid_argument("a chunk of at most " + std::to_string(max_chunk_bytes) + " bytes holds no " +
                                std::to_string(kChunkUnit) + " elements of " + std::to_string(width) + " bytes");
  }
  const std::uint64_t wanted = (chunk_bytes / width + kChunkUnit - 1) / kChunkUnit * kChunkUnit;
  const std::uint64_t most = max_chunk_bytes / width / kChunkUnit * kChunkUnit;
  const std::uint64_t chunk_count = std::clamp<std::uint64_t>(wanted, kChunkUnit, most);

  // Parts alternate, so that their servers are busy concurrently. An empty tensor and a barrier have one empty chunk:
  // they still synchronize all ranks.
  std::vector<Chunk> chunks;
  const int parts = fixed ? size() : 1;
  std::uint64_t done = 0;
  do {
    const std::uint64_t count = std::min(chunk_count, spec.count - done);
    for (int part = 0; part < parts; ++part) {
      Chunk chunk{static_cast<std::uint64_t>(part) * spec.count + done, count, part};
      if (!fixed) chunk.server = pattern_[fused.next(count * width, pattern_.size())];
      if (spec.kind == Kind::broadcast || spec.kind == Kind::reduce) chunk.server = server_beside_root(chunk.server, spec);
      chunks.push_back(chunk);
    }
    done += count;
  } while (done < spec.count);
  return chunks;
}

std::vector<Chunk> Topology::cut_served(const OpSpec& spec, std::size_t max_chunk_bytes) const {
  std::vector<Chunk> chunks;
  if (spec.kind == Kind::configure) {  // the same options for each server
    if (const std::size_t most = std::min(max_chunk_bytes, kMaxOptionBytes); spec.count > most) {
      throw std::invalid_argument(std::to_string(spec.count) + " bytes of options do not fit a chunk of " +
                                  std::to_string(most) + " bytes; use fewer parameter groups");
    }
    std::set<int> servers(pattern_.begin(), pattern_.end());
    for (int rank = 0; spec.copied && rank < size(); ++rank) servers.insert(rank);
    for (const int server : servers) chunks.push_back({0, spec.count, server});
    return chunks;
  }
  const std::uint64_t piece = std::bit_floor(std::min(max_chunk_bytes, kMessageBytes) / sizeof(float));
  const std::size_t unit = spec.columns ? kFactorPart : kServedUnit;
  if (piece < unit && (spec.columns || sends_coefficients(spec.kind) || returns_sums(spec.kind))) {
    throw std::invalid_argument("chunks of " + std::to_string(max_chunk_bytes) + " bytes hold no unit of " +
                                std::to_string(unit) + " numbers, whose squares are summed together: chunk_bytes "
                                "must be at least " + std::to_string(unit * sizeof(float)));
  }
  const std::uint64_t pieces_of_block = std::max<std::uint64_t>(kServedBlock / piece, 1);
  for (std::uint64_t begin = 0; begin < spec.count; begin += piece) {
    const std::uint64_t place = (spec.place + chunks.size() / pieces_of_block) % pattern_.size();
    chunks.push_back({begin, std::min(piece, spec.count - begin), pattern_[place]});
  }
  return chunks;
}

int Topology::stand_in(std::uint64_t seq, std::uint64_t chunk, const std::vector<bool>& lost_helpers,
                       bool use_ranks) const {
  int best = -1;
  std::uint64_t best_weight = 0;
  for (int server = use_ranks ? 0 : size(); server < size() + num_helpers_; ++server) {
    if (is_helper(server) && lost_helpers[static_cast<std::size_t>(server - size())]) continue;
    const std::uint64_t weight = scramble(scramble(seq) ^ scramble(chunk + 1) ^ static_cast<std::uint64_t>(server));
    if (best < 0 || weight > best_weight) {
      best = server;
      best_weight = weight;
    }
  }
  return best;
}

}  // namespace shoal
