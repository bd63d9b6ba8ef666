// Assembles frames from bytes that arrive in pieces of any size. It knows no socket and no clock.
//
// A frame that lies whole in the bytes at hand is looked at in place. A frame that arrives in pieces is kept
// in a buffer, which grows with what has really arrived, not with what the header announces.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/free_memory.h"
#include "mooncache/bytes.h"
#include "wire/frame.h"

namespace mooncache::server {

class FrameReader {
 public:
  using Bytes = std::span<const std::byte>;
  using Header = std::span<const std::byte, wire::kHeaderBytes>;
  enum class Step : uint8_t {
    kMore,     // every byte was taken; the frame is not complete
    kFrame,    // header() and meta() are valid until release(), and in place until the bytes are gone
    kRefused,  // `meta_bytes_of` refused the header; nothing more may be read
  };

  // Takes bytes from the front of `bytes`. `meta_bytes_of(header)` is called once per frame: it says how many
  // bytes follow the header, or nothing to refuse the frame.
  template <typename MetaBytesOf>
  Step take(Bytes& bytes, const MetaBytesOf& meta_bytes_of) {
    if (have_ == 0 && bytes.size() >= wire::kHeaderBytes) {
      const std::optional<size_t> meta_bytes = meta_bytes_of(bytes.first<wire::kHeaderBytes>());
      if (!meta_bytes) return Step::kRefused;
      need_ = wire::kHeaderBytes + *meta_bytes;
      if (bytes.size() >= need_) {
        frame_ = bytes.first(need_);
        bytes = bytes.subspan(need_);
        need_ = wire::kHeaderBytes;
        return Step::kFrame;
      }
    }
    while (!bytes.empty()) {
      const Slice room = this->room();
      const size_t count = std::min(bytes.size(), room.size);
      std::memcpy(room.data, bytes.data(), count);
      bytes = bytes.subspan(count);
      if (const Step step = filled(count, meta_bytes_of); step != Step::kMore) return step;
    }
    return Step::kMore;
  }

  // Where the next bytes of a frame in pieces may be read to, without a copy. Never empty.
  Slice room() {
    if (have_ == buffer_.size()) buffer_.resize(std::min(need_, std::max(have_ * 2, kStepBytes)));
    return {buffer_.data() + have_, buffer_.size() - have_};
  }
  // After room(): bytes behind it belong to the next frame.
  bool room_is_all() const { return buffer_.size() == need_; }

  // `count` bytes were written to room().
  template <typename MetaBytesOf>
  Step filled(size_t count, const MetaBytesOf& meta_bytes_of) {
    have_ += count;
    if (have_ < need_) return Step::kMore;
    if (need_ == wire::kHeaderBytes) {
      const std::optional<size_t> meta_bytes = meta_bytes_of(Bytes(buffer_).first<wire::kHeaderBytes>());
      if (!meta_bytes) return Step::kRefused;
      need_ += *meta_bytes;
      if (have_ < need_) return Step::kMore;
    }
    complete_ = std::exchange(buffer_, {});
    frame_ = complete_;
    have_ = 0;
    need_ = wire::kHeaderBytes;
    return Step::kFrame;
  }

  // Of the frame that take() or filled() completed.
  Header header() const { return frame_.first<wire::kHeaderBytes>(); }
  Bytes meta() const { return frame_.subspan(wire::kHeaderBytes); }
  // The frame was handled.
  void release() { free_memory(complete_); }

  // Part of a frame is here.
  bool partial() const { return have_ > 0; }
  uint64_t held_bytes() const { return mooncache::held_bytes(buffer_) + mooncache::held_bytes(complete_); }
  void clear() {
    free_memory(buffer_);
    release();
    have_ = 0;
    need_ = wire::kHeaderBytes;
  }

 private:
  static constexpr size_t kStepBytes = 64 << 10;

  std::vector<std::byte> buffer_, complete_;
  size_t have_ = 0;                   // bytes of the frame in buffer_
  size_t need_ = wire::kHeaderBytes;  // known so far
  Bytes frame_;
};

}  // namespace mooncache::server
