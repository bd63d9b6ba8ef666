#include "net/socket.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>

#include "net/resolver.h"

namespace mooncache::net {

namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Result<AddressList> local_addresses(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | AI_PASSIVE;
  addrinfo* list = nullptr;
  const int error =
      getaddrinfo(host.empty() ? nullptr : host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (error != 0) {
    return {Code::kNodeUnavailable, "cannot resolve host '" + host + "': " + gai_strerror(error)};
  }
  return AddressList(list, &freeaddrinfo);
}

Result<sockaddr_un> unix_address(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.sun_path) {
    return {Code::kInvalidArgument, "unix socket path '" + path + "' must have 1 to " +
                                        std::to_string(sizeof address.sun_path - 1) + " characters"};
  }
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

Status finish_connect(int fd, const std::string& what, Deadline deadline) {
  if (const Status ready = wait_ready(fd, POLLOUT, -1, deadline); !ready) {
    return {ready.code, "connecting to " + what + ": " + ready.message};
  }
  int error = 0;
  socklen_t size = sizeof error;
  if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error != 0) return {Code::kNodeUnavailable, "connecting to " + what + ": " + errno_text(error)};
  return Status::ok();
}

Status connect_address(int fd, const sockaddr* address, socklen_t size, const std::string& what,
                       Deadline deadline) {
  if (connect(fd, address, size) == 0) return Status::ok();
  if (errno == EINPROGRESS || errno == EINTR) return finish_connect(fd, what, deadline);
  // A unix socket whose accept queue is full answers EAGAIN instead of queueing.
  return {Code::kNodeUnavailable, "connecting to " + what + ": " + errno_text(errno)};
}

bool has_listener(const sockaddr_un& address) {
  UniqueFd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const auto* generic = static_cast<const sockaddr*>(static_cast<const void*>(&address));
  return probe.valid() && (connect(probe.get(), generic, sizeof address) == 0 || errno == EAGAIN);
}

}  // namespace

void UniqueFd::reset() {
  if (fd_ >= 0) ::close(std::exchange(fd_, -1));
}

std::string errno_text(int error) {
  char buffer[128];
  // the GNU variant returns the text, which need not be in the buffer
  return strerror_r(error, buffer, sizeof buffer);
}

void set_tcp_options(int fd, const SocketOptions& options) {
  // Best effort: a unix socket refuses TCP_NODELAY, and a buffer size over the system's limit is cut by the
  // kernel.
  const int one = 1;
  (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  if (options.receive_buffer_bytes > 0) {
    (void)setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &options.receive_buffer_bytes,
                     sizeof options.receive_buffer_bytes);
  }
  if (options.send_buffer_bytes > 0) {
    (void)setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &options.send_buffer_bytes, sizeof options.send_buffer_bytes);
  }
  if (options.peer_timeout_ms == 0) return;
  // The first probe after a third of the time, then one each third. The user time-out ends the connection
  // when bytes are under way: probes are sent on idle connections only.
  const int third_s = std::max(1, static_cast<int>(options.peer_timeout_ms / 3000));
  const int probes = 3;
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &third_s, sizeof third_s);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &third_s, sizeof third_s);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
  (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &options.peer_timeout_ms,
                   sizeof options.peer_timeout_ms);
  (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof one);
}

