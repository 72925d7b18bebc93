#include "engine/engine.h"

#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "base/clock.h"
#include "engine/combine.h"

namespace shoal {

namespace {

constexpr double kFlushS = 1.0;
constexpr double kSliceS = 0.25;
constexpr double kHelperS = 30.0;  // helpers are started before the workers

}  // namespace

Engine::Engine(EngineOptions options) : options_(std::move(options)), records_(kRecords) {
  TcpOptions tcp;
  tcp.address = options_.address;
  tcp.port = options_.port;
  tcp.secret = options_.secret;
  tcp.send_buffer_bytes = options_.send_buffer_bytes;
  tcp.grace_s = options_.peer_grace_s;
  transport_.reset(new TcpTransport(std::move(tcp), *this));
}

Engine::~Engine() {
  if (getpid() != pid_) {  // threads do not survive a fork: in the child there is nothing to end
    static_cast<void>(stage_.release());
    static_cast<void>(transport_.release());
    return;
  }
  if (transport_) transport_->stop();
  stage_.reset();
  for (PeerState& state : states_) state.deferred.clear();
  transport_.reset();  // lets go of what its queues hold while the rest of the engine still stands
}

void Engine::connect(std::vector<PeerInfo> peers, std::vector<HelperInfo> helpers, std::vector<int> pattern,
                     const std::string& segment, double timeout_s) {
  std::vector<std::string> hosts;
  for (const PeerInfo& peer : peers) hosts.push_back(peer.host);
  const int num_helpers = static_cast<int>(helpers.size());
  topology_ = std::make_unique<Topology>(options_.rank, std::move(hosts), num_helpers, std::move(pattern));
  // A helper may still hold the connections of an earlier job whose group had the same name.
  identity_ = (segment + " " + options_.group).substr(0, kMaxGroupName);
  peers_ = std::move(peers);
  helpers_ = std::move(helpers);
  const auto num_servers = static_cast<std::size_t>(options_.size + num_helpers);
  states_.resize(num_servers);
  lost_helpers_.resize(static_cast<std::size_t>(num_helpers));
  for (PeerState& state : states_) state.heard_ns = now_ns();
  server_ = std::make_unique<SumServer>(
      pool_, [this](int peer, const FrameHeader& header, const Payload& payload) { answer(peer, header, payload); },
      [this](std::uint64_t seq) { disagree(seq); });
  transport_->start();

  const auto until = Clock::now() + seconds(timeout_s);
  std::vector<std::size_t> wanted(num_servers);
  const auto meet = [&](int index, const std::string& address, int port, int data, bool call) {
    transport_->set_peer(index, address, port);
    wanted[static_cast<std::size_t>(index)] = static_cast<std::size_t>(1 + data);
    if (!call) return;
    Introduction me{{identity_, options_.rank, options_.size}, true};
    for (int k = 0; k < 1 + data; ++k) {
      me.control = k == 0;
      try {
        const double left_s = std::chrono::duration<double>(until - Clock::now()).count();
        transport_->call_peer(index, me, topology_->is_helper(index) ? std::min(left_s, kHelperS) : left_s);
      } catch (const std::runtime_error& error) {
        throw std::runtime_error(server_name(index) + ": " + error.what());
      }
    }
  };
  for (int rank = 0; rank < options_.size; ++rank) {
    if (rank == options_.rank) continue;
    const PeerInfo& peer = peers_[static_cast<std::size_t>(rank)];
    const bool same_host = topology_->host_of(rank) == topology_->my_host();
    meet(rank, peer.address, peer.port, same_host ? 0 : options_.connections_per_peer, rank < options_.rank);
  }
  for (int k = 0; k < num_helpers; ++k) {
    const HelperInfo& helper = helpers_[static_cast<std::size_t>(k)];
    meet(options_.size + k, helper.address, helper.port, options_.connections_per_peer, true);
  }
  await_all(wanted, until, timeout_s);
  const auto num_locals = topology_->my_locals().size();
  if (num_locals < 2) return;
  const bool alone = topology_->num_hosts() == 1;
  ShmLayout layout;
  layout.num_ranks = static_cast<int>(num_locals);
  layout.slot_bytes = alone ? options_.shared_chunk_bytes : options_.chunk_bytes;
  layout.result_bytes = alone ? layout.slot_bytes : 2 * layout.slot_bytes;
  layout.num_slots = alone ? options_.num_slots : 4 * options_.num_slots;
  StageHooks hooks;
  hooks.push = [this](const OpPtr& op, std::uint64_t index, const std::byte* data, Element input, std::byte* to) {
    op->pending.fetch_add(1);
    const std::size_t bytes = op->chunks[index].count * size_of(input);
    transport_->post([=, this] { push(op, index, {data, bytes, nullptr, 0, false}, input, to); });
  };
  hooks.expect = [this](const OpPtr& op, std::uint64_t index, std::byte* to) {
    op->pending.fetch_add(1);
    transport_->post([=, this] { expect(op, index, to); });
  };
  hooks.done = [this](const OpPtr& op) { finished_one(op); };
  hooks.disagree = [this](std::uint64_t seq) { transport_->post([=, this] { disagree(seq); }); };
  hooks.trace = [this](const char* what, std::uint64_t begin, std::uint64_t seq, std::uint64_t chunk) {
    traced(what, begin, seq, chunk);
  };
  auto stage = std::make_unique<HostStage>(*topology_, segment + "-" + std::to_string(topology_->my_host()), layout,
                                       options_.wide_partials, timeout_s, std::move(hooks));
  const std::lock_guard lock(mutex_);  // the transport's thread may be at work: a peer may have failed already
  stage_ = std::move(stage);
}

// Waits for the connections of each peer. Throws std::runtime_error that names who has not come.
void Engine::await_all(const std::vector<std::size_t>& wanted, Clock::time_point until, double timeout_s) {
  const std::size_t all = std::accumulate(wanted.begin(), wanted.end(), std::size_t{0});
  while (!transport_->wait_for_connections(all, kSliceS)) {
    if (const std::string why = error(); !why.empty()) throw std::runtime_error(why);
    if (Clock::now() < until) continue;
    std::string missing;
    for (std::size_t peer = 0; peer < wanted.size(); ++peer) {
      if (transport_->connections_of(static_cast<int>(peer)) >= wanted[peer]) continue;
      missing += (missing.empty() ? "" : ", ") + server_name(static_cast<int>(peer));
    }
    const auto strangers = transport_->counters().at("strangers_dropped");
    throw std::runtime_error(missing + " did not connect to " + who(options_.rank) + " within " +
                             std::to_string(static_cast<int>(timeout_s)) + " s" +
                             (strangers ? "; connections that were turned away: " + std::to_string(strangers) +
                                              " (have all ranks the same secret?)"
                                        : ""));
  }
}

// ---- callers --------------------------------------------------------------------------------------------

void Engine::set_pattern(std::vector<int> pattern) {
  const std::lock_guard lock(mutex_);
  topology_->set_pattern(std::move(pattern));
  position_ = 0;
}

std::uint64_t Engine::submit(OpSpec spec) {
  const std::lock_guard lock(mutex_);
  if (!error_.empty()) throw GroupError(error_);
  if (closed_ || !topology_) throw GroupError("group '" + options_.group + "' is not open");
  require_possible(spec);
  const OpPtr op = make_op(std::move(spec));
  if (op->spec.kind == Kind::delegated) return op->seq;
  prepare_own_part(*op);
  if (stage_) {
    stage_->submit(op);
    const bool receives = !op->sums() && topology_->num_hosts() > 1;
    if (receives) transport_->post([this] { broadcast(FrameType::heartbeat, 0, 0, 0, ""); });
  } else {
    transport_->post([this, op] { begin(op); });
  }
  return op->seq;
}

// What would only be found out by the thread that combines is refused here.
void Engine::require_possible(const OpSpec& spec) const {
  const bool rooted = spec.kind == Kind::broadcast || spec.kind == Kind::reduce;
  if (rooted && (spec.root < 0 || spec.root >= options_.size)) {
    throw std::invalid_argument("the root of a " + std::string(name_of(spec.kind)) + " is rank " +
                                std::to_string(spec.root) + " of " + std::to_string(options_.size));
  }
  const bool reduces = spec.kind == Kind::all_reduce || spec.kind == Kind::reduce || spec.kind == Kind::reduce_scatter;
  if (reduces) shoal::require_possible({spec.combine, spec.element, spec.element, options_.size});
}

// Numbers the operation, cuts it, and remembers what was asked for. The caller holds the mutex.
OpPtr Engine::make_op(OpSpec spec) {
  auto op = std::make_shared<Op>();
  op->spec = std::move(spec);
  op->seq = next_seq_++;
  op->signature = signature_of(op->spec);
  op->begun = Clock::now();
  if (op->spec.kind != Kind::delegated) {
    const std::size_t most = topology_->num_hosts() == 1 ? options_.shared_chunk_bytes : options_.chunk_bytes;
    op->chunks = topology_->cut(op->spec, most, position_);
    op->parts.resize(op->chunks.size());
  }
  const std::string name(op->spec.kind == Kind::delegated ? op->spec.name : std::string(name_of(op->spec.kind)));
  counts_["ops_" + name] += 1;
  counts_["bytes_" + name] += op->spec.count * op->width();
  records_[op->seq % kRecords] = {op->seq, op->signature, describe(op->spec)};
  ops_[op->seq] = op;
  submitted_ = next_seq_;
  const bool told = told_.erase(op->seq) > 0;
  if (told || announced_.count(op->seq)) {
    transport_->post([this, op] {
      announce(*op);
      std::vector<Announcement> heard;
      {
        const std::lock_guard lock(mutex_);
        const auto found = announced_.find(op->seq);
        if (found != announced_.end()) heard = std::move(found->second);
        announced_.erase(op->seq);
      }
      for (const Announcement& each : heard) compare(op->seq, {op->seq, op->signature, describe(op->spec)}, each);
    });
  }
  return op;
}

// An all_gather's own tensor reaches the output on the caller's thread.
void Engine::prepare_own_part(Op& op) {
  if (op.spec.kind != Kind::all_gather) return;
  const std::size_t bytes = op.spec.count * op.width();
  std::byte* to = op.spec.output + static_cast<std::size_t>(options_.rank) * bytes;
  if (bytes && to != op.spec.input) std::memmove(to, op.spec.input, bytes);
}

void Engine::finish_delegated(std::uint64_t seq) {
  if (const OpPtr op = find(seq)) finished_one(op);
}

bool Engine::wait(std::uint64_t seq, double timeout_s) {
  std::unique_lock lock(mutex_);
  const auto over = [&] { return !ops_.count(seq); };
  if (timeout_s < 0) changed_.wait(lock, over);
  else if (!changed_.wait_for(lock, seconds(timeout_s), over)) return false;
  if (failed_ops_.count(seq)) throw GroupError(error_);
  return true;
}

bool Engine::is_done(std::uint64_t seq) {
  const std::lock_guard lock(mutex_);
  return !ops_.count(seq);
}

void Engine::watch(std::uint64_t seq) {
  {
    const std::lock_guard lock(mutex_);
    if (ops_.count(seq)) watched_.insert(seq);
    else watched_done_.push_back(seq);
  }
  changed_.notify_all();
}

std::vector<std::uint64_t> Engine::next_watched(double timeout_s) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, seconds(timeout_s), [&] { return !watched_done_.empty(); });
  std::vector<std::uint64_t> done(watched_done_.begin(), watched_done_.end());
  watched_done_.clear();
  return done;
}

