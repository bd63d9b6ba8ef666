#include <arpa/inet.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <mutex>

#include "net/openssl.h"
#include "net/stream.h"

namespace mooncache::net {

namespace {

std::string last_error(const OpenSsl& ssl, const std::string& what) {
  const unsigned long error = ssl.ERR_get_error();
  if (error == 0) return what;
  char text[256];
  ssl.ERR_error_string_n(error, text, sizeof text);
  return what + ": " + text;
}

// OpenSSL writes with write(2), which raises SIGPIPE on a dead peer and would end a C++ program (Python
// ignores it already). A handler that the program set itself is left alone.
void ignore_sigpipe_once() {
  static std::once_flag once;
  std::call_once(once, [] {
    struct sigaction current {};
    if (sigaction(SIGPIPE, nullptr, &current) == 0 && current.sa_handler == SIG_DFL) {
      std::signal(SIGPIPE, SIG_IGN);
    }
  });
}

class TlsStream final : public Stream {
 public:
  TlsStream(const OpenSsl& table, void* ssl, UniqueFd fd) : Stream(std::move(fd)), table_(table), ssl_(ssl) {}
  ~TlsStream() override {
    if (handshaken_ && error().is_ok()) {
      table_.ERR_clear_error();
      (void)table_.SSL_shutdown(ssl_);  // tells the peer that this end is meant; does not wait
    }
    table_.SSL_free(ssl_);
  }

  IoResult handshake() override {
    if (handshaken_) return {IoState::kMoved, 0};
    table_.ERR_clear_error();
    const int result = table_.SSL_do_handshake(ssl_);
    if (result == 1) {
      handshaken_ = true;
      return {IoState::kMoved, 0};
    }
    return explain(result, "TLS handshake failed");
  }

  IoResult read_some(std::span<const Slice> destination) override {
    if (const IoResult ready = handshake(); ready.state != IoState::kMoved) return ready;
    size_t moved = 0;
    for (const Slice& slice : destination) {
      size_t at = 0;
      while (at < slice.size) {
        table_.ERR_clear_error();
        const int result = table_.SSL_read(ssl_, slice.data + at, clamp(slice.size - at));
        if (result <= 0)
          return moved > 0 ? IoResult{IoState::kMoved, moved} : explain(result, "TLS read failed");
        at += static_cast<size_t>(result);
        moved += static_cast<size_t>(result);
      }
    }
    return {IoState::kMoved, moved};
  }

  IoResult write_some(std::span<const ConstSlice> source) override {
    if (const IoResult ready = handshake(); ready.state != IoState::kMoved) return ready;
    size_t moved = 0;
    for (const ConstSlice& slice : source) {
      size_t at = 0;
      while (at < slice.size) {
        table_.ERR_clear_error();
        const int result = table_.SSL_write(ssl_, slice.data + at, clamp(slice.size - at));
        if (result <= 0)
          return moved > 0 ? IoResult{IoState::kMoved, moved} : explain(result, "TLS write failed");
        at += static_cast<size_t>(result);
        moved += static_cast<size_t>(result);
      }
    }
    return {IoState::kMoved, moved};
  }

  bool has_buffered() const override { return table_.SSL_pending(ssl_) > 0; }
  bool is_tls() const override { return true; }

 private:
  static int clamp(size_t size) { return static_cast<int>(std::min<size_t>(size, 1 << 30)); }

  IoResult explain(int result, const char* what) {
    switch (table_.SSL_get_error(ssl_, result)) {
      case OpenSsl::kErrorWantRead:
        return {IoState::kWantRead, 0};
      case OpenSsl::kErrorWantWrite:
        return {IoState::kWantWrite, 0};
      case OpenSsl::kErrorZeroReturn:
        return {IoState::kEnd, 0};
      default:
        break;
    }
    if (handshaken_) return fail(Code::kConnectionLost, last_error(table_, what));
    return fail(Code::kTlsError, last_error(table_, what) + refused_certificate());
  }

  // What was wrong with the peer's certificate, which the library's own error does not say.
  std::string refused_certificate() const {
    const long result = table_.SSL_get_verify_result(ssl_);
    if (result == OpenSsl::kVerifyOk) return "";
    return std::string(" (") + table_.X509_verify_cert_error_string(result) + ")";
  }

  const OpenSsl& table_;
  void* ssl_;
  bool handshaken_ = false;
};

class OpenSslContext final : public TlsContext {
 public:
  OpenSslContext(const OpenSsl& table, void* context, bool server)
      : table_(table), context_(context), server_(server) {}
  ~OpenSslContext() override { table_.SSL_CTX_free(context_); }

