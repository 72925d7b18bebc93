// Which ranks share a host, who speaks for a host about a chunk, and how an operation is cut into chunks.
// Every rank derives the same answers from the same facts; nothing here is negotiated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/types.h"

namespace shoal {

// A piece of an operation that travels in one message. Offsets are in elements of the operation's whole range:
// the tensor, or for all_gather and reduce_scatter the n tensors one after the other.
struct Chunk {
  std::uint64_t begin = 0;
  std::uint64_t count = 0;
  int server = 0;  // ranks first, then helpers
};

// Where a group's operations stand in the buffer that they are fused into. The buffer is one row of units of 8 KiB
// which go round the pattern of servers; every chunk lies at the next free place, and one that is larger than what
// is left of its unit is made up for by passing its server over. All ranks call operations in the same order, so
// they place them alike, and a thousand small ones are shared out as evenly by bytes as one large one.
class FusedBuffer {
 public:
  // The place in the pattern of the next chunk, which has `bytes`. `num_places` > 0 must not change between calls.
  std::size_t next(std::size_t bytes, std::size_t num_places);

 private:
  std::size_t place_ = 0;
  std::vector<std::int64_t> room_;  // bytes that each place of the pattern may still take in its turn
};

class Topology {
 public:
  // `hosts[r]` is the host of rank r; `pattern` the servers that a group's chunks go round.
  Topology(int rank, std::vector<std::string> hosts, int num_helpers, std::vector<int> pattern);

  // Throws std::invalid_argument for a server that does not exist.
  void set_pattern(std::vector<int> pattern);

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(host_of_.size()); }
  int num_hosts() const { return static_cast<int>(locals_.size()); }
  int num_helpers() const { return num_helpers_; }
  int host_of(int rank) const { return host_of_[static_cast<std::size_t>(rank)]; }
  int my_host() const { return host_of(rank_); }
  const std::vector<int>& locals(int host) const { return locals_[static_cast<std::size_t>(host)]; }
  const std::vector<int>& my_locals() const { return locals(my_host()); }
  int local_index() const { return local_index_; }
  bool any_host_shared() const { return any_host_shared_; }
  bool is_helper(int server) const { return server >= size(); }

  // The rank of `host` that speaks for it about a chunk: it holds the host's contribution, sends it to the
  // server and receives the result.
  int owner(int host, const OpSpec& spec, std::uint64_t index, const Chunk& chunk) const;
  int owner(int host, Kind kind, int root, std::uint64_t index, int server) const;

  // Cuts an operation. Chunks that any server may sum take their places in `fused`.
  std::vector<Chunk> cut(const OpSpec& spec, std::size_t max_chunk_bytes, FusedBuffer& fused) const;

  // Who stands in for a lost server: the same on every rank that knows the same servers to be lost, and still
  // the same when further ones are lost, unless it is one of them (rendezvous hashing). -1: nobody is left.
  int stand_in(std::uint64_t seq, std::uint64_t chunk, const std::vector<bool>& lost_helpers, bool use_ranks) const;

 private:
  int server_beside_root(int server, const OpSpec& spec) const;

  int rank_;
  std::vector<int> host_of_;
  std::vector<std::vector<int>> locals_;
  int local_index_ = 0;
  bool any_host_shared_ = false;
  int num_helpers_;
  std::vector<int> pattern_;
};

// Elements of an operation's whole range.
std::uint64_t range_of(const OpSpec& spec, int size);

}  // namespace shoal
