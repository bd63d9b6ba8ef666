#include "net/stream.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

namespace mooncache::net {

namespace {

// More pieces than this go into the next call: the kernel copies the list for each one.
constexpr size_t kMaxPieces = 128;

// Reads each page, and writes what it read where bytes are to come: a hole can be read that cannot be filled.
void touch(std::span<const iovec> pieces, bool write) {
  constexpr size_t kPageBytes = 4096;
  const auto one = [write](volatile char& byte) {
    const char value = byte;
    if (write) byte = value;
  };
  for (const iovec& piece : pieces) {
    auto* bytes = static_cast<volatile char*>(piece.iov_base);
    for (size_t at = 0; at < piece.iov_len; at += kPageBytes) one(bytes[at]);
    if (piece.iov_len > 0) one(bytes[piece.iov_len - 1]);
  }
}

class PlainStream final : public Stream {
 public:
  explicit PlainStream(UniqueFd fd) : Stream(std::move(fd)) {}

  IoResult read_some(std::span<const Slice> destination) override {
    iovec pieces[kMaxPieces];
    const size_t count = std::min(destination.size(), kMaxPieces);
    for (size_t i = 0; i < count; ++i) pieces[i] = {destination[i].data, destination[i].size};
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = count;
    ssize_t received = recvmsg(fd(), &message, MSG_DONTWAIT);
    if (received < 0 && errno == EFAULT && touches()) {
      touch({pieces, count}, true);
      received = recvmsg(fd(), &message, MSG_DONTWAIT);
    }
    if (received > 0) return {IoState::kMoved, static_cast<size_t>(received)};
    if (received == 0) return {IoState::kEnd, 0};
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return {IoState::kWantRead, 0};
    return fail(Code::kConnectionLost, "recv: " + errno_text(errno));
  }

  IoResult write_some(std::span<const ConstSlice> source) override {
    iovec pieces[kMaxPieces];
    const size_t count = std::min(source.size(), kMaxPieces);
    for (size_t i = 0; i < count; ++i) pieces[i] = {const_cast<std::byte*>(source[i].data), source[i].size};
    msghdr message{};
    message.msg_iov = pieces;
    message.msg_iovlen = count;
    ssize_t sent = sendmsg(fd(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EFAULT && touches()) {
      touch({pieces, count}, false);
      sent = sendmsg(fd(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    }
    if (sent >= 0) return {IoState::kMoved, static_cast<size_t>(sent)};
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return {IoState::kWantWrite, 0};
    return fail(Code::kConnectionLost, "send: " + errno_text(errno));
  }

  IoResult handshake() override { return {IoState::kMoved, 0}; }
};

}  // namespace

std::unique_ptr<Stream> make_plain_stream(UniqueFd fd) {
  return std::make_unique<PlainStream>(std::move(fd));
}

}  // namespace mooncache::net