  Result<std::unique_ptr<Stream>> wrap(UniqueFd fd, const std::string& peer_name) override {
    void* ssl = table_.SSL_new(context_);
    if (ssl == nullptr) return {Code::kTlsError, last_error(table_, "SSL_new failed")};
    auto stream = std::make_unique<TlsStream>(table_, ssl, std::move(fd));
    if (table_.SSL_set_fd(ssl, stream->fd()) != 1)
      return {Code::kTlsError, last_error(table_, "SSL_set_fd failed")};
    if (server_) {
      table_.SSL_set_accept_state(ssl);
      return std::unique_ptr<Stream>(std::move(stream));
    }
    if (Status named = expect_peer(ssl, peer_name); !named) return named;
    table_.SSL_set_connect_state(ssl);
    return std::unique_ptr<Stream>(std::move(stream));
  }

 private:
  Status expect_peer(void* ssl, const std::string& name) {
    if (name.empty())
      return {Code::kTlsError, "a TLS client needs the name of the peer to check its certificate"};
    unsigned char ignored[16];
    const bool numeric =
        inet_pton(AF_INET, name.c_str(), ignored) == 1 || inet_pton(AF_INET6, name.c_str(), ignored) == 1;
    if (numeric) {
      if (table_.X509_VERIFY_PARAM_set1_ip_asc(table_.SSL_get0_param(ssl), name.c_str()) != 1) {
        return {Code::kTlsError, last_error(table_, "cannot expect address " + name)};
      }
      return Status::ok();
    }
    (void)table_.SSL_ctrl(ssl, OpenSsl::kCtrlSetTlsextHostname, 0, const_cast<char*>(name.c_str()));
    if (table_.SSL_set1_host(ssl, name.c_str()) != 1) {
      return {Code::kTlsError, last_error(table_, "cannot expect host " + name)};
    }
    return Status::ok();
  }

  const OpenSsl& table_;
  void* context_;
  bool server_;
};

Status load_identity(const OpenSsl& table, void* context, const TlsConfig& config, bool server) {
  if (config.certificate_file.empty()) {
    if (server) return {Code::kTlsError, "a TLS server needs a certificate file"};
    return Status::ok();
  }
  if (table.SSL_CTX_use_certificate_chain_file(context, config.certificate_file.c_str()) != 1) {
    return {Code::kTlsError, last_error(table, "cannot read the certificate " + config.certificate_file)};
  }
  if (table.SSL_CTX_use_PrivateKey_file(context, config.key_file.c_str(), OpenSsl::kFileTypePem) != 1) {
    return {Code::kTlsError, last_error(table, "cannot read the private key " + config.key_file)};
  }
  if (table.SSL_CTX_check_private_key(context) != 1) {
    return {Code::kTlsError,
            "the private key " + config.key_file + " does not fit " + config.certificate_file};
  }
  return Status::ok();
}

Status load_trust(const OpenSsl& table, void* context, const TlsConfig& config, bool server) {
  if (config.ca_file.empty()) {
    if (!server) return {Code::kTlsError, "a TLS client needs a CA file to check the node's certificate"};
    return Status::ok();
  }
  if (table.SSL_CTX_load_verify_locations(context, config.ca_file.c_str(), nullptr) != 1) {
    return {Code::kTlsError, last_error(table, "cannot read the CA file " + config.ca_file)};
  }
  const int mode = OpenSsl::kVerifyPeer | (server ? OpenSsl::kVerifyFailIfNoPeerCert : 0);
  table.SSL_CTX_set_verify(context, mode, nullptr);
  return Status::ok();
}

}  // namespace

Status tls_availability() {
  const auto table = openssl();
  return table ? Status::ok() : table.status();
}

Result<std::shared_ptr<TlsContext>> make_tls_context(const TlsConfig& config, bool server) {
  const auto loaded = openssl();
  if (!loaded) return loaded.status();
  const OpenSsl& table = **loaded;
  ignore_sigpipe_once();
  table.ERR_clear_error();
  void* raw = table.SSL_CTX_new(server ? table.TLS_server_method() : table.TLS_client_method());
  if (raw == nullptr) return {Code::kTlsError, last_error(table, "SSL_CTX_new failed")};
  auto context = std::make_shared<OpenSslContext>(table, raw, server);
  (void)table.SSL_CTX_ctrl(raw, OpenSsl::kCtrlSetMinProtoVersion, OpenSsl::kTls13, nullptr);
  (void)table.SSL_CTX_ctrl(raw, OpenSsl::kCtrlMode,
                           OpenSsl::kModeEnablePartialWrite | OpenSsl::kModeAcceptMovingWriteBuffer, nullptr);
  if (Status identity = load_identity(table, raw, config, server); !identity) return identity;
  if (Status trust = load_trust(table, raw, config, server); !trust) return trust;
  return std::shared_ptr<TlsContext>(std::move(context));
}

}  // namespace mooncache::net
