// Implements csrc/c_api/shoal.h on shoal::Engine: converts structures, and exceptions to codes.
#include "c_api/shoal.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "c_api/callbacks.h"
#include "c_api/group.h"
#include "c_api/single_rank.h"
#include "device/stream_lane.h"
#include "engine/engine.h"

struct shoal_group {
  // Of an engine, or of one rank.
  shoal_group(int rank, int size, std::shared_ptr<shoal::Engine> engine, std::shared_ptr<shoal::SingleRank> single, bool closes)
      : rank(rank),
        size(size),
        closes(closes),
        engine(std::move(engine)),
        single(std::move(single)),
        callbacks([this](shoal_handle handle, std::string& message) { return outcome(handle, message); }) {}

  shoal_status outcome(shoal_handle handle, std::string& message);
  // Calls the callback once the operation has ended.
  void call_back(const shoal::CallbackThread::Item& item);

  const int rank, size;
  const bool closes;  // the engine, with the last reference
  const std::shared_ptr<shoal::Engine> engine;  // null: a group of one rank
  const std::shared_ptr<shoal::SingleRank> single;
  std::atomic<int> references{1};
  shoal::CallbackThread callbacks;
};

struct shoal_lane {
  shoal::StreamLane lane;
};

namespace {

using shoal::Kind;

// The numbers of the C interface are those of the core.
static_assert(SHOAL_DELEGATED == static_cast<int>(Kind::delegated));
static_assert(SHOAL_ALL_TO_ALL == static_cast<int>(Kind::all_to_all));
static_assert(SHOAL_RECV == static_cast<int>(Kind::recv));
static_assert(SHOAL_BARRIER == static_cast<int>(Kind::barrier));
static_assert(SHOAL_REDUCE_SCATTER == static_cast<int>(Kind::reduce_scatter));
static_assert(SHOAL_BFLOAT16 == static_cast<int>(shoal::Element::bfloat16));
static_assert(SHOAL_INT64 == static_cast<int>(shoal::Element::int64));
static_assert(SHOAL_AVG == static_cast<int>(shoal::Combine::avg));
static_assert(SHOAL_BXOR == static_cast<int>(shoal::Combine::bxor));

thread_local std::string last_error;

shoal_status failed(shoal_status status, const char* message) {
  last_error = message;
  return status;
}

// Runs a call and turns what it throws into a code and a message.
template <class Call>
shoal_status guarded(Call call) {
  try {
    return call();
  } catch (const shoal::GroupError& error) {
    return failed(SHOAL_GROUP_FAILED, error.what());
  } catch (const shoal::OrderError& error) {
    return failed(SHOAL_OUT_OF_ORDER, error.what());
  } catch (const std::invalid_argument& error) {
    return failed(SHOAL_INVALID_ARGUMENT, error.what());
  } catch (const std::exception& error) {
    return failed(SHOAL_SYSTEM_ERROR, error.what());
  }
}

// Copies a structure of the caller's version: fields that it does not have are zero, those it has beyond this
// library's version must be.
template <class Struct>
Struct read_sized(const Struct* given, const char* what) {
  if (given == nullptr) throw std::invalid_argument(std::string(what) + " is NULL");
  const std::size_t size = given->struct_size;
  if (size < sizeof(std::size_t)) {
    throw std::invalid_argument(std::string(what) + ": struct_size is " + std::to_string(size) +
                                "; set it to the sizeof of the structure");
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t k = sizeof(Struct); k < size; ++k) {
    if (bytes[k] == 0) continue;
    throw std::invalid_argument(std::string(what) + " has a field that this libshoal (version " +
                                std::to_string(SHOAL_API_VERSION) + ") does not know; update the library");
  }
  Struct known{};
  std::memcpy(&known, given, std::min(size, sizeof(Struct)));
  return known;
}

std::string text(const char* given, const char* otherwise = "") { return given ? given : otherwise; }

template <class Enum>
Enum checked(std::int32_t value, Enum last, const char* what) {
  if (value < 0 || value > static_cast<std::int32_t>(last)) {
    throw std::invalid_argument(std::string("the ") + what + " is " + std::to_string(value) + "; it is 0 to " +
                                std::to_string(static_cast<int>(last)) + " (see shoal.h)");
  }
  return static_cast<Enum>(value);
}

std::vector<shoal::Block> blocks(const shoal_block* given, int size) {
  std::vector<shoal::Block> found;
  for (int rank = 0; given && rank < size; ++rank) found.push_back({static_cast<std::byte*>(given[rank].data), given[rank].count});
  return found;
}

shoal::OpSpec spec_of(const shoal_operation& given, int size) {
  shoal::OpSpec spec;
  spec.kind = checked(given.kind, Kind::recv, "kind");
  spec.element = checked(given.dtype, shoal::Element::int64, "dtype");
  spec.combine = checked(given.reduction, shoal::Combine::bxor, "reduction");
  spec.count = given.count;
  spec.root = given.root;
  spec.priority = given.priority;
  spec.input = static_cast<const std::byte*>(given.input);
  spec.output = static_cast<std::byte*>(given.output);
  spec.timeout_s = given.timeout_s;
  if (shoal::by_messages(spec.kind)) {
    spec.inputs = blocks(given.inputs, size);
    spec.outputs = blocks(given.outputs, size);
    spec.tag = given.tag;
    spec.source = given.source;
  }
  if (given.num_dims && given.shape) spec.shape.assign(given.shape, given.shape + given.num_dims);
  else spec.shape = {static_cast<std::int64_t>(given.count)};
  if (spec.kind == Kind::delegated) spec.name = text(given.name, "delegated");
  return spec;
}

shoal::EngineOptions engine_options(const shoal_group_options& given) {
  shoal::EngineOptions options;
  const auto* secret = static_cast<const std::uint8_t*>(given.secret);
  options.rank = given.rank;
  options.size = given.size;
  options.group = text(given.name, "shoal");
  if (secret) options.secret.assign(secret, secret + given.secret_bytes);
  options.address = text(given.address, "127.0.0.1");
  options.fabric = text(given.fabric);
  if (given.chunk_bytes) options.chunk_bytes = given.chunk_bytes;
  if (given.shared_chunk_bytes) options.shared_chunk_bytes = given.shared_chunk_bytes;
  if (given.connections_per_peer) options.connections_per_peer = given.connections_per_peer;
  if (given.peer_grace_s > 0) options.peer_grace_s = given.peer_grace_s;
  if (given.protection < 0 || given.protection >= static_cast<std::int32_t>(shoal::kNumProtections)) {
    throw std::invalid_argument("protection is " + std::to_string(given.protection) + "; it is 0, 1 or 2");
  }
  options.protection = static_cast<shoal::Protection>(given.protection);
  return options;
}

shoal::StreamLane::Options lane_options(const shoal_lane_options& given) {
  shoal::StreamLane::Options options;
  options.runtime = text(given.runtime);
  options.device = given.device;
  if (given.num_buffers) options.num_buffers = given.num_buffers;
  if (given.buffer_bytes) options.buffer_bytes = given.buffer_bytes;
  return options;
}

// The group as a lane uses it; null: there is none.
std::shared_ptr<shoal::ChunkEngine> chunk_engine(shoal::StreamLane& lane, const shoal_group* group) {
  if (group == nullptr) return nullptr;
  return lane.engine_of(group->engine ? static_cast<void*>(group->engine.get()) : group->single.get(),
                        [group]() -> std::shared_ptr<shoal::ChunkEngine> {
                          if (group->engine) return std::make_shared<shoal::ChunkEngineOf<shoal::Engine>>(group->engine);
                          return std::make_shared<shoal::ChunkEngineOf<shoal::SingleRank>>(group->single);
                        });
}

void connect(shoal::Engine& engine, const shoal_members& given, double timeout_s) {
  std::vector<shoal::PeerInfo> peers;
  for (std::size_t k = 0; k < given.num_peers; ++k) {
    const shoal_peer& peer = given.peers[k];
    peers.push_back({text(peer.host), text(peer.address), peer.port, peer.global_rank, peer.pid});
  }
  std::vector<shoal::HelperInfo> helpers;
  for (std::size_t k = 0; k < given.num_helpers; ++k) {
    const shoal_helper& helper = given.helpers[k];
    helpers.push_back({text(helper.address), helper.port, text(helper.name)});
  }
  std::vector<int> pattern;
  if (given.pattern) pattern.assign(given.pattern, given.pattern + given.pattern_length);
  else for (std::size_t k = 0; k < given.num_peers + given.num_helpers; ++k) pattern.push_back(static_cast<int>(k));
  engine.connect(std::move(peers), std::move(helpers), std::move(pattern), text(given.segment), timeout_s);
}

// The operation at position k of a list whose elements have the caller's size.
const shoal_operation* element_of(const shoal_operation* operations, std::size_t k) {
  const auto* first = reinterpret_cast<const unsigned char*>(operations);
  return reinterpret_cast<const shoal_operation*>(first + k * operations->struct_size);
}

}  // namespace