std::string Engine::error() {
  const std::lock_guard lock(mutex_);
  return closed_ ? "" : error_;
}

void Engine::abort(const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_ || !topology_) return;
  }
  auto done = std::make_shared<std::promise<void>>();
  transport_->post([this, reason, done] {
    fail(reason);
    done->set_value();
  });
  done->get_future().wait_for(std::chrono::seconds(5));
}

void Engine::close() {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  if (!topology_) return;
  transport_->post([this] {
    send_deferred();
    broadcast(FrameType::goodbye, 0, 0, 0, "");
  });
  transport_->flush(kFlushS);
  if (stage_) stage_->stop();
  transport_->stop();
  const std::lock_guard lock(mutex_);
  if (error_.empty()) error_ = "group '" + options_.group + "' was closed";
  for (const auto& [seq, op] : ops_) {
    failed_ops_.insert(seq);
    if (watched_.erase(seq)) watched_done_.push_back(seq);
  }
  ops_.clear();
  changed_.notify_all();
}

// ---- the end of an operation ----------------------------------------------------------------------------

void Engine::finished_one(const OpPtr& op) {
  if (op->pending.fetch_sub(1) == 1) complete(op);
}

void Engine::complete(const OpPtr& op) {
  {
    const std::lock_guard lock(mutex_);
    if (!ops_.erase(op->seq)) return;
    if (watched_.erase(op->seq)) watched_done_.push_back(op->seq);
    completed_ = ops_.empty() ? next_seq_ : ops_.begin()->first;
  }
  changed_.notify_all();
}

