// Thin, checked wrappers over sockets: every call that can wait takes a Deadline, every descriptor has an
// owner.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "mooncache/bytes.h"
#include "mooncache/status.h"
#include "mooncache/types.h"
#include "net/interrupt_look.h"

namespace mooncache::net {

// Owns a file descriptor.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() { return std::exchange(fd_, -1); }
  void reset();

 private:
  int fd_ = -1;
};

inline constexpr uint32_t kPeerTimeoutMs = 15'000;

struct SocketOptions {
  int receive_buffer_bytes = 0;  // 0: leave it to the kernel's autotuning
  int send_buffer_bytes = 0;
  // A TCP peer that acknowledges nothing for this long, neither bytes nor keepalive probes, is gone. 0 = the
  // kernel's own patience, which is hours.
  uint32_t peer_timeout_ms = kPeerTimeoutMs;
};

// A listening, non-blocking socket. `port` 0 means any free port; see local_port().
Result<UniqueFd> listen_tcp(const std::string& host, uint16_t port, int backlog = 1024);
// Listens on `path` (mode 0600). An old socket file is replaced only when nothing answers on it.
Result<UniqueFd> listen_unix(const std::string& path, int backlog = 1024);
Result<uint16_t> local_port(int fd);

// A connected, non-blocking socket with TCP_NODELAY. NODE_UNAVAILABLE or DEADLINE_EXCEEDED otherwise.
Result<UniqueFd> connect_tcp(const std::string& host, uint16_t port, Deadline deadline,
                             SocketOptions options = {});
Result<UniqueFd> connect_unix(const std::string& path, Deadline deadline);

// accept4, non-blocking, close-on-exec, with `options`, TCP_NODELAY where it applies. Invalid when none is
// waiting; `error` tells apart "none" (0) from a failure such as EMFILE.
UniqueFd accept_connection(int listener, const SocketOptions& options, int* error);

void set_tcp_options(int fd, const SocketOptions& options);

struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
};
// Of the process at the other end of a unix socket.
Result<PeerCredentials> peer_credentials(int fd);

// Sends `bytes` with descriptors attached to the first byte (at most kMaxPassedFds). Returns bytes sent, 0
// when the socket would block.
inline constexpr size_t kMaxPassedFds = 250;
Result<size_t> send_with_fds(int fd, std::span<const std::byte> bytes, std::span<const int> fds);
// Receives up to `bytes.size()` and appends any passed descriptors (close-on-exec). Returns bytes received; 0
// means the socket would block; CONNECTION_LOST at the end of the stream.
Result<size_t> receive_with_fds(int fd, std::span<std::byte> bytes, std::vector<UniqueFd>& fds);

// Waits until `fd` is ready for `events` (POLLIN/POLLOUT) or one of `also_readable` is readable, or for
// `patience_ms` (negative: no such limit). CANCELLED: `cancel_fd` (or -1) became readable, or `look` (or
// null) saw an interruption. DEADLINE_EXCEEDED.
Status wait_ready(int fd, short events, int cancel_fd, Deadline deadline, InterruptLook* look = nullptr,
                  std::span<const int> also_readable = {}, int patience_ms = -1);
bool readable_now(int fd);

std::string errno_text(int error);

}  // namespace mooncache::net