shoal_group* shoal::share_engine(std::shared_ptr<Engine> engine, int rank, int size) {
  return new shoal_group(rank, size, std::move(engine), nullptr, false);
}

shoal_group* shoal::share_single(std::shared_ptr<SingleRank> single) {
  return new shoal_group(0, 1, nullptr, std::move(single), false);
}

shoal_status shoal_group::outcome(shoal_handle handle, std::string& message) {
  const shoal_status status = shoal_wait(this, handle, 0);
  if (status != SHOAL_SUCCESS && status != SHOAL_TIMED_OUT) message = last_error;
  return status;
}

void shoal_group::call_back(const shoal::CallbackThread::Item& item) {
  callbacks.expect();
  if (!engine) return callbacks.ended(item);
  engine->on_end(item.handle, [this, item] { callbacks.ended(item); });
}

// ---- results --------------------------------------------------------------------------------------------

const char* shoal_last_error() { return last_error.c_str(); }

int shoal_api_version() { return SHOAL_API_VERSION; }

// ---- groups ---------------------------------------------------------------------------------------------

shoal_status shoal_group_create(const shoal_group_options* options, shoal_group** group) {
  return guarded([&] {
    if (group == nullptr) throw std::invalid_argument("the address for the group is NULL");
    const shoal_group_options given = read_sized(options, "shoal_group_options");
    if (given.size < 1 || given.rank < 0 || given.rank >= given.size) {
      throw std::invalid_argument("rank " + std::to_string(given.rank) + " of a group of " + std::to_string(given.size));
    }
    auto engine = given.size == 1 ? nullptr : std::make_shared<shoal::Engine>(engine_options(given));
    auto single = given.size == 1 ? std::make_shared<shoal::SingleRank>() : nullptr;
    *group = new shoal_group(given.rank, given.size, std::move(engine), std::move(single), true);
    return SHOAL_SUCCESS;
  });
}

