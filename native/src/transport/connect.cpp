// The first part of a Session's life: a connect that does not wait, TLS, HELLO and AUTH.
#include <fcntl.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/session.h"

namespace mooncache {

namespace {

constexpr size_t kBufferBytes = 64 << 10;
constexpr const char* kSoftwareVersion = "mooncache-native/1";

std::string peer_name(const PeerDescription& peer, Route route) {
  return route == Route::kUnix ? peer.unix_path : peer.tcp_host + ":" + std::to_string(peer.tcp_port);
}

Result<net::UniqueFd> begin(int family, const sockaddr* address, socklen_t size, const std::string& name) {
  net::UniqueFd fd(socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) return {Code::kNodeUnavailable, "socket: " + net::errno_text(errno)};
  if (family != AF_UNIX) net::set_tcp_options(fd.get(), {});
  // a unix socket whose backlog is full says EAGAIN and never becomes ready
  if (connect(fd.get(), address, size) != 0 && errno != EINPROGRESS) {
    return {Code::kNodeUnavailable, "connecting to " + name + ": " + net::errno_text(errno)};
  }
  return fd;
}

Result<net::UniqueFd> begin_tcp(const PeerDescription& peer, const net::Lookup& lookup) {
  const auto& addresses = lookup.addresses();
  if (!addresses) return addresses.status();
  Result<net::UniqueFd> last{Code::kNodeUnavailable, "no address"};
  for (const net::SocketAddress& address : *addresses) {
    last = begin(address.family(), address.get(), address.size, peer_name(peer, Route::kTcp));
    if (last) break;
  }
  return last;
}

Result<net::UniqueFd> begin_unix(const PeerDescription& peer) {
  sockaddr_un address{};
  if (peer.unix_path.empty() || peer.unix_path.size() >= sizeof address.sun_path) {
    return {Code::kInvalidArgument, "a unix socket path has 1 to 107 bytes"};
  }
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, peer.unix_path.data(), peer.unix_path.size());
  const auto* generic = static_cast<const sockaddr*>(static_cast<const void*>(&address));
  return begin(AF_UNIX, generic, sizeof address, peer.unix_path);
}

Result<std::unique_ptr<net::Stream>> make_stream(net::UniqueFd fd, const PeerDescription& peer, Route route,
                                                 std::shared_ptr<net::TlsContext> tls) {
  if (route == Route::kUnix || !peer.tls.enabled) return net::make_plain_stream(std::move(fd));
  if (!tls) {
    auto made = net::make_tls_context({peer.tls.cert_file, peer.tls.key_file, peer.tls.ca_file}, false);
    if (!made) return made.status();
    tls = std::move(*made);
  }
  return tls->wrap(std::move(fd), peer.tls.server_name.empty() ? peer.tcp_host : peer.tls.server_name);
}

}  // namespace

// HELLO and AUTH as a program of their own session. Both sides prove the key; neither sends it.
class Session::Handshake final : public Program {
 public:
  explicit Handshake(Session& session) : session_(session) {}

  bool next(Request& request) override {
    if (step_ == Step::kHello) {
      wire::HelloRequest hello;
      const Credentials& credentials = session_.peer_.credentials;
      if (getrandom(nonce_.data(), nonce_.size(), 0) != static_cast<ssize_t>(nonce_.size())) return false;
      hello.flags = credentials.admin ? wire::HelloRequest::kFlagAdmin : 0;
      if (credentials.expires_unix_s != 0) hello.flags |= wire::HelloRequest::kFlagExpires;
      hello.expires_unix_s = credentials.expires_unix_s;
      hello.pid = static_cast<uint32_t>(getpid());
      hello.client_nonce = nonce_;
      hello.tenant = credentials.tenant;
      hello.client_name = credentials.client_name;
      hello.software_version = kSoftwareVersion;
      if (credentials.writer.id != 0) hello.flags |= wire::HelloRequest::kFlagWriter;
      hello.writer = credentials.writer;
      for (std::string* text : {&hello.writer.instance, &hello.writer.build})
        text->resize(std::min(text->size(), kMaxWriterTextBytes));
      request.opcode = wire::Opcode::kHello;
      hello.encode(request.meta);
      step_ = Step::kHelloSent;
      return true;
    }
    if (step_ == Step::kAuth) {
      wire::AuthRequest auth;
      const Credentials& credentials = session_.peer_.credentials;
      auth.mac = wire::auth_mac(true, credentials.key, server_nonce_, nonce_, credentials.tenant);
      request.opcode = wire::Opcode::kAuth;
      auth.encode(request.meta);
      step_ = Step::kAuthSent;
      return true;
    }
    return false;
  }

  bool finished() const override { return step_ == Step::kDone; }