OpPtr Engine::find(std::uint64_t seq) {
  const std::lock_guard lock(mutex_);
  const auto found = ops_.find(seq);
  return found == ops_.end() ? nullptr : found->second;
}

HostStage* Engine::stage() {
  const std::lock_guard lock(mutex_);
  return stage_.get();
}

std::vector<OpPtr> Engine::pending_ops() {
  const std::lock_guard lock(mutex_);
  std::vector<OpPtr> ops;
  for (const auto& [seq, op] : ops_) ops.push_back(op);
  return ops;
}

// ---- what can be seen -----------------------------------------------------------------------------------

std::map<std::string, std::uint64_t> Engine::counters() {
  auto counts = transport_->counters();
  const std::lock_guard lock(mutex_);
  counts.insert(counts_.begin(), counts_.end());
  counts["held_bytes"] = server_ ? server_->held_bytes() : 0;
  return counts;
}

void Engine::note(const std::string& text) {
  std::fprintf(stderr, "shoal: %s\n", text.c_str());
  const std::lock_guard lock(mutex_);
  events_.push_back(text);
}

std::vector<std::string> Engine::take_events() {
  const std::lock_guard lock(mutex_);
  return std::exchange(events_, {});
}

void Engine::traced(const char* what, std::uint64_t begin_ns, std::uint64_t seq, std::uint64_t chunk) {
  if (!tracing_) return;
  const std::lock_guard lock(mutex_);
  events_trace_.push_back({what, begin_ns, now_ns(), seq, chunk});
}

std::vector<TraceEvent> Engine::take_trace() {
  const std::lock_guard lock(mutex_);
  return std::exchange(events_trace_, {});
}

}  // namespace shoal
