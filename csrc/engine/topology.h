// Placement of ranks on hosts, the owner of each chunk on a host, and the division of operations into chunks. Every
// rank derives the same answers from the same inputs; nothing is negotiated.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/types.h"

namespace shoal {

struct EngineOptions;

// A part of an operation that is sent in one message. Offsets are in elements of the operation's whole range: the
// tensor, or for all_gather and reduce_scatter the n tensors one after the other.
struct Chunk {
  std::uint64_t begin = 0;
  std::uint64_t count = 0;
  int server = 0;  // ranks first, then helpers
};

// Position of a group's operations in a virtual fused buffer. The buffer is a row of 8 KiB units assigned to servers
// in pattern order. Each chunk takes the next free position; the excess of a chunk that is larger than the rest of
// its unit is compensated by skipping its server later. All ranks issue operations in the same order and so compute
// the same positions, and a thousand small operations are balanced over servers as evenly by bytes as one large one.
class FusedBuffer {
 public:
  // Returns the position in the pattern of the next chunk, of `bytes` bytes. `num_places` > 0 must not change between
  // calls.
  std::size_t next(std::size_t bytes, std::size_t num_places);

 private:
  std::size_t place_ = 0;
  std::vector<std::int64_t> room_;  // bytes left for each position of the pattern
};

inline constexpr std::uint64_t kChunkUnit = 16;  // elements: all chunks but the last are multiples
inline constexpr std::size_t kChunkUnitBytes = kChunkUnit * sizeof(double);  // of the widest type

class Topology {
 public:
  static constexpr std::size_t kMessageBytes = 32 << 10;  // between few hosts, where nothing speaks for more

  // `hosts[r]` is the host of rank r; `pattern` lists the servers of successive chunks, repeated cyclically.
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

  // Returns the owner of a chunk on `host`: the rank that holds the host's contribution, sends it to the server and
  // receives the result.
  int owner(int host, const OpSpec& spec, std::uint64_t index, const Chunk& chunk) const;
  int owner(int host, Kind kind, int root, std::uint64_t index, int server) const;
  // Whether chunks go between two ranks that do not share a host. They do where both have the same place on their hosts;
  // where hosts have different numbers of ranks, places count modulo the smaller number. What a lost helper has
  // served goes between others too.
  bool exchange(int rank, int other) const;
  // Whether two ranks are connected from the beginning: they share a host or exchange chunks.
  bool are_neighbours(int rank, int other) const { return host_of(rank) == host_of(other) || exchange(rank, other); }
  // Returns the rank of this host, a neighbour of a rank elsewhere, that passes its notices on to those here that are none.
  int relay_of(int rank) const { return partner(my_host(), rank); }

  // Returns the number of hosts and helpers that serve an operation's chunks: those in the pattern, or every host.
  int num_links(Kind kind) const { return is_fixed(kind) ? num_hosts() : num_links_; }

  // Divides an operation into chunks: all ranks alike, by options that are the same on all of them. One that is `urgent`
  // goes before the next chunk of others.
  std::vector<Chunk> divide(const OpSpec& spec, const EngineOptions& options, bool urgent, FusedBuffer& fused) const;

  // Returns the largest chunk between hosts, where nothing speaks for more: all hosts send to one server at once, and
  // what they send must fit the queue on its link. With 16 hosts at 50 Mbit/s and queues of 50 ms, 32 KiB from each
  // took 1.6 times as long as 16 KiB.
  std::size_t usual_message_bytes() const;

  // Returns the largest chunk of an operation between hosts. Larger ones take less processor time for each byte. But
  // what all hosts send to one server at once must fit the queues on its link, the last chunk is not overlapped with
  // anything, and where hosts are shared, chunks have slots of a fixed size.
  std::size_t message_bytes(const OpSpec& spec) const;

  // Cuts an operation into chunks. Chunks that any server may reduce take positions in `fused`.
  std::vector<Chunk> cut(const OpSpec& spec, std::size_t max_chunk_bytes, FusedBuffer& fused) const;

  // Cuts an operation on weights that servers keep: a piece of a tensor goes to the same server each time, as long as the
  // pattern stays. Throws std::invalid_argument for options that do not fit a chunk.
  std::vector<Chunk> cut_served(const OpSpec& spec, std::size_t max_chunk_bytes) const;

  // Returns the stand-in of a lost server: the same on every rank that knows the same losses, and unchanged by
  // further losses unless it is lost itself (rendezvous hashing). -1 if no server is left.
  int stand_in(std::uint64_t seq, std::uint64_t chunk, const std::vector<bool>& lost_helpers, bool use_ranks) const;

 private:
  // Whether each rank's part of the operation has a server of its own: that rank.
  static bool is_fixed(Kind kind) { return kind == Kind::all_gather || kind == Kind::reduce_scatter; }
  int server_beside_root(int server, const OpSpec& spec) const;
  // Returns the rank of a host that exchanges chunks with a rank of another one.
  int partner(int host, int rank) const;

  int rank_;
  std::vector<int> host_of_;
  std::vector<std::vector<int>> locals_;
  std::vector<int> place_of_;  // of each rank among those of its host
  int local_index_ = 0;
  bool any_host_shared_ = false;
  int num_helpers_;
  std::vector<int> pattern_;
  int num_links_ = 1;  // hosts and helpers in the pattern
};

}  // namespace shoal
