#include "engine/sum_server.h"

#include <cstring>
#include <stdexcept>
#include <utility>

#include "engine/reduce.h"
#include "engine/errors.h"
#include "engine/types.h"

namespace shoal {

namespace {

bool same_words(const FrameHeader& a, const FrameHeader& b) {
  return a.kind == b.kind && a.element == b.element && a.input == b.input && a.combine == b.combine && a.divisor == b.divisor &&
         a.table == b.table && a.step == b.step && a.rule == b.rule && a.root == b.root;
}

bool fits(const FrameHeader& first, std::size_t first_count, const FrameHeader& header, std::size_t count) {
  return first.signature == header.signature && same_words(first, header) && first_count == count;
}

// Returns the type of the sum: weights that answer may have another.
Element sum_of(const FrameHeader& header) {
  return is_served(header.kind) ? header.input : header.element;
}

std::string describe(const FrameHeader& header, std::size_t count) {
  return std::to_string(count) + " elements of " + std::string(name_of(header.input)) +
         " (" + std::string(name_of(header.kind)) + ", " + std::string(name_of(header.combine)) +
         (header.kind == Kind::reduce ? ", root " + std::to_string(header.root) : "") + ")";
}

}  // namespace

// Checks a frame's claims against the group and its length, since they decide who is answered and how elements are
// read. Returns an empty string, or what is wrong.
std::string SumServer::check(int host, const FrameHeader& header, Element element, std::size_t bytes) const {
  const bool sums = adds_up(header.kind);
  const int needed = sums ? num_hosts_ : 1;
  if (!sums) host = 0;
  if (header.needed != needed || header.host != host) {
    return "a contribution of host " + std::to_string(header.host) + " of " + std::to_string(header.needed) +
           " where host " + std::to_string(host) + " of " + std::to_string(needed) + " was expected";
  }
  const Element input = header.input, result = sum_of(header);
  if (input != result && !(input == Element::float32 && is_half(result))) {
    return "a contribution of " + std::string(name_of(input)) + " to a result of " + std::string(name_of(result));
  }
  const Kind kind = header.kind;
  const bool supplied = header.type == FrameType::supply;
  const bool possible = send_copy_ ? !supplied && header.redo != 1 : !(supplied && changes_weights(kind));
  if (is_served(kind) && (needed < 2 || !possible)) return "weights that the server keeps, supplied or sent again";
  if (header.redo > 1 && !(send_copy_ && changes_weights(kind))) return "a contribution that is to be copied";
  if (bytes % size_of(element) != 0) return "a contribution that is not a whole number of elements";
  try {
    require_possible({header.combine, result, input, header.divisor});
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

std::size_t SumServer::bytes_to_begin(const FrameHeader& header) const {
  if (chunks_.count({header.seq, header.chunk})) return 0;
  return sizeof(State) + static_cast<std::size_t>(num_hosts_) * sizeof(Contribution);
}

// Returns the state of the frame's chunk, which may have other words.
SumServer::State& SumServer::state_of(int peer, const FrameHeader& header, std::size_t count) {
  State& state = chunks_[{header.seq, header.chunk}];
  if (state.contributions.empty()) {
    state.contributions.resize(header.needed);
    state.first_peer = peer;
    state.first = header;
    state.count = count;
  }
  return state;
}

// Returns the state of the frame's chunk, or null if the frame conflicts with another peer's.
SumServer::State* SumServer::open(int peer, const FrameHeader& header, std::size_t count) {
  State& state = state_of(peer, header, count);
  if (fits(state.first, state.count, header, count)) return &state;
  on_conflict_({header.seq,
                header.chunk,
                {state.first_peer, state.first.signature, describe(state.first, state.count)},
                {peer, header.signature, describe(header, count)}});
  return nullptr;
}

// Nobody supplies what this server sums itself: either peer lies.
std::string SumServer::refuse_supply(const State& state, const FrameHeader& header) {
  on_conflict_({header.seq,
                header.chunk,
                {state.supplied_by, header.signature, "the result of a lost server"},
                {state.asked_by, header.signature, describe(header, state.count) + " to sum"}});
  return "";
}

std::string SumServer::contribute(Contributor from, const FrameHeader& header, Payload payload,
                                  std::shared_ptr<std::byte> place) {
  const Element input = header.input;
  if (const std::string wrong = check(from.host, header, input, payload.size()); !wrong.empty()) return wrong;
  State* found = open(from.peer, header, payload.size() / size_of(input));
  if (!found) return "";
  State& state = *found;
  state.kept = state.kept || header.redo == 1;
  if (header.redo != 1 && state.asked_by < 0) state.asked_by = from.peer;
  if (state.asked_by >= 0 && state.supplied_by >= 0) return refuse_supply(state, header);
  if (state.summed) {
    const Payload result = state.result;  // an answer that fails the group clears all chunks
    answer_to(from.peer, header, result);
    return "";
  }
  Contribution& mine = state.contributions[header.host];
  if (mine.present) return "";
  held_bytes_ += payload.size();
  mine = {from.peer, std::move(payload), std::move(place), true};
  const bool is_complete = ++state.num_present == state.contributions.size() && state.copy_from < 0;
  return is_complete ? complete(header, state) : "";
}

std::string SumServer::take_copy(int peer, const FrameHeader& header, Payload sum) {
  const Kind kind = header.kind;
  const std::size_t width = size_of(header.input);
  if (!changes_weights(kind) || header.needed != num_hosts_ || header.needed < 2 || sum.size() % width != 0) {
    return "a copy of a " + std::string(name_of(kind)) + " of " + std::to_string(sum.size()) + " bytes from " +
           std::to_string(header.needed) + " hosts";
  }
  State& state = state_of(peer, header, sum.size() / width);
  if (state.summed || state.num_present == state.contributions.size()) return "";  // the helper is lost, as others know
  if (state.copy_from >= 0 || !fits(state.first, state.count, header, sum.size() / width)) {
    return "a second copy of chunk " + std::to_string(header.chunk) + " of " + numbered(header.seq) + ", or of another operation";
  }
  state.kept = true;
  state.copy_from = peer;
  state.result = std::move(sum);
  return complete(header, state);
}

std::string SumServer::confirm_copy(int peer, const FrameHeader& header) {
  const auto found = chunks_.find({header.seq, header.chunk});
  if (found == chunks_.end() || found->second.copy_to != peer) {
    return "that it has taken a copy of chunk " + std::to_string(header.chunk) + " of " + numbered(header.seq);
  }
  found->second.copy_to = -1;
  answer_all(FrameHeader(found->second.first), found->second, peer);
  return "";
}

Payload SumServer::weights_of_copy(const FrameHeader& header) const {
  const auto found = chunks_.find({header.seq, header.chunk});
  const bool stepped = found != chunks_.end() && found->second.summed && found->second.kept;
  return stepped && same_words(found->second.first, header) ? found->second.result : Payload{};
}

// Options come before the updates by them, unless frames overtake each other.
std::string SumServer::complete(const FrameHeader& header, State& state) {
  if (is_served(header.kind) && weights_.is_early(header)) {
    early_.push_back({header.seq, header.chunk});
    return "";
  }
  const std::string wrong = combine(header, state);
  return wrong.empty() && header.kind == Kind::configure ? combine_early() : wrong;
}

std::string SumServer::combine_early() {
  for (const Key& key : std::exchange(early_, {})) {
    const auto found = chunks_.find(key);
    if (found == chunks_.end()) continue;
    if (weights_.is_early(found->second.first)) {  // of another model
      early_.push_back(key);
      continue;
    }
    const FrameHeader header = found->second.first;
    if (std::string wrong = combine(header, found->second); !wrong.empty()) return wrong;
  }
  return "";
}

Payload SumServer::sum_up(const FrameHeader& header, State& state) {
  if (state.contributions.size() == 1) return state.contributions[0].payload;
  const Element result = sum_of(header);
  const Element input = header.input;
  const std::size_t bytes = state.count * size_of(result);
  std::shared_ptr<std::byte> to;
  std::vector<const void*> inputs;
  for (Contribution& each : state.contributions) {
    inputs.push_back(each.payload.data());
    if (each.place && !state.kept) to = std::move(each.place);
  }
  if (!to) to = pool_.take(bytes);
  combine_in_order(to.get(), inputs, state.count, {header.combine, result, input, header.divisor});
  return Payload::of_buffer(std::move(to), bytes);
}

std::string SumServer::combine(const FrameHeader& header, State& state) {
  const Kind kind = header.kind;
  if (state.copy_from < 0) state.result = sum_up(header, state);
  Payload copy;
  const bool sends_copy = send_copy_ && header.redo == 2;  // before the sum is replaced
  if (sends_copy) copy = state.result.copied_to(pool_.take(state.result.size()));
  if (is_served(kind) && !(kind == Kind::configure && header.redo)) {  // a lost helper's options: this server has its own
    if (std::string wrong = weights_.take(header, state.result); !wrong.empty()) return wrong;
  }
  ++num_summed_;
  state.summed = true;
  for (Contribution& each : state.contributions) {
    held_bytes_ -= each.payload.size();
    each.payload = {};
    each.place = nullptr;
  }
  if (!sends_copy) {
    answer_all(header, state);
    return "";
  }
  state.copy_to = send_copy_(header, copy);
  if (state.copy_to < 0) throw GroupFailure("the rank that has a copy of a server's weights is gone");
  return "";
}

// Sends the result to those who have contributed, and the confirmation of a copy. `stepped`, the peer that has taken the
// same step, has the weights.
void SumServer::answer_all(const FrameHeader& header, State& state, int stepped) {
  std::vector<Contribution> contributions(state.contributions.size());
  contributions.swap(state.contributions);
  FrameHeader answer = header;
  if (const int helper = std::exchange(state.copy_from, -1); helper >= 0) {
    answer.type = FrameType::copied;
    answer_(helper, answer, {});
  }
  state.result.will_be_copied();
  const Payload result = state.result;  // an answer that fails the group clears all chunks
  if (!state.kept) chunks_.erase({header.seq, header.chunk});
  for (std::size_t host = 0; host < contributions.size(); ++host) {
    if (!contributions[host].present) continue;
    answer.host = static_cast<std::uint16_t>(host);
    const int peer = contributions[host].peer;
    answer_to(peer, answer, peer == stepped && returns_weights(header.kind) ? Payload{} : result);
  }
}

void SumServer::answer_to(int peer, FrameHeader header, const Payload& result) {
  header.type = FrameType::result;
  answer_(peer, header, result);
}

std::string SumServer::supply(Contributor from, const FrameHeader& header, Payload payload) {
  const Element element = header.element;
  if (const std::string wrong = check(from.host, header, element, payload.size()); !wrong.empty()) return wrong;
  State* found = open(from.peer, header, payload.size() / size_of(element));
  if (!found) return "";
  State& state = *found;
  state.kept = true;
  const int before = std::exchange(state.supplied_by, from.peer);
  if (state.asked_by >= 0) return refuse_supply(state, header);
  if (state.summed && before >= 0 && payload.size() && std::memcmp(state.result.data(), payload.data(), payload.size()) != 0) {
    on_conflict_({header.seq, header.chunk, {before, header.signature, "a result"}, {from.peer, header.signature, "another one"}});
  }
  if (state.summed) return "";
  state.summed = true;
  state.result = std::move(payload);
  for (const Contribution& waiting : state.contributions) held_bytes_ -= waiting.payload.size();
  answer_all(header, state);
  return "";
}

void SumServer::clear() {
  chunks_.clear();
  early_.clear();
  weights_.clear();
  held_bytes_ = 0;
}

void SumServer::forget_below(std::uint64_t seq) {
  std::erase_if(chunks_, [&](const auto& item) { return item.first.seq < seq && item.second.summed; });
}

}  // namespace shoal
