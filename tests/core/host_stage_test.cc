#include "engine/host_stage.h"

#include <memory>
#include <string>

#include <unistd.h>

#include "check.h"
#include "engine_group.h"

namespace host_stage_test {

// The invariant of the slots is the stage's own, whatever cut the operation.
TEST(host_stage_refuses_a_chunk_that_is_larger_than_a_slot) {
  const std::string name = "stage-" + std::to_string(getpid());
  shoal_test::on_threads(2, [&](int rank) {
    const shoal::Topology topology(rank, {"a", "a"}, 0, {0, 1});
    shoal::EngineOptions options;
    options.shared_chunk_bytes = 1024;
    options.num_slots = 4;
    shoal::StageHooks hooks;
    hooks.trace = [](const char*, std::uint64_t, std::uint64_t, std::uint64_t) {};
    hooks.done = [](const shoal::OpPtr&) {};
    shoal::HostStage stage(topology, name, options, 10.0, std::move(hooks));
    const auto op = std::make_shared<shoal::Op>();
    op->spec.kind = shoal::Kind::all_reduce;
    op->spec.element = shoal::Element::float32;
    op->chunks = {{0, 256, 0}, {256, 257, 1}};
    CHECK_EQ(CHECK_THROWS(std::logic_error, stage.submit(op)),
             "chunk 1 of operation #0 has 1028 bytes, a slot of the shared memory 1024");
  });
}

}  // namespace host_stage_test
