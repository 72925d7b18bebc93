// Server of each chunk: the one of the pattern, or its stand-in once that helper is lost. On the network thread.
#pragma once

#include <vector>

#include "base/mutex.h"
#include "engine/errors.h"
#include "engine/options.h"
#include "engine/topology.h"

namespace shoal {

class Router {
 public:
  Router(const Members& members, const Topology& topology, bool workers_serve)
      : members_(members), topology_(topology), workers_serve_(workers_serve), lost_(members.helpers.size()) {}

  // Returns the server that reduces the chunk, where the pattern gives `server`. Throws GroupFailure if none is left.
  int route(std::uint64_t seq, std::uint64_t index, int server) const REQUIRES(network_thread);

  bool is_lost(int server) const REQUIRES(network_thread) {
    return members_.is_helper(server) && lost_[static_cast<std::size_t>(server - members_.size())];
  }
  // Returns false if there is no such helper or it was lost before.
  bool lose(int server) REQUIRES(network_thread);

 private:
  const Members& members_;
  const Topology& topology_;
  const bool workers_serve_;
  std::vector<bool> lost_ GUARDED_BY(network_thread);  // by helper
};

}  // namespace shoal
