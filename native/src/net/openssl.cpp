#include "net/openssl.h"

#include <dlfcn.h>

#include <string>

namespace mooncache::net {

namespace {

struct LoadedOpenssl {
  OpenSsl table{};
  std::string why;  // empty: the table is whole
};

template <typename Function>
void bind(void* library, const char* name, Function& slot, std::string& why) {
  // libssl depends on libcrypto, so dlsym on it finds both libraries' symbols
  void* symbol = dlsym(library, name);
  if (symbol == nullptr && why.empty()) why = std::string("this OpenSSL lacks ") + name;
  slot = reinterpret_cast<Function>(symbol);
}

LoadedOpenssl load() {
  LoadedOpenssl loaded;
  void* library = nullptr;
  for (const char* name : {"libssl.so.3", "libssl.so.1.1"}) {
    library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) break;
  }
  if (library == nullptr) {
    loaded.why = "libssl.so.3 was not found (Debian package libssl3)";
    return loaded;
  }
  OpenSsl& t = loaded.table;
  std::string& why = loaded.why;
#define MOONCACHE_BIND(name) bind(library, #name, t.name, why)
  MOONCACHE_BIND(TLS_server_method);
  MOONCACHE_BIND(TLS_client_method);
  MOONCACHE_BIND(SSL_CTX_new);
  MOONCACHE_BIND(SSL_CTX_free);
  MOONCACHE_BIND(SSL_CTX_ctrl);
  MOONCACHE_BIND(SSL_CTX_use_certificate_chain_file);
  MOONCACHE_BIND(SSL_CTX_use_PrivateKey_file);
  MOONCACHE_BIND(SSL_CTX_check_private_key);
  MOONCACHE_BIND(SSL_CTX_load_verify_locations);
  MOONCACHE_BIND(SSL_CTX_set_verify);
  MOONCACHE_BIND(SSL_new);
  MOONCACHE_BIND(SSL_free);
  MOONCACHE_BIND(SSL_set_fd);
  MOONCACHE_BIND(SSL_set1_host);
  MOONCACHE_BIND(SSL_get0_param);
  MOONCACHE_BIND(X509_VERIFY_PARAM_set1_ip_asc);
  MOONCACHE_BIND(SSL_ctrl);
  MOONCACHE_BIND(SSL_set_accept_state);
  MOONCACHE_BIND(SSL_set_connect_state);
  MOONCACHE_BIND(SSL_do_handshake);
  MOONCACHE_BIND(SSL_read);
  MOONCACHE_BIND(SSL_write);
  MOONCACHE_BIND(SSL_shutdown);
  MOONCACHE_BIND(SSL_pending);
  MOONCACHE_BIND(SSL_get_error);
  MOONCACHE_BIND(SSL_get_verify_result);
  MOONCACHE_BIND(X509_verify_cert_error_string);
  MOONCACHE_BIND(ERR_get_error);
  MOONCACHE_BIND(ERR_error_string_n);
  MOONCACHE_BIND(ERR_clear_error);
#undef MOONCACHE_BIND
  return loaded;
}

}  // namespace

Result<const OpenSsl*> openssl() {
  static const LoadedOpenssl loaded = load();
  if (!loaded.why.empty()) return {Code::kTlsError, "TLS is unavailable, because " + loaded.why};
  return &loaded.table;
}

}  // namespace mooncache::net