Result<UniqueFd> listen_tcp(const std::string& host, uint16_t port, int backlog) {
  auto addresses = local_addresses(host, port);
  if (!addresses) return addresses.status();
  std::string why = "no address";
  for (const addrinfo* at = addresses->get(); at != nullptr; at = at->ai_next) {
    UniqueFd fd(socket(at->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    const int one = 1;
    if (fd.valid() && setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) == 0 &&
        bind(fd.get(), at->ai_addr, at->ai_addrlen) == 0 && listen(fd.get(), backlog) == 0) {
      return fd;
    }
    why = errno_text(errno);
  }
  return {Code::kInvalidArgument, "cannot listen on " + host + ":" + std::to_string(port) + ": " + why};
}

Result<UniqueFd> listen_unix(const std::string& path, int backlog) {
  const auto address = unix_address(path);
  if (!address) return address.status();
  if (has_listener(*address)) {
    return {Code::kInvalidArgument, "another process is listening on " + path};
  }
  (void)unlink(path.c_str());
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const auto* generic = static_cast<const sockaddr*>(static_cast<const void*>(&*address));
  // fchmod before bind decides the mode of the file without a moment in which others could connect
  if (!fd.valid() || fchmod(fd.get(), 0600) != 0 || bind(fd.get(), generic, sizeof *address) != 0 ||
      chmod(path.c_str(), 0600) != 0 || listen(fd.get(), backlog) != 0) {
    return {Code::kInvalidArgument, "cannot listen on " + path + ": " + errno_text(errno)};
  }
  return fd;
}

Result<uint16_t> local_port(int fd) {
  sockaddr_storage address{};
  socklen_t size = sizeof address;
  auto* generic = static_cast<sockaddr*>(static_cast<void*>(&address));
  if (getsockname(fd, generic, &size) != 0) return {Code::kInternal, "getsockname: " + errno_text(errno)};
  in_port_t port = 0;
  if (address.ss_family == AF_INET) {
    port = static_cast<const sockaddr_in*>(static_cast<const void*>(&address))->sin_port;
  } else if (address.ss_family == AF_INET6) {
    port = static_cast<const sockaddr_in6*>(static_cast<const void*>(&address))->sin6_port;
  } else {
    return {Code::kInvalidArgument, "not an internet socket"};
  }
  return static_cast<uint16_t>(ntohs(port));
}

Result<UniqueFd> connect_tcp(const std::string& host, uint16_t port, Deadline deadline,
                             SocketOptions options) {
  const std::string what = host + ":" + std::to_string(port);
  const std::shared_ptr<Lookup> lookup = look_up(host, port);
  if (!lookup->done()) {
    const Status resolved = wait_ready(lookup->fd(), POLLIN, -1, deadline);
    if (!resolved) return {resolved.code, "resolving " + what + ": " + resolved.message};
  }
  if (!lookup->addresses()) return lookup->addresses().status();
  Status last{Code::kNodeUnavailable, "connecting to " + what + ": no address"};
  for (const SocketAddress& address : *lookup->addresses()) {
    UniqueFd fd(socket(address.family(), SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!fd.valid()) {
      last = {Code::kNodeUnavailable, "socket: " + errno_text(errno)};
      continue;
    }
    set_tcp_options(fd.get(), options);
    last = connect_address(fd.get(), address.get(), address.size, what, deadline);
    if (last) return fd;
    if (last.code == Code::kDeadlineExceeded) return last;
  }
  return last;
}

Result<UniqueFd> connect_unix(const std::string& path, Deadline deadline) {
  const auto address = unix_address(path);
  if (!address) return address.status();
  UniqueFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return {Code::kNodeUnavailable, "socket: " + errno_text(errno)};
  const auto* generic = static_cast<const sockaddr*>(static_cast<const void*>(&*address));
  if (Status status = connect_address(fd.get(), generic, sizeof *address, path, deadline); !status)
    return status;
  return fd;
}

UniqueFd accept_connection(int listener, const SocketOptions& options, int* error) {
  const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
  *error = 0;
  if (fd < 0) {
    // ECONNABORTED and EINTR: that one is gone, the listener is well
    if (errno != EAGAIN && errno != EWOULDBLOCK && errno != ECONNABORTED && errno != EINTR) *error = errno;
    return UniqueFd();
  }
  set_tcp_options(fd, options);
  return UniqueFd(fd);
}

Result<PeerCredentials> peer_credentials(int fd) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return {Code::kInternal, "SO_PEERCRED: " + errno_text(errno)};
  }
  return PeerCredentials{credentials.pid, credentials.uid};
}

Result<size_t> send_with_fds(int fd, std::span<const std::byte> bytes, std::span<const int> fds) {
  if (fds.size() > kMaxPassedFds || bytes.empty()) {
    return {Code::kInvalidArgument,
            "descriptors need at least one byte to travel with, and at most 250 go at once"};
  }
  iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
  std::vector<std::byte> control(CMSG_SPACE(fds.size() * sizeof(int)));
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  const ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (sent >= 0) return static_cast<size_t>(sent);
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return size_t{0};
  return {Code::kConnectionLost, "sendmsg: " + errno_text(errno)};
}

Result<size_t> receive_with_fds(int fd, std::span<std::byte> bytes, std::vector<UniqueFd>& fds) {
  iovec piece{bytes.data(), bytes.size()};
  alignas(cmsghdr) std::byte control[CMSG_SPACE(kMaxPassedFds * sizeof(int))];
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const ssize_t received = recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (received < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR) return size_t{0};
    return {Code::kConnectionLost, "recvmsg: " + errno_text(errno)};
  }
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int passed;
      std::memcpy(&passed, CMSG_DATA(header) + i * sizeof(int), sizeof passed);
      fds.emplace_back(passed);
    }
  }
  if (received == 0) return {Code::kConnectionLost, "the peer closed the connection"};
  return static_cast<size_t>(received);
}

Status wait_ready(int fd, short events, int cancel_fd, Deadline deadline, InterruptLook* look,
                  std::span<const int> also_readable, int patience_ms) {
  Deadline until = deadline;
  if (patience_ms >= 0) until.at = std::min(deadline.at, Deadline::after_ms(patience_ms).at);
  std::vector<pollfd> polled{{cancel_fd, POLLIN, 0}, {fd, events, 0}};  // poll() ignores negative ones
  for (const int other : also_readable) polled.push_back({other, POLLIN, 0});
  for (;;) {
    const int sleep_ms = look != nullptr ? look->limit(until.remaining_ms()) : until.remaining_ms();
    const int ready = poll(polled.data(), polled.size(), sleep_ms);
    if (ready < 0 && errno != EINTR) return {Code::kInternal, "poll: " + errno_text(errno)};
    if (look != nullptr) {
      if (ready < 0) look->soon();
      if (look->interrupted()) return InterruptLook::status();
    }
    if (ready > 0 && (polled[0].revents & POLLIN) != 0) return {Code::kCancelled, "cancelled by the caller"};
    if (deadline.expired()) return {Code::kDeadlineExceeded, "the deadline passed"};
    if (ready > 0 || until.expired()) return Status::ok();
  }
}

bool readable_now(int fd) {
  pollfd polled{fd, POLLIN, 0};
  return poll(&polled, 1, 0) == 1 && (polled.revents & POLLIN) != 0;
}

}  // namespace mooncache::net
