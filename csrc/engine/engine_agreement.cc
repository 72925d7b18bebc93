// Ranks that do not ask for the same thing, and servers that are lost on the way.
#include <algorithm>
#include <tuple>

#include "engine/engine.h"

namespace shoal {

namespace {

constexpr std::size_t kNamedRanks = 8;

}  // namespace

// ---- ranks that ask for different things ----------------------------------------------------------------

void Engine::announce(const Op& op) {
  broadcast(FrameType::announce, op.seq, 0, op.signature, describe(op.spec));
}

void Engine::heard_announcement(int rank, const FrameHeader& header, const std::string& text) {
  const Announcement theirs{rank, header.signature, text};
  {
    const std::lock_guard lock(mutex_);
    std::vector<Announcement>& heard = announced_[header.seq];
    std::erase_if(heard, [&](const Announcement& each) { return each.rank == rank; });
    heard.push_back(theirs);
    if (header.seq >= next_seq_) return;
  }
  compare(header.seq, record_of(header.seq), theirs);
  judge(header.seq);
}

void Engine::compare(std::uint64_t seq, const Record& mine, const Announcement& theirs) {
  if (mine.seq != seq || mine.signature == theirs.signature) return;
  const bool first = options_.rank < theirs.rank;  // so that all ranks tell the same story
  const std::string a = who(options_.rank) + " asks for " + mine.text;
  const std::string b = who(theirs.rank) + " asks for " + theirs.text;
  fail("the ranks do not agree about " + numbered(seq) + ": " + (first ? a : b) + ", " + (first ? b : a));
}

// What this rank asked for at `seq`; another number in it where that was long ago or is still to come.
Engine::Record Engine::record_of(std::uint64_t seq) {
  const std::lock_guard lock(mutex_);
  return records_[seq % kRecords];
}

// ---- frames that do not fit each other ------------------------------------------------------------------

// Either the ranks ask for different things, or a frame does not say what its sender asks for. All announce what
// they ask for: the first shows in the announcements, the second where one contradicts its sender's frame.

void Engine::frames_differ(const SumServer::Conflict& conflict) {
  const auto& [first, second] = std::tie(conflict.first, conflict.second);
  if (first.signature != second.signature) {
    suspect(conflict.seq, first.peer, first.signature);
    return suspect(conflict.seq, second.peer, second.signature);
  }
  fail(who(first.peer) + " sent chunk " + std::to_string(conflict.chunk) + " of " + numbered(conflict.seq) + " as " +
       first.sent + ", " + who(second.peer) + " as " + second.sent);
}

// This rank has seen such a frame of `rank`.
void Engine::suspect(std::uint64_t seq, int rank, std::uint64_t signature) {
  broadcast(FrameType::tell, seq, static_cast<std::uint64_t>(rank), signature, "");
  disagree(seq, {rank, signature, options_.rank});
}

void Engine::heard_suspicion(int teller, const FrameHeader& header) {
  if (header.chunk >= static_cast<std::uint64_t>(options_.size)) {
    return malformed(teller, "it suspects rank " + std::to_string(header.chunk) + " of " + std::to_string(options_.size));
  }
  disagree(header.seq, {static_cast<int>(header.chunk), header.signature, teller});
}

void Engine::disagree(std::uint64_t seq, const Suspicion& suspicion) {
  if (failed_) return;
  if (suspicions_.size() >= kRecords && !suspicions_.count(seq)) return;
  std::vector<Suspicion>& known = suspicions_[seq];
  if (known.size() >= static_cast<std::size_t>(2 * options_.size)) return;  // enough to judge by
  known.push_back(suspicion);
  {
    const std::lock_guard lock(mutex_);
    if (seq >= next_seq_) {
      told_.insert(seq);
      return;
    }
  }
  const Record mine = record_of(seq);
  if (mine.seq != seq) return;
  parted_ = true;
  if (known.size() == 1) {
    std::size_t count = 0;
    for (const OpPtr& op : pending_ops()) {  // the ranks may have parted earlier than here
      if (op->seq < seq && ++count <= kNamedRanks) announce(*op);
    }
    broadcast(FrameType::announce, seq, 0, mine.signature, mine.text);
  }
  judge(seq);
}

// Names the rank whose frame contradicts what it announces; or who spoke of a difference where there is none.
void Engine::judge(std::uint64_t seq) {
  const auto found = suspicions_.find(seq);
  if (failed_ || found == suspicions_.end()) return;
  const Record mine = record_of(seq);
  if (mine.seq != seq) return;
  std::map<int, Announcement> asked{{options_.rank, {options_.rank, mine.signature, mine.text}}};
  {
    const std::lock_guard lock(mutex_);
    const auto heard = announced_.find(seq);
    if (heard != announced_.end()) {
      for (const Announcement& each : heard->second) asked[each.rank] = each;
    }
  }
  for (const Suspicion& each : found->second) {
    const auto of_rank = asked.find(each.rank);
    if (of_rank == asked.end() || of_rank->second.signature == each.signature) continue;
    return fail(server_name(each.teller) + " received a frame of " + who(each.rank) + " about " + numbered(seq) +
                " with the signature of another operation than " + of_rank->second.text +
                ", which that rank asks for: the memory or the program of one of them is damaged");
  }
  if (asked.size() < static_cast<std::size_t>(options_.size)) return;  // a difference would have failed the group
  const Suspicion& first = found->second.front();
  fail(server_name(first.teller) + " reports that " + who(first.rank) + " asks for something else in " + numbered(seq) +
       ", but all ranks ask for " + mine.text);
}

// ---- lost helpers ---------------------------------------------------------------------------------------

int Engine::route(std::uint64_t seq, std::uint64_t index, int server) {
  if (!topology_->is_helper(server) || !lost_helpers_[static_cast<std::size_t>(server - options_.size)]) return server;
  return topology_->stand_in(seq, index, lost_helpers_, options_.serve_beside_workers);
}

// Chunks that a lost helper has not answered go to their stand-ins: the same sums in the same order. They go at
// once, past what waits for the window: if they stood behind it, two ranks could each have a window full of chunks
// that the other holds back.
void Engine::helper_lost(int helper, const std::string& why, bool tell) {
  if (helper < 0 || helper >= topology_->num_helpers() || lost_helpers_[static_cast<std::size_t>(helper)]) return;
  lost_helpers_[static_cast<std::size_t>(helper)] = true;
  const int server = options_.size + helper;
  transport_->drop(server);
  const std::string& name = helpers_[static_cast<std::size_t>(helper)].name;
  if (tell) broadcast(FrameType::server_down, 0, static_cast<std::uint64_t>(helper), 0, why);
  {
    const std::lock_guard lock(mutex_);
    names_of_lost_.push_back(name);
  }
  note("helper " + name + " was lost (" + why + "); the others take over its chunks");
  std::map<std::uint64_t, OpPtr> affected = retained_;
  for (const OpPtr& op : pending_ops()) affected[op->seq] = op;
  for (const auto& [seq, op] : affected) {
    if (!failed_) move_to_stand_ins(server, op);
  }
  if (!failed_) pump();
}

void Engine::move_to_stand_ins(int server, const OpPtr& op) {
  for (std::uint64_t index = 0; index < op->parts.size(); ++index) {
    Op::Part& part = op->parts[index];
    if (part.step == Op::Step::idle || part.server != server) continue;
    part.server = route(op->seq, index, server);
    if (part.server < 0) {
      return fail("no server is left: helper " + helpers_[static_cast<std::size_t>(server - options_.size)].name +
                  " was the last one and workers do not serve");
    }
    if (part.step == Op::Step::waiting) {
      if (part.sent_ns == 0) continue;  // still in the outbox, and goes to the stand-in from there
      if (part.server == options_.rank) left_the_way(*op, index);
      send_contribution(op, index);
      if (failed_) return;
      continue;
    }
    const auto held = op->retained.find(index);
    if (held == op->retained.end()) continue;
    const FrameHeader header = header_of(*op, index, FrameType::supply);
    if (part.server != options_.rank) {
      send(part.server, header, held->second);
      continue;
    }
    const std::string wrong = server_->supply(options_.rank, header, held->second);
    if (!wrong.empty()) return fail(who(options_.rank) + " supplied a malformed result: " + wrong);
  }
}

}  // namespace shoal
