// The C++ side of csrc/c_api/shoal.h: a shoal_group made from an engine that another part of the program owns.
#pragma once

#include <memory>

#include "c_api/shoal.h"

namespace shoal {

class Engine;
class SingleRank;

// Returns a group with one reference that uses an engine and keeps it alive, but does not close it. `rank` and `size`
// are those of the engine.
shoal_group* share_engine(std::shared_ptr<Engine> engine, int rank, int size);
// The same of a group of one rank.
shoal_group* share_single(std::shared_ptr<SingleRank> single);

}  // namespace shoal
