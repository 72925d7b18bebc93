// Messages between two processes: a header of fixed size and a payload, each with a tag, and what makes and checks tags.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/crypto.h"

namespace shoal {

enum class FrameType : std::uint8_t {
  push,         // contribution to a chunk, sent to its server
  result,       // result of a chunk; empty: confirms that the contribution was used
  supply,       // result from a worker that already has it, sent to a lost server's stand-in
  heartbeat,    // progress of this rank
  order,        // from rank 0: chunks of `seq` before `chunk` are next; signature = number of the run
  server_down,  // a helper was lost; chunk = its index
  announce,     // payload: this rank's operation `seq`
  mismatch,     // contributions to `seq` conflict: announce yours; chunk = rank of one of them
  fail,         // payload: reason for which the group has failed
  goodbye,      // this rank needs nothing more of the group
  fabric,       // payload: libfabric addresses of this process; between transports only
  join,         // payload: identity of a process in the group
  leave,        // payload: reason for which the process is not, or no longer, in the group
  offer,        // message number `chunk` of a pair; payload: the message, or its size (redo = 1): accept it
  accept,       // there is memory for the pair's message `chunk`
  part,         // part number `server` of message `chunk`; needed = 1 + the slot of shared memory that holds it, or 0
  room,         // `chunk` bytes of small messages were taken, or the slot needed - 1 is free
  copy,         // from a helper that keeps weights: the sum of a chunk, for the rank that has a copy of them
  copied,       // its answer: the copy has taken the sum
  path_lost,    // interface number `chunk` of either side does not answer: no more on its connections; between transports only
  rank_lost,    // a rank that is no neighbour of the receiver was lost, or has left; payload: why
};

// Codes of an operation: what it does (engine/types.h), the type of its elements, and how they are combined.
enum class Kind : std::uint8_t {
  all_reduce, reduce, broadcast, all_gather, reduce_scatter, barrier, delegated, all_to_all, gather, scatter, send, recv,
  configure, load, dump, update, collect, measure, factor, normalise, apply
};
enum class Element : std::uint8_t { float32, float64, float16, bfloat16, int8, uint8, int32, int64 };
enum class Combine : std::uint8_t { sum, avg, prod, min, max, band, bor, bxor };
inline constexpr std::size_t kNumKinds = static_cast<std::size_t>(Kind::apply) + 1;
inline constexpr std::size_t kNumElements = static_cast<std::size_t>(Element::int64) + 1;
inline constexpr std::size_t kNumCombines = static_cast<std::size_t>(Combine::bxor) + 1;

// What shows that bytes are those that were sent: AES-GCM's (Seal), or a CRC-32C and zeros.
using Tag = std::array<std::uint8_t, 16>;

// Little-endian on the wire, as on all supported machines. Fields that nothing sets yet are zero.
struct FrameHeader {
  std::uint32_t magic = 0;
  FrameType type = FrameType::heartbeat;
  Kind kind{};
  Element element{};  // of the result
  Element input{};    // of the contribution
  Combine combine{};
  std::uint8_t redo = 0;  // 1: resent after its server was lost; 2: the copy of its weights takes the sum first
  std::uint16_t host = 0;  // index of the contributing host
  std::uint16_t needed = 0;  // contributions of a complete chunk
  std::uint16_t divisor = 1;
  std::int32_t root = -1;
  std::uint32_t group = 0;       // of the groups that share a connection
  std::uint32_t generation = 0;  // of the group's members
  std::uint32_t server = 0;  // of a notice: kToBePassedOn, or kPassedOn + the rank that it comes from
  std::uint64_t seq = 0;  // number of the operation
  std::uint64_t chunk = 0;
  std::uint64_t signature = 0;
  std::uint64_t submitted = 0;  // operations that the sender has begun
  std::uint64_t completed = 0;  // operations completed by the sender (from a helper: by every rank)
  std::uint64_t counter = 0;    // of the sender's frames to this process, from 1, if they may be sent again
  std::uint32_t step = 0;       // of the tensor's updates, for servers that keep weights
  std::uint32_t table = 0;      // number of the tensor there
  std::uint32_t rule = 0;       // number of the update's options there
  std::uint32_t payload_bytes = 0;
  Tag payload_tag{};
  Tag tag{};  // of all bytes before this field
};
static_assert(sizeof(FrameHeader) == 128);

inline constexpr FrameType kLastFrameType = FrameType::rank_lost;
inline constexpr std::uint32_t kFrameMagic = 0x334c4853;  // "SHL3"
inline constexpr std::size_t kTaggedBytes = offsetof(FrameHeader, tag);
inline constexpr std::size_t kMaxPayload = std::size_t{16} << 20;
inline constexpr std::size_t kMaxText = 4096;  // of a notice, such as why a rank leaves

// Bytes with an owner: the user's tensor, a pooled buffer, or a result that is sent to many peers. They are written through
// writable() alone, so that a checksum, once computed or told by the sender, is that of the bytes.
class Payload {
 public:
  Payload() = default;
  // Bytes that others read, and perhaps write before: without an owner they stay as long as the operation.
  Payload(const std::byte* data, std::size_t size, std::shared_ptr<const void> owner = nullptr)
      : data_(data), size_(size), owner_(std::move(owner)) {}
  // Bytes that writable() gives; with a checksum that the sender has told.
  static Payload of_buffer(std::shared_ptr<std::byte> buffer, std::size_t size) { return {std::move(buffer), size, {}}; }
  static Payload received(std::shared_ptr<std::byte> buffer, std::size_t size, std::uint32_t checksum) {
    return {std::move(buffer), size, checksum};
  }

