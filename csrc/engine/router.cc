#include "engine/router.h"

namespace shoal {

int Router::route(std::uint64_t seq, std::uint64_t index, int server) const {
  if (!is_lost(server)) return server;
  const int stand_in = topology_.stand_in(seq, index, lost_, workers_serve_);
  if (stand_in < 0) throw GroupFailure("no server is left: the last helper was lost and workers do not serve");
  return stand_in;
}

bool Router::lose(int server) {
  if (!topology_.is_helper(server) || server >= topology_.size() + topology_.num_helpers() || is_lost(server)) return false;
  lost_[static_cast<std::size_t>(server - topology_.size())] = true;
  return true;
}

}  // namespace shoal