int shoal_group_port(const shoal_group* group) { return group->engine ? group->engine->port() : 0; }
int shoal_group_rank(const shoal_group* group) { return group->rank; }
int shoal_group_size(const shoal_group* group) { return group->size; }

shoal_status shoal_group_connect(shoal_group* group, const shoal_members* members, double timeout_s) {
  return guarded([&] {
    const shoal_members given = read_sized(members, "shoal_members");
    if (given.num_peers != static_cast<std::size_t>(group->size)) {
      throw std::invalid_argument(std::to_string(given.num_peers) + " peers for a group of " + std::to_string(group->size));
    }
    if (group->engine) connect(*group->engine, given, timeout_s);
    return SHOAL_SUCCESS;
  });
}

shoal_status shoal_group_abort(shoal_group* group, const char* reason) {
  return guarded([&] {
    if (group->engine) group->engine->abort(text(reason, "the group was aborted"));
    else group->single->abort(text(reason, "the group was aborted"));
    return SHOAL_SUCCESS;
  });
}

shoal_status shoal_group_close(shoal_group* group) {
  return guarded([&] {
    if (group->engine) group->engine->close();
    else group->single->close();
    group->callbacks.stop();
    return SHOAL_SUCCESS;
  });
}

shoal_group* shoal_group_retain(shoal_group* group) {
  group->references.fetch_add(1, std::memory_order_relaxed);
  return group;
}

