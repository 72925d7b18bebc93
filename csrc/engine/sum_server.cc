#include "engine/sum_server.h"

#include <stdexcept>

#include "engine/combine.h"
#include "engine/types.h"

namespace shoal {

namespace {

constexpr std::size_t kMaxHosts = 16384;

bool is_half(Element element) { return element == Element::float16 || element == Element::bfloat16; }

// Whether a header's words fit each other: an empty string, or what is wrong.
std::string check_words(const FrameHeader& header, std::size_t payload_bytes) {
  const auto result = static_cast<Element>(header.element), input = static_cast<Element>(header.input);
  if (header.needed == 0 || header.needed > kMaxHosts || header.host >= header.needed) {
    return "a contribution of host " + std::to_string(header.host) + " of " + std::to_string(header.needed);
  }
  if (input != result && !(input == Element::float32 && is_half(result))) {
    return "a contribution of " + std::string(name_of(input)) + " to a result of " + std::string(name_of(result));
  }
  if (payload_bytes % size_of(input) != 0) return "a contribution that is not a whole number of elements";
  try {
    require_possible({static_cast<Combine>(header.combine), result, input, header.divisor});
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

bool same_words(const FrameHeader& a, const FrameHeader& b) {
  return a.kind == b.kind && a.element == b.element && a.input == b.input && a.combine == b.combine && a.divisor == b.divisor;
}

}  // namespace

std::string SumServer::contribute(int peer, const FrameHeader& header, Payload payload) {
  if (const std::string wrong = check_words(header, payload.size); !wrong.empty()) return wrong;
  State& state = chunks_[{header.seq, header.chunk}];
  if (state.contributions.empty()) {
    state.contributions.resize(header.needed);
    state.signature = header.signature;
  }
  state.kept = state.kept || header.redo;
  if (state.signature != header.signature || state.contributions.size() != header.needed) {
    disagree_(header.seq);
    return "";
  }
  if (state.summed) {
    const State done = state;  // an answer that fails the group clears all chunks
    answer_to(peer, header, done);
    return "";
  }
  if (state.num_present == 0) state.first = header;
  if (!same_words(state.first, header)) return "contributions of different types to one chunk";
  Contribution& mine = state.contributions[header.host];
  if (mine.present) return "";
  for (const Contribution& other : state.contributions) {
    if (other.present && other.payload.size != payload.size) return "contributions of unequal size to one chunk";
  }
  held_bytes_ += payload.size;
  mine = {peer, std::move(payload), true};
  if (++state.num_present == state.contributions.size()) combine(header, state);
  return "";
}

void SumServer::combine(const FrameHeader& header, State& state) {
  const auto result = static_cast<Element>(header.element);
  const auto input = static_cast<Element>(header.input);
  const std::size_t size = state.contributions[0].payload.size;
  const std::size_t count = size / size_of(input);
  if (state.contributions.size() == 1) {
    state.result = state.contributions[0].payload;
  } else {
    const auto buffer = pool_.take(count * size_of(result));
    std::vector<const void*> inputs;
    for (const Contribution& each : state.contributions) inputs.push_back(each.payload.data);
    combine_in_order(buffer.get(), inputs, count, {static_cast<Combine>(header.combine), result, input, header.divisor});
    state.result = {buffer.get(), count * size_of(result), buffer, 0, false};
  }
  ++num_summed_;
  state.summed = true;
  held_bytes_ -= size * state.contributions.size();
  std::vector<Contribution> contributions;
  contributions.swap(state.contributions);
  state.contributions.resize(contributions.size());
  FrameHeader answer = header;
  seal(answer, state.result);  // the checksum once for all who receive it
  const State done = state;
  if (!state.kept) chunks_.erase({header.seq, header.chunk});
  for (std::size_t host = 0; host < contributions.size(); ++host) {
    if (!contributions[host].present) continue;
    answer.host = static_cast<std::uint16_t>(host);
    answer_to(contributions[host].peer, answer, done);
  }
}

void SumServer::answer_to(int peer, FrameHeader header, const State& state) {
  header.type = FrameType::result;
  answer_(peer, header, state.result);
}

void SumServer::supply(const FrameHeader& header, Payload payload) {
  State& state = chunks_[{header.seq, header.chunk}];
  if (state.contributions.empty()) {
    state.contributions.resize(header.needed);
    state.signature = header.signature;
  }
  state.kept = true;
  if (state.summed) return;
  state.summed = true;
  state.result = std::move(payload);
  std::vector<Contribution> contributions(state.contributions.size());
  contributions.swap(state.contributions);
  for (const Contribution& waiting : contributions) held_bytes_ -= waiting.payload.size;
  const State done = state;  // an answer that fails the group clears all chunks
  for (std::size_t host = 0; host < contributions.size(); ++host) {
    if (!contributions[host].present) continue;
    FrameHeader answer = header;
    answer.host = static_cast<std::uint16_t>(host);
    answer_to(contributions[host].peer, answer, done);
  }
}

void SumServer::clear() {
  chunks_.clear();
  held_bytes_ = 0;
}

void SumServer::forget_below(std::uint64_t seq) {
  std::erase_if(chunks_, [&](const auto& item) { return item.first.seq < seq && item.second.summed; });
}

}  // namespace shoal
