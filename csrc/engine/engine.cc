#include "engine/engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <future>
#include <stdexcept>
#include <thread>

#include "base/clock.h"
#include "base/log.h"
#include "engine/reduce.h"

namespace shoal {

namespace {

constexpr double kFlushS = 1.0;
constexpr double kJoinS = 10.0;
constexpr double kAbortS = 5.0;
constexpr double kLingerS = 2.0;

// Input is read while output is written, so the two may overlap only where they are the same element.
void require_apart(const OpSpec& spec, int rank, int size) {
  if (spec.kind == Kind::barrier || spec.kind == Kind::broadcast || spec.kind == Kind::delegated) return;
  const bool other_size = returns_weights(spec.kind) && spec.weights != Element::float32;
  if (sends_coefficients(spec.kind) || returns_sums(spec.kind) || other_size) return;  // they have two memories
  const std::size_t bytes = spec.count * size_of(spec.element), all = bytes * static_cast<std::size_t>(size);
  const bool gathers = spec.kind == Kind::all_gather, scatters = spec.kind == Kind::reduce_scatter;
  const auto input = reinterpret_cast<std::uintptr_t>(spec.input), output = reinterpret_cast<std::uintptr_t>(spec.output);
  const std::size_t mine = bytes * static_cast<std::size_t>(rank);
  const bool same = input + (scatters ? mine : 0) == output + (gathers ? mine : 0);
  const bool apart = input + (scatters ? all : bytes) <= output || output + (gathers ? all : bytes) <= input;
  if (same || apart || bytes == 0) return;
  throw std::invalid_argument("the output of " + describe(spec) + " overlaps the input " +
                              (gathers || scatters ? "elsewhere than in this rank's own part" : "partly") +
                              "; clone one of them first");
}

// Copies what this rank gives to itself, on the caller's thread.
void prepare_own_part(Op& op, int rank) {
  if (by_messages(op.spec.kind)) return copy_own_block(op.spec, rank);
  if (op.spec.kind != Kind::all_gather) return;
  const std::size_t bytes = op.spec.count * op.width();
  std::byte* to = op.spec.output + static_cast<std::size_t>(rank) * bytes;
  if (bytes && to != op.spec.input) std::memmove(to, op.spec.input, bytes);
}

TransportOptions transport_options(const EngineOptions& options) {
  TransportOptions transport;
  transport.tcp.address = options.address;
  transport.tcp.secret = options.secret;
  transport.tcp.send_buffer_bytes = options.send_buffer_bytes;
  transport.tcp.grace_s = options.peer_grace_s;
  transport.tcp.num_threads = options.network_threads;
  transport.tcp.protection = options.protection;
  transport.tcp.private_key = options.private_key;
  transport.fabric = options.fabric;
  transport.shuffle = options.shuffle;
  transport.payload_bytes = std::max(transport.payload_bytes, 2 * options.chunk_bytes);  // 16-bit elements may be sent as 32-bit ones
  return transport;
}

}  // namespace

Engine::Engine(EngineOptions options)
    : options_(std::move(options)),
      ops_(options_.group),
      completer_(options_.ordered_callbacks, [this](std::uint64_t seq, double timeout_s) { return has_ended(seq, timeout_s); }) {
  shoal::require_possible(options_);
  const TransportOptions transport = transport_options(options_);
  auto connections = options_.share_connections ? Connections::shared(transport, options_.group, options_.returning)
                                                : std::make_shared<Connections>(transport);
  channel_ = std::make_shared<Channel>(std::move(connections), options_.group);
}

Engine::~Engine() {
  HostStage* const stage = this->stage();
  if (getpid() != pid_) {  // threads do not survive a fork: nothing to join in the child
    const MutexLock lock(mutex_);
    static_cast<void>(stage_.release());
    static_cast<void>(protocol_.release());
    static_cast<void>(new std::shared_ptr<Channel>(std::move(channel_)));
    return;
  }
  channel_->close("its engine was destroyed");
  if (stage) stage->stop();
  if (protocol_) protocol_->messages.clear();
  if (protocol_) protocol_->path.clear();  // a queue that is released may post to the transport
}

Engine::Protocol::Protocol(Engine& engine)
    : mailbox(*engine.channel_, engine.members_, *engine.topology_, engine.ops_),
      router(engine.members_, *engine.topology_, engine.options_.workers_serve),
      liveness(engine.members_, *engine.topology_, router, engine.ops_, mailbox, engine.journal_, engine.options_.straggler_s),
      mismatch(engine.members_, engine.ops_, mailbox),
      path({engine.options_, engine.members_, *engine.topology_, router, engine.ops_, mailbox, liveness, mismatch,
            engine.journal_, engine.pool_,
            engine.finish_on_host(),
            [&engine](std::function<void()> step) { engine.post(std::move(step)); }}),
      messages({engine.options_, engine.members_, *engine.topology_, engine.ops_, mailbox, mismatch, engine.journal_,
                [&engine](std::function<void()> step) { engine.post(std::move(step)); }}) {}

// Returns how a chunk continues on the host once its result is there: not at all where the rank is alone.
std::function<void(const Op&, std::uint64_t)> Engine::finish_on_host() {
  if (topology_->my_locals().size() == 1) return nullptr;
  return [this](const Op& op, std::uint64_t index) {
    if (HostStage* stage = this->stage()) stage->finish(op, index);
  };
}

// ---- callers --------------------------------------------------------------------------------------------

void Engine::set_pattern(std::vector<int> pattern) {
  const MutexLock lock(submit_mutex_);
  if (keeps_weights_) throw std::invalid_argument("the servers keep weights, which cannot move");
  topology_->set_pattern(std::move(pattern));
  fused_ = {};
}

std::uint64_t Engine::submit(OpSpec spec) {
  std::vector<OpSpec> one;
  one.push_back(std::move(spec));
  return submit_all(std::move(one)).front();
}

std::vector<std::uint64_t> Engine::submit_all(std::vector<OpSpec> specs) {
  if (options_.ordered_callbacks) await_callbacks(specs);
  const MutexLock lock(submit_mutex_);
  ops_.require_open();
  for (const OpSpec& spec : specs) require_possible(spec);
  for (const OpSpec& spec : specs) {
    if (!is_message(spec.kind)) completer_.begin(spec);
    keeps_weights_ = keeps_weights_ || is_served(spec.kind);
    keeps_single_ = keeps_single_ || (is_served(spec.kind) && !spec.copied);
  }
  std::vector<OpPtr> ops;
  for (OpSpec& spec : specs) ops.push_back(make_op(std::move(spec)));
  ops_.add(ops);
  std::vector<std::uint64_t> numbers;
  std::vector<std::function<void()>> steps;
  for (const OpPtr& op : ops) {
    begin(op, steps);
    numbers.push_back(op->seq);
  }
  if (steps.size() == 1) post(std::move(steps.front()));
  if (steps.size() > 1) {
    post([steps = std::move(steps)] {
      for (const auto& step : steps) step();
    });
  }
  return numbers;
}

void Engine::await_callbacks(const std::vector<OpSpec>& specs) {
  for (const OpSpec& spec : specs) {
    if (!is_message(spec.kind)) return completer_.await_callbacks(spec);
  }
}

// Begins an operation that has its number. Adds to `steps` what the network thread does for it.
void Engine::begin(const OpPtr& op, std::vector<std::function<void()>>& steps) {
  if (op->in_question) {
    steps.emplace_back([this, op]() SHOAL_NO_ANALYSIS { protocol_->mismatch.begun(*op); });
  }
  if (op->spec.kind == Kind::delegated) return;
  prepare_own_part(*op, options_.rank);
  HostStage* const stage = this->stage();
  const bool on_host = stage && topology_->num_hosts() == 1;
  if (is_message(op->spec.kind) || (by_messages(op->spec.kind) && !on_host)) {
    steps.emplace_back([this, op]() SHOAL_NO_ANALYSIS { protocol_->messages.begin(op); });
    return;
  }
  if (!stage) {
    steps.emplace_back([this, op]() SHOAL_NO_ANALYSIS { protocol_->path.begin(op); });
    return;
  }
  stage->submit(op);
  const bool receives = !op->sums() && topology_->num_hosts() > 1;
  if (receives) steps.emplace_back([this]() SHOAL_NO_ANALYSIS { protocol_->mailbox.broadcast({FrameType::heartbeat}); });
}

// Rejects what the reducing thread could not handle.
void Engine::require_possible(const OpSpec& spec) const {
  const bool rooted = spec.kind == Kind::broadcast || spec.kind == Kind::reduce || spec.kind == Kind::gather ||
                      spec.kind == Kind::scatter;
  if (rooted && (spec.root < 0 || spec.root >= options_.size)) {
    throw std::invalid_argument("the root of a " + std::string(name_of(spec.kind)) + " is rank " +
                                std::to_string(spec.root) + " of " + std::to_string(options_.size));
  }
  const bool reduces = spec.kind == Kind::all_reduce || spec.kind == Kind::reduce || spec.kind == Kind::reduce_scatter;
  if (reduces) shoal::require_possible({spec.combine, spec.element, spec.element, options_.size});
  if (is_served(spec.kind)) require_servers(spec);
  if (by_messages(spec.kind)) return require_blocks(spec, options_.rank, options_.size);
  require_apart(spec, options_.rank, options_.size);
}

void Engine::require_servers(const OpSpec& spec) const {
  if (topology_->num_hosts() < 2) {
    throw std::invalid_argument("all ranks of group '" + options_.group +
                                "' share a host, where nothing is sent to servers that could keep weights; start it on "
                                "two hosts or more");
  }
  if (spec.copied && topology_->num_helpers() == 0) {
    throw std::invalid_argument("a second copy of the weights is for helpers, which may be lost, and group '" + options_.group +
                                "' has none: a worker that is lost ends the group anyway; leave replicas out, or start "
                                "helpers (shoal serve)");
  }
  const Element element = spec.kind == Kind::configure ? Element::uint8
                          : spec.kind == Kind::update || spec.kind == Kind::collect ? Element::float32
                                                                                    : Element::int32;
  const bool answers = spec.weights == Element::float32 || spec.weights == Element::bfloat16;
  const bool is_matrix = !is_factored(spec.kind) || spec.columns > 0;
  if (spec.count > 0 && spec.element == element && spec.root >= 0 && answers && is_matrix) return;
  throw std::invalid_argument("a " + std::string(name_of(spec.kind)) + " takes " + std::string(name_of(element)) +
                              " elements, at least one, not " + std::to_string(spec.count) + " of " +
                              std::string(name_of(spec.element)));
}

OpPtr Engine::make_op(OpSpec spec) {
  auto op = std::make_shared<Op>(std::move(spec));
  if (op->spec.kind == Kind::delegated || by_messages(op->spec.kind)) return op;
  const bool one_host = topology_->num_hosts() == 1;
  if (one_host && options_.size > 1 && HostStage::is_direct(op->spec, options_.size)) return op;  // it moves as a whole
  // where ranks share a host, the host stage emits chunks in call order
  op->ordered = op->spec.priority && op->spec.kind == Kind::all_reduce && !topology_->any_host_shared();
  op->chunks = topology_->divide(op->spec, options_, op->ordered, fused_);
  op->num_links = topology_->num_links(op->spec.kind);
  op->parts.resize(op->chunks.size());
  return op;
}

void Engine::finish_delegated(std::uint64_t seq) {
  if (const OpPtr op = ops_.find(seq)) ops_.release(op);
}

bool Engine::wait(std::uint64_t seq, double timeout_s) {
  const auto begin = Clock::now();
  HostStage* const stage = this->stage();
  if (stage && topology_->num_hosts() == 1) {
    if (const OpPtr op = ops_.find(seq); op && !is_message(op->spec.kind)) stage->drive(*op, timeout_s);
  }
  const double left_s = timeout_s - std::chrono::duration<double>(Clock::now() - begin).count();
  return ops_.wait(seq, timeout_s < 0 ? timeout_s : std::max(0.0, left_s));
}

// As wait(), for an operation that may have failed.
bool Engine::has_ended(std::uint64_t seq, double timeout_s) {
  try {
    return wait(seq, timeout_s);
  } catch (const GroupError&) {
    return true;
  }
}

bool Engine::is_done(std::uint64_t seq) {
  if (ops_.is_done(seq)) return true;
  HostStage* const stage = this->stage();
  return stage && stage->advance() && ops_.is_done(seq);
}

void Engine::on_end(std::uint64_t seq, std::function<void()> then) {
  ops_.on_end(seq, std::move(then));
  if (HostStage* stage = this->stage()) stage->advance_alone();
}

void Engine::abort(const std::string& reason) {
  if (!started_ || ops_.is_closed()) return;
  auto done = std::make_shared<std::promise<void>>();
  channel_->post([this, reason, done] {
    channel_->assert_here();
    fail(reason);
    done->set_value();
  });
  done->get_future().wait_for(seconds(kAbortS));
}

void Engine::close() {
  completer_.stop();
  if (!ops_.close()) return;
  if (!started_) return channel_->close("it was closed before it had met the others");
  post([this]() SHOAL_NO_ANALYSIS { protocol_->path.send_withheld(); });
  channel_->post([this] {
    channel_->assert_here();
    protocol_->mailbox.broadcast({FrameType::goodbye});
  });
  channel_->flush(kFlushS);
  linger();
  if (HostStage* stage = this->stage()) stage->stop();
  channel_->close("it has left the group");
  ops_.end_all("group '" + options_.group + "' was closed");
  completer_.join(kJoinS);
}

// Waits until the others have what this rank has completed: if a helper is lost that has answered this rank and not
// them, they need its result or its contribution again.
void Engine::linger() {
  const auto until = Clock::now() + seconds(kLingerS);
  for (bool needed = topology_->num_helpers() > 0; needed && Clock::now() < until;) {
    const auto answer = std::make_shared<std::promise<bool>>();
    channel_->post([this, answer] {
      channel_->assert_here();
      answer->set_value(is_needed());
    });
    needed = answer->get_future().get();
    if (needed) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

bool Engine::is_needed() { return !failed_ && protocol_->liveness.anybody_lacks(ops_.num_completed()); }

std::map<std::string, std::uint64_t> Engine::counters() {
  auto counts = channel_->counters();
  counts.merge(ops_.counters());
  counts["held_bytes"] = protocol_ ? protocol_->path.held_bytes() : 0;
  return counts;
}

std::vector<std::string> Engine::lost_helpers() {
  const MutexLock lock(mutex_);
  return lost_helpers_;
}

std::vector<int> Engine::lost_ranks() {
  const MutexLock lock(mutex_);
  return lost_ranks_;
}

HostStage* Engine::stage() {
  const MutexLock lock(mutex_);
  return stage_.get();
}

// ---- the network thread -----------------------------------------------------------------------------

template <class Step>
void Engine::guarded(const Step& step) {
  if (failed_) return;
  try {
    try {
      step();
    } catch (const ProtocolError& error) {
      const std::string what = std::string("sent a malformed frame: ") + error.what();
      if (!members_.is_helper(error.peer)) throw GroupFailure(members_.name_of(error.peer) + " " + what);
      lose_helper(error.peer, "it " + what, true);
    }
  } catch (const GroupFailure& error) {
    fail(error.what());
  } catch (const ProtocolError& error) {  // while a helper's chunks were moved
    fail(members_.name_of(error.peer) + " sent a malformed frame: " + error.what());
  }
}

void Engine::post(std::function<void()> step) {
  channel_->post([this, step = std::move(step)] {
    channel_->assert_here();
    guarded(step);
  });
}

std::shared_ptr<std::byte> Engine::place_for(int peer, const FrameHeader& header) {
  channel_->assert_here();
  return failed_ ? nullptr : protocol_->path.place_for(peer, header);
}

void Engine::on_frame(int peer, const FrameHeader& header, Payload payload) {
  channel_->assert_here();
  const int from = protocol_->mailbox.pass_on(peer, header, payload);
  if (header.type == FrameType::rank_lost && from >= 0 && from != peer) {
    return channel_->lost_elsewhere(from, printable(text_of(payload)));
  }
  guarded([&]() SHOAL_NO_ANALYSIS {
    if (from < 0) throw ProtocolError(peer, "a notice of rank " + std::to_string(header.server - kPassedOn) + " that is not for it to pass on");
    try {
      dispatch(from, header, std::move(payload));
    } catch (const ProtocolError& error) {
      if (from == peer) throw;
      throw GroupFailure(members_.name_of(peer) + " passed on from " + members_.name_of(from) + " " + error.what() +
                         ": the memory or the program of one of them is corrupt");
    }
  });
}

void Engine::dispatch(int peer, const FrameHeader& header, Payload payload) {
  Protocol& on = *protocol_;
  if (on.liveness.heard(peer, header)) on.path.on_begun(peer);
  if (on.mismatch.diverged() && carries_data(header.type)) return;
  switch (header.type) {
    case FrameType::push: return on.path.on_push(peer, header, std::move(payload));
    case FrameType::result: return on.path.deliver(peer, header, std::move(payload));
    case FrameType::supply: return on.path.on_supply(peer, header, std::move(payload));
    case FrameType::copy: return on.path.on_copy(peer, header, std::move(payload));
    case FrameType::copied: throw ProtocolError(peer, "this rank sends no copies");
    case FrameType::heartbeat: return;
    case FrameType::order: return on.path.on_order(peer, header);
    case FrameType::server_down:
      if (header.chunk >= members_.helpers.size()) throw ProtocolError(peer, "there is no helper " + std::to_string(header.chunk));
      return lose_helper(members_.size() + static_cast<int>(header.chunk), printable(text_of(payload)), false);
    case FrameType::announce: return on.mismatch.on_announcement(peer, header, printable(text_of(payload)));
    case FrameType::mismatch: return on.mismatch.on_mismatch(peer, header);
    case FrameType::fail:
      throw GroupFailure((members_.is_helper(peer) ? members_.name_of(peer) + " reports: " : "") + printable(text_of(payload)));
    case FrameType::offer: return on.messages.on_offer(peer, header, std::move(payload));
    case FrameType::accept: return on.messages.on_accept(peer, header);
    case FrameType::part: return on.messages.on_part(peer, header, payload);
    case FrameType::room: return on.messages.on_room(peer, header);
    case FrameType::goodbye:
      if (!members_.is_helper(peer)) on.liveness.left(peer);
      return;
    case FrameType::fabric:
    case FrameType::rank_lost: throw ProtocolError(peer, "it says that it was lost");
    case FrameType::path_lost:
    case FrameType::join:
    case FrameType::leave: return;  // Connections and the transport have taken them
  }
}

void Engine::on_down(int peer, const std::string& why) {
  channel_->assert_here();
  protocol_->mailbox.tell_lost(peer, why);
  note_lost(peer);
  guarded([&]() SHOAL_NO_ANALYSIS {
    if (members_.is_helper(peer)) return lose_helper(peer, why, true);
    if (!protocol_->liveness.has_left(peer)) throw GroupFailure(members_.name_of(peer) + " was lost: " + why);
    protocol_->liveness.gone(peer);
    on_tick();
  });
}

// A group that has failed still tells who is lost: the others go on without them.
void Engine::note_lost(int peer) {
  if (members_.is_helper(peer) || protocol_->liveness.has_left(peer)) return;
  const MutexLock lock(mutex_);
  lost_ranks_.push_back(peer);
}

// Before all have met nothing waits for anybody, and in a large group heartbeats would delay the meeting.
void Engine::on_tick() {
  channel_->assert_here();
  if (!met_) return;
  guarded([&]() SHOAL_NO_ANALYSIS {
    Protocol& on = *protocol_;
    on.liveness.tick([&](const Op& op) SHOAL_NO_ANALYSIS { on.mismatch.announce(op); });
    replace_silent_helpers();
    const std::uint64_t done = on.liveness.num_completed_by_all();
    on.path.forget_below(done);
    on.mismatch.forget_below(done);
  });
}

// A helper may stand still though its host answers. One that has the only copy of weights is waited for.
void Engine::replace_silent_helpers() {
  const double patience_s = options_.helper_patience_s;
  if (patience_s <= 0 || keeps_single_) return;
  for (int server : protocol_->liveness.silent_helpers(patience_s)) {
    lose_helper(server, "it has said nothing for " + std::to_string(std::lround(patience_s)) + " s", true);
  }
}

void Engine::on_error(const std::string& what) {
  channel_->assert_here();
  guarded([&] { throw GroupFailure("an error of " + members_.name_of(options_.rank) + " itself: " + what); });
}

void Engine::lose_helper(int server, const std::string& why, bool tell) {
  if (!protocol_->router.lose(server)) return;
  channel_->drop(server, why);
  const std::string& name = members_.helper(server).name;
  const auto index = static_cast<std::uint64_t>(server - members_.size());
  if (tell) protocol_->mailbox.broadcast({FrameType::server_down, 0, index, 0, why});
  {
    const MutexLock lock(mutex_);
    lost_helpers_.push_back(name);
  }
  if (keeps_single_) {
    throw GroupFailure("helper " + name + " was lost (" + why + "), and with it the weights and optimizer state that it kept; "
                       "start again from the last checkpoint, with or without servers that update, or with replicas=2");
  }
  journal_.note("helper " + name + " was lost (" + why + "); the others take over its chunks" +
                (keeps_weights_ ? ", and workers go on with their copies of its weights and optimizer state" : ""));
  protocol_->path.reroute(server);
}

// Fails every operation and notifies the others; the first cause wins. Callers' memory is not accessed afterwards:
// first everything that points into it is dropped, then the operations end. Before that the cause is on its way: a
// caller may end its process at once, and others must not take the closed connection for the cause.
void Engine::fail(const std::string& cause) {
  if (std::exchange(failed_, true)) return;
  const std::string message = with_pending(cause);
  protocol_->mailbox.broadcast({FrameType::fail, 0, 0, 0, cause});
  channel_->drop_data();
  channel_->write_queued();
  protocol_->path.clear();
  protocol_->messages.clear();
  if (HostStage* stage = this->stage()) stage->stop();
  ops_.end_all(message);
}

std::string Engine::with_pending(const std::string& cause) {
  const std::vector<OpPtr> pending = ops_.pending();
  const std::string text = "group '" + options_.group + "', " + members_.name_of(options_.rank) + ": " + cause;
  if (pending.empty()) return text;
  const Op& first = *pending.front();
  return text + "; under way here: " + numbered(first.seq) + ", " + describe(first.spec) +
         (pending.size() > 1 ? " and " + std::to_string(pending.size() - 1) + " more" : "");
}

}  // namespace shoal
