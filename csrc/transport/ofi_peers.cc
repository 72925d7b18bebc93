// Exchange of rail addresses over TCP, and cleanup after peers that have left.
#include <algorithm>
#include <stdexcept>

#include "transport/ofi.h"

namespace shoal {

namespace {

// Encoding of the addresses: integers of four bytes, strings and addresses with their length in front.
void put(std::string& out, std::size_t number) {
  for (int k = 0; k < 4; ++k) out += static_cast<char>(number >> (8 * k));
}

template <class Text>
void put(std::string& out, const Text& text) {
  put(out, text.size());
  out.append(text.begin(), text.end());
}

class Reader {
 public:
  explicit Reader(std::string text) : text_(std::move(text)) {}

  std::size_t number() {
    std::size_t value = 0;
    for (int k = 0; k < 4; ++k) value |= static_cast<std::size_t>(static_cast<std::uint8_t>(next())) << (8 * k);
    return value;
  }

  std::string text() {
    const std::size_t size = number();
    if (size > text_.size() - at_) throw std::runtime_error("its rail addresses are truncated");
    at_ += size;
    return text_.substr(at_ - size, size);
  }

 private:
  char next() {
    if (at_ >= text_.size()) throw std::runtime_error("its rail addresses are truncated");
    return text_[at_++];
  }

  std::string text_;
  std::size_t at_ = 0;
};

}  // namespace

void OfiTransport::on_connected(int peer) {
  announce(peer);
  sink_.on_connected(peer);
}

void OfiTransport::announce(int peer) {
  Link& link = links_[peer];
  if (link.down || std::exchange(link.announced, true)) return;
  const Bytes random = random_bytes(link.ours.size());
  std::copy(random.begin(), random.end(), link.ours.begin());
  peer_of_[link.ours] = peer;
  std::string text;
  put(text, random);
  put(text, message_bytes_);
  put(text, rails_.size());
  for (const auto& rail : rails_) {
    put(text, rail->provider());
    put(text, rail->address());
  }
  FrameHeader header;
  header.type = FrameType::fabric;
  tcp_.send(peer, header, payload_of(text));
}

// Returns an empty string, or why its rails do not match ours.
std::string OfiTransport::learn(Link& link, const Payload& payload) {
  try {
    Reader reader(text_of(payload));
    const std::string token = reader.text();
    if (token.size() != link.theirs.size()) return "its token has " + std::to_string(token.size()) + " bytes";
    std::copy(token.begin(), token.end(), link.theirs.begin());
    link.most_bytes = std::min(message_bytes_, reader.number());
    std::vector<fi_addr_t> at;
    std::string providers;
    const std::size_t count = reader.number();
    for (std::size_t k = 0; k < count; ++k) {
      const std::string provider = reader.text(), address = reader.text();
      providers += (k ? "," : "") + provider;
      if (k < rails_.size() && provider == rails_[k]->provider()) {
        at.push_back(rails_[k]->insert(Bytes(address.begin(), address.end())));
      }
    }
    if (providers != options_.fabric) {
      return "its libfabric providers are " + providers + ", ours " + options_.fabric + "; give all the same";
    }
    link.at = std::move(at);
    return "";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

void OfiTransport::on_frame(int peer, const FrameHeader& header, Payload payload) {
  if (header.type != FrameType::fabric) return sink_.on_frame(peer, header, std::move(payload));
  Link& link = links_[peer];
  if (link.down || !link.at.empty()) return;
  if (const std::string wrong = learn(link, payload); !wrong.empty()) return tcp_.declare_down(peer, wrong);
  sink_.on_connected(peer);
}

// Processes the peer's messages first: all of them have arrived, or it would not have left.
void OfiTransport::on_down(int peer, const std::string& why) {
  read(true);
  forget(peer);
  sink_.on_down(peer, why);
}

void OfiTransport::drop(int peer) {
  forget(peer);
  tcp_.drop(peer);
}

// Its address stays in the rails' tables: removing one while messages to it are in flight is undefined.
void OfiTransport::forget(int peer) {
  Link& link = links_[peer];
  link.down = true;
  if (link.refused) rails_[link.next]->give_back(std::exchange(link.refused, nullptr));
  std::deque<Outgoing> queue;
  queue.swap(link.queue);  // releasing payloads may call back
}

void OfiTransport::lose(int peer, const std::string& why) {
  tcp_.suspect(peer, why);
  forget(peer);
}

// A helper runs for weeks: nothing of departed peers remains once their last message has completed.
void OfiTransport::on_tick() {
  std::erase_if(peer_of_, [this](const auto& entry) {
    const auto link = links_.find(entry.second);
    return link == links_.end() || link->second.down;
  });
  std::erase_if(links_, [](const auto& entry) { return entry.second.down && entry.second.in_flight.empty(); });
  sink_.on_tick();
}

}  // namespace shoal