void shoal_group_release(shoal_group* group) {
  if (group == nullptr || group->references.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (group->closes) shoal_group_close(group);
  delete group;
}

shoal_status shoal_group_counters(shoal_group* group, void (*visit)(void*, const char*, uint64_t), void* context) {
  return guarded([&] {
    const auto counts = group->engine ? group->engine->counters() : group->single->counters();
    for (const auto& [name, value] : counts) visit(context, name.c_str(), value);
    return SHOAL_SUCCESS;
  });
}

// ---- operations -----------------------------------------------------------------------------------------

shoal_status shoal_submit(shoal_group* group, const shoal_operation* operations, size_t num_operations,
                          shoal_handle* handles) {
  if (handles) std::fill_n(handles, num_operations, SHOAL_NO_HANDLE);
  return guarded([&] {
    std::vector<shoal_operation> given;
    std::vector<shoal::OpSpec> specs;
    for (std::size_t k = 0; k < num_operations; ++k) {
      given.push_back(read_sized(element_of(operations, k), "shoal_operation"));
      specs.push_back(spec_of(given.back(), group->size));
    }
    const auto begun = group->engine ? group->engine->submit_all(std::move(specs)) : group->single->submit_all(specs);
    for (std::size_t k = 0; k < num_operations; ++k) {
      if (handles) handles[k] = begun[k];
      if (given[k].on_complete) group->call_back({begun[k], given[k].on_complete, given[k].context});
    }
    return SHOAL_SUCCESS;
  });
}

shoal_status shoal_wait(shoal_group* group, shoal_handle handle, double timeout_s) {
  return guarded([&] {
    return !group->engine || group->engine->wait(handle, timeout_s) ? SHOAL_SUCCESS : SHOAL_TIMED_OUT;
  });
}

int shoal_test(shoal_group* group, shoal_handle handle) {
  return !group->engine || group->engine->is_done(handle) ? 1 : 0;
}

shoal_status shoal_on_complete(shoal_group* group, shoal_handle handle, shoal_callback on_complete, void* context) {
  return guarded([&] {
    if (on_complete == nullptr) throw std::invalid_argument("on_complete is NULL");
    group->call_back({handle, on_complete, context});
    return SHOAL_SUCCESS;
  });
}

shoal_status shoal_then(shoal_group* group, shoal_handle handle, shoal_callback then, void* context) {
  return guarded([&] {
    if (then == nullptr) throw std::invalid_argument("the function is NULL");
    const std::shared_ptr<shoal_group> kept(shoal_group_retain(group), shoal_group_release);
    const auto call = [kept, handle, then, context] {
      std::string message;
      const shoal_status status = kept->outcome(handle, message);
      then(context, handle, status, message.c_str());
    };
    if (group->engine) group->engine->then(handle, call);
    else call();
    return SHOAL_SUCCESS;
  });
}

shoal_status shoal_finish_delegated(shoal_group* group, shoal_handle handle) {
  return guarded([&] {
    if (group->engine) group->engine->finish_delegated(handle);
    return SHOAL_SUCCESS;
  });
}

// ---- memory of a CUDA device ----------------------------------------------------------------------------

shoal_status shoal_lane_create(const shoal_lane_options* options, shoal_lane** lane) {
  return guarded([&] {
    if (lane == nullptr) throw std::invalid_argument("the address for the lane is NULL");
    *lane = new shoal_lane{shoal::StreamLane(lane_options(read_sized(options, "shoal_lane_options")))};
    return SHOAL_SUCCESS;
  });
}

shoal_status shoal_lane_run(shoal_lane* lane, shoal_group* group, const shoal_operation* operations, size_t num_operations,
                            void* stream) {
  return guarded([&] {
    const int rank = group ? group->rank : 0, size = group ? group->size : 1;
    std::vector<shoal::OpSpec> specs;
    for (std::size_t k = 0; k < num_operations; ++k) {
      const shoal_operation given = read_sized(element_of(operations, k), "shoal_operation");
      if (given.on_complete) throw std::invalid_argument("on_complete of an operation on a device, which ends with the call; set NULL");
      specs.push_back(spec_of(given, size));
    }
    lane->lane.run(chunk_engine(lane->lane, group), std::move(specs), rank, size, stream);
    return SHOAL_SUCCESS;
  });
}

void shoal_lane_release(shoal_lane* lane) { delete lane; }
