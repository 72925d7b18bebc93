#include "engine/mailbox.h"

namespace shoal {

void Mailbox::send(int peer, FrameHeader header, Payload payload) {
  header.submitted = ops_.num_submitted();
  header.completed = ops_.num_completed();
  sender_.send(peer, header, std::move(payload));
}

void Mailbox::broadcast(const Notice& notice) {
  FrameHeader header;
  header.type = notice.type;
  header.seq = notice.seq;
  header.chunk = notice.chunk;
  header.signature = notice.signature;
  const Payload payload = notice.text.empty() ? Payload{} : payload_of(notice.text.substr(0, kMaxText));
  const bool to_helpers = notice.type == FrameType::heartbeat || notice.type == FrameType::goodbye;
  const int count = to_helpers ? members_.num_servers() : members_.size();
  for (int peer = 0; peer < count; ++peer) {
    if (peer != members_.rank) send(peer, header, payload);
  }
}

}  // namespace shoal
