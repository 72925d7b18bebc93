// What protects the frames of a connection in one direction: checksums against damage, or tags under a key of the session,
// which nobody else can make, with or without encryption of the payloads.
//
// The nonce of a tag is the frame's number in the stream: a frame that is repeated, left out, moved or taken from another
// connection does not match. A header has a tag of its own, so that nothing is believed before it is checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/crypto.h"
#include "transport/frame.h"

namespace shoal {

enum class Protection : std::uint8_t { checksum, tag, encrypt };
inline constexpr std::size_t kNumProtections = 3;

// Throws std::invalid_argument for an unknown name.
Protection protection_named(const std::string& name);

// One thread at a time.
class Seal {
 public:
  Seal() = default;  // checksums
  Seal(Protection protection, const Gcm::Key& key);

  bool encrypts() const { return encrypts_; }

  // Completes the header of the next frame. Returns its payload as it goes over the wire: another one if it is encrypted.
  Payload close(FrameHeader& header, Payload payload, BufferPool& pool);

  // Returns an empty string, or what is wrong with the header of the next frame.
  std::string check(const FrameHeader& header);
  // Opens the payload of that frame in its buffer. Throws std::runtime_error if it is not what was sent.
  Payload open(const FrameHeader& header, std::shared_ptr<std::byte> buffer);

 private:
  enum class Part : std::uint8_t { payload, header };
  Gcm::Nonce nonce(Part part) const;

  std::optional<Gcm> gcm_;  // none: checksums
  bool encrypts_ = false;
  std::uint64_t number_ = 0;  // of the next frame
};

}  // namespace shoal
