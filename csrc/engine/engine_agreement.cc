// Ranks that do not ask for the same thing, and servers that are lost on the way.
#include <algorithm>

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
  Record mine;
  {
    const std::lock_guard lock(mutex_);
    if (header.seq >= next_seq_) {
      announced_[header.seq].push_back(theirs);
      return;
    }
    mine = records_[header.seq % kRecords];
  }
  compare(header.seq, mine, theirs);
}

void Engine::compare(std::uint64_t seq, const Record& mine, const Announcement& theirs) {
  if (mine.seq != seq || mine.signature == theirs.signature) return;
  const bool first = options_.rank < theirs.rank;  // so that all ranks tell the same story
  const std::string a = who(options_.rank) + " asks for " + mine.text;
  const std::string b = who(theirs.rank) + " asks for " + theirs.text;
  fail("the ranks do not agree about " + numbered(seq) + ": " + (first ? a : b) + ", " + (first ? b : a));
}

// Whether a frame belongs to another operation than this rank's of that number, which may have ended.
bool Engine::differs(const FrameHeader& header) {
  const std::lock_guard lock(mutex_);
  const Record& mine = records_[header.seq % kRecords];
  return mine.seq == header.seq && mine.signature != header.signature;
}

// Two contributions to one chunk do not match: everybody says what it asks for.
void Engine::disagree(std::uint64_t seq) {
  Record mine;
  {
    const std::lock_guard lock(mutex_);
    if (seq >= next_seq_) {
      told_.insert(seq);
    } else {
      mine = records_[seq % kRecords];
    }
  }
  if (mine.seq != seq) return;
  parted_ = true;
  const bool fresh = last_told_ != seq;
  last_told_ = seq;
  if (!fresh) return;
  broadcast(FrameType::tell, seq, 0, 0, "");
  std::size_t count = 0;
  for (const OpPtr& op : pending_ops()) {  // the ranks may have parted earlier than here
    if (op->seq < seq && ++count <= kNamedRanks) announce(*op);
  }
  broadcast(FrameType::announce, seq, 0, mine.signature, mine.text);
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
    if (part.server == options_.rank) server_->supply(header, held->second);
    else send(part.server, header, held->second);
  }
}

}  // namespace shoal