  const std::byte* data() const { return data_; }
  std::size_t size() const { return size_; }
  const std::shared_ptr<const void>& owner() const { return owner_; }
  // Returns the same bytes with another owner, which keeps them.
  Payload owned_by(std::shared_ptr<const void> owner) const;
  // Copies the bytes into a buffer of that size.
  Payload copied_to(std::shared_ptr<std::byte> buffer) const;

  // Returns the bytes of a buffer to be written, and forgets their checksum. Throws std::logic_error where somebody else
  // has them too, or they are no buffer.
  std::byte* writable();
  // Returns the CRC-32C of the bytes, computed when it is first asked for. Builds with a sanitizer check one they know.
  std::uint32_t checksum();
  // Of copies that are made from now on, the first one that is asked for its checksum computes it for all.
  void will_be_copied() { among_copies_ = std::make_shared<std::atomic<std::uint64_t>>(0); }

 private:
  Payload(std::shared_ptr<std::byte> buffer, std::size_t size, std::optional<std::uint32_t> checksum)
      : data_(buffer.get()), buffer_(buffer.get()), size_(size), owner_(std::move(buffer)), checksum_(checksum) {}

  const std::byte* data_ = nullptr;
  std::byte* buffer_ = nullptr;  // the same bytes, if they may be written
  std::size_t size_ = 0;
  std::shared_ptr<const void> owner_;
  std::optional<std::uint32_t> checksum_;
  std::shared_ptr<std::atomic<std::uint64_t>> among_copies_;  // the checksum and a bit above it, once it is known
};

// Returns whether the payload holds elements; other frames are small and hold text.
inline bool carries_data(FrameType type) {
  return type == FrameType::push || type == FrameType::result || type == FrameType::supply || type == FrameType::offer ||
         type == FrameType::part || type == FrameType::copy;
}

inline constexpr std::uint32_t kToBePassedOn = 1, kPassedOn = 2;

// Returns whether all members are told the same: such a frame makes no connection.
inline bool is_notice(FrameType type) {
  return type == FrameType::heartbeat || type == FrameType::server_down || type == FrameType::announce ||
         type == FrameType::mismatch || type == FrameType::fail || type == FrameType::goodbye || type == FrameType::rank_lost;
}

// Completes a header with checksums for tags.
void set_checksums(FrameHeader& header, Payload& payload);
std::uint32_t checksum_in(const Tag& tag);

// Returns an empty string, or what is wrong with the header, its checksum included.
std::string check_header(const FrameHeader& header);

Payload payload_of(const std::string& text);
std::string text_of(const Payload& payload);

// Pool of buffers, so that a chunk does not fault in fresh pages each time. Any thread.
class BufferPool {
 public:
  // Returns uninitialised memory, which goes back to the pool when the last owner releases it.
  std::shared_ptr<std::byte> take(std::size_t size);
  Payload payload(std::size_t size) { return Payload::of_buffer(take(size), size); }
  // Frees what nobody uses.
  void clear();

  BufferPool();

 private:
  struct Shelves;
  std::shared_ptr<Shelves> shelves_;
};

enum class Protection : std::uint8_t { checksum, tag, encrypt };
inline constexpr std::size_t kNumProtections = 3;

// Throws std::invalid_argument for an unknown name.
Protection protection_named(const std::string& name);

// What protects the frames of a connection in one direction: checksums against damage, or tags under a key of the session,
// which nobody else can make, with or without encryption of the payloads.
//
// The nonce of a tag is the frame's number in the stream: a frame that is repeated, left out, moved or taken from another
// connection does not match. A header has a tag of its own, so that nothing is believed before it is checked.
//
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
