// A byte stream over a connected, non-blocking socket: plain, or TLS over it. One thread uses a stream at a
// time.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "mooncache/bytes.h"
#include "mooncache/status.h"
#include "net/socket.h"

namespace mooncache::net {

enum class IoState : uint8_t {
  kMoved,      // `bytes` > 0 were moved
  kWantRead,   // try again when the socket is readable
  kWantWrite,  // try again when the socket is writable
  kEnd,        // the peer closed its side
  kFailed,     // see Stream::error()
};

struct IoResult {
  IoState state = IoState::kMoved;
  size_t bytes = 0;
};

class Stream {
 public:
  virtual ~Stream() = default;
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Moves what can be moved at once, over as many slices as fit one system call. Empty slices are fine.
  virtual IoResult read_some(std::span<const Slice> destination) = 0;
  virtual IoResult write_some(std::span<const ConstSlice> source) = 0;
  // Advances a TLS handshake; a plain stream is done at once (kMoved). Repeat after kWantRead/kWantWrite.
  virtual IoResult handshake() = 0;
  // Bytes already decrypted but not yet read: poll(2) does not know of them.
  virtual bool has_buffered() const { return false; }
  virtual bool is_tls() const { return false; }

  // Memory may go away behind its mapping, and a processor that touches it puts other memory in its place
  // (base/bus_guard.h). The kernel only answers EFAULT: then the memory is touched, and the call made again.
  void touch_lost_memory() { touches_ = true; }
  int fd() const { return fd_.get(); }
  const Status& error() const { return error_; }

 protected:
  explicit Stream(UniqueFd fd) : fd_(std::move(fd)) {}
  bool touches() const { return touches_; }
  IoResult fail(Code code, std::string message) {
    error_ = {code, std::move(message)};
    return {IoState::kFailed, 0};
  }

 private:
  UniqueFd fd_;
  Status error_;
  bool touches_ = false;
};

std::unique_ptr<Stream> make_plain_stream(UniqueFd fd);

// TLS 1.3 by the system's OpenSSL, opened at run time.
struct TlsConfig {
  std::string certificate_file;  // PEM chain; a server must have one, a client needs one for mTLS
  std::string key_file;          // PEM private key
  std::string ca_file;           // PEM authorities: client: whom to trust (required); server: set = mTLS
};

class TlsContext {
 public:
  virtual ~TlsContext() = default;
  // `peer_name`: DNS name or IP address that the peer's certificate must carry (client side; "" on the
  // server).
  virtual Result<std::unique_ptr<Stream>> wrap(UniqueFd fd, const std::string& peer_name) = 0;
};

// TLS_ERROR with the reason: no OpenSSL on this machine, unreadable file, key that does not fit, …
Result<std::shared_ptr<TlsContext>> make_tls_context(const TlsConfig& config, bool server);
// OK, or "unavailable, because …".
Status tls_availability();

}  // namespace mooncache::net