  Status on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                     PayloadSink&) override {
    if (!status.is_ok()) return status;
    if (header.opcode == wire::Opcode::kHello) {
      const auto hello = wire::HelloResponse::decode(in);
      if (!hello) return {Code::kProtocolError, "malformed HELLO answer"};
      server_nonce_ = hello->server_nonce;
      step_ = Step::kAuth;
      return Status::ok();
    }
    auto auth = wire::AuthResponse::decode(in);
    if (!auth) return {Code::kProtocolError, "malformed AUTH answer"};
    const Credentials& credentials = session_.peer_.credentials;
    const auto expected = wire::auth_mac(false, credentials.key, server_nonce_, nonce_, credentials.tenant);
    if (!wire::equal_constant_time(expected, auth->server_mac)) {
      return {Code::kUnauthenticated, "the node at " + peer_name(session_.peer_, session_.route_) +
                                          " does not know this cluster's secret"};
    }
    if (!session_.peer_.node_id.empty() && auth->node_id != session_.peer_.node_id) {
      return {Code::kNodeUnavailable, "node " + auth->node_id + " answers at " +
                                          peer_name(session_.peer_, session_.route_) + " instead of node " +
                                          session_.peer_.node_id};
    }
    session_.node_ = std::move(*auth);
    session_.ready_ = true;
    step_ = Step::kDone;
    return Status::ok();
  }

 private:
  enum class Step : uint8_t { kHello, kHelloSent, kAuth, kAuthSent, kDone };
  Session& session_;
  Step step_ = Step::kHello;
  wire::Bytes16 nonce_{};
  wire::Bytes16 server_nonce_{};
};

Session::Session(const PeerDescription& peer, Route route, std::shared_ptr<net::TlsContext> tls,
                 SessionLimits limits)
    : owner_(getpid()),
      route_(route),
      limits_(limits),
      peer_(peer),
      tls_(std::move(tls)),
      buffer_(kBufferBytes) {
  limits_.read_chunk_bytes = std::max<size_t>(limits_.read_chunk_bytes, 4096);
  limits_.window_frames = std::clamp<uint32_t>(limits_.window_frames, 1, kMaxWindow);
  handshake_ = std::make_unique<Handshake>(*this);
}

// The connection is ended, not just closed here: a child that was forked while it was being made may hold the
// socket open, and with it everything that the node granted. The other way round, a child must not end its
// parent's.
// A one-sided copy ends before its session does, so the node sees the end after the last byte.
Session::~Session() {
  not_the_childs_.release();  // the number may stand for another file as soon as the stream is gone
  if (!stream_ || owner_ != getpid()) return;
  // TLS says good-bye when its stream is dropped, which must still be possible then
  const net::UniqueFd twin(stream_->is_tls() ? fcntl(stream_->fd(), F_DUPFD_CLOEXEC, 0) : -1);
  if (stream_->is_tls()) stream_.reset();
  const int fd = stream_ ? stream_->fd() : twin.get();
  if (fd >= 0) (void)shutdown(fd, SHUT_RDWR);
}

Result<std::unique_ptr<Session>> Session::start(const PeerDescription& peer, Route route,
                                                std::shared_ptr<net::TlsContext> tls, SessionLimits limits) {
  std::unique_ptr<Session> session(new Session(peer, route, std::move(tls), limits));
  if (route == Route::kTcp) session->lookup_ = net::look_up(peer.tcp_host, peer.tcp_port);
  if (Status status = session->begin_connect(); !status) return status;
  return session;
}

// Makes the stream, or leaves it empty while the node's name is looked up.
Status Session::begin_connect() {
  if (resolving()) return Status::ok();
  auto fd = route_ == Route::kUnix ? begin_unix(peer_) : begin_tcp(peer_, *lookup_);
  if (!fd) return fd.status();
  auto stream = make_stream(std::move(*fd), peer_, route_, std::move(tls_));
  if (!stream) return stream.status();
  stream_ = std::move(*stream);
  not_the_childs_ = net::ClosedInChild(stream_->fd());
  lookup_.reset();
  return Status::ok();
}

Result<std::unique_ptr<Session>> Session::connect(const PeerDescription& peer, Route route, Deadline deadline,
                                                  InterruptLook* look, SessionLimits limits) {
  auto session = start(peer, route, nullptr, limits);
  if (!session) return session.status();
  while (!(*session)->ready()) {
    if (Status status = (*session)->pump(nullptr); !status) return status;
    if ((*session)->ready()) break;
    Status status = net::wait_ready((*session)->fd(), (*session)->poll_events(), -1, deadline, look);
    if (!status) {
      const char* what = (*session)->resolving() ? "resolving " : "connecting to ";
      return {status.code, what + peer_name(peer, route) + ": " + status.message};
    }
  }
  return std::move(*session);
}

// Asks the kernel how the connect ended; leaves connected_ false while it is still under way.
Status Session::finish_connect() {
  int error = 0;
  socklen_t size = sizeof error;
  if (getsockopt(stream_->fd(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error != 0) {
    return {Code::kNodeUnavailable,
            "connecting to " + peer_name(peer_, route_) + ": " + net::errno_text(error)};
  }
  sockaddr_storage address{};
  socklen_t address_size = sizeof address;
  auto* generic = static_cast<sockaddr*>(static_cast<void*>(&address));
  if (getpeername(stream_->fd(), generic, &address_size) != 0) {
    if (errno == ENOTCONN) return Status::ok();
    return {Code::kNodeUnavailable,
            "connecting to " + peer_name(peer_, route_) + ": " + net::errno_text(errno)};
  }
  connected_ = true;
  progressed_ = true;
  return Status::ok();
}

}  // namespace mooncache
