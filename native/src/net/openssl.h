// The few OpenSSL calls that TLS needs, bound at run time (libssl.so.3 or libssl.so.1.1), so that the
// extension imports on a machine without OpenSSL and is built without its headers. The numbers are OpenSSL's
// public constants.
#pragma once

#include <cstdint>

#include "mooncache/status.h"

namespace mooncache::net {

struct OpenSsl {
  static constexpr int kFileTypePem = 1;
  static constexpr int kVerifyPeer = 1;
  static constexpr int kVerifyFailIfNoPeerCert = 2;
  static constexpr long kVerifyOk = 0;
  static constexpr int kErrorWantRead = 2;
  static constexpr int kErrorWantWrite = 3;
  static constexpr int kErrorZeroReturn = 6;
  static constexpr int kCtrlMode = 33;
  static constexpr int kCtrlSetTlsextHostname = 55;
  static constexpr int kCtrlSetMinProtoVersion = 123;
  static constexpr long kModeEnablePartialWrite = 1;
  static constexpr long kModeAcceptMovingWriteBuffer = 2;
  static constexpr long kTls13 = 0x0304;

  const void* (*TLS_server_method)();
  const void* (*TLS_client_method)();
  void* (*SSL_CTX_new)(const void* method);
  void (*SSL_CTX_free)(void* context);
  long (*SSL_CTX_ctrl)(void* context, int command, long number, void* pointer);
  int (*SSL_CTX_use_certificate_chain_file)(void* context, const char* file);
  int (*SSL_CTX_use_PrivateKey_file)(void* context, const char* file, int type);
  int (*SSL_CTX_check_private_key)(const void* context);
  int (*SSL_CTX_load_verify_locations)(void* context, const char* file, const char* directory);
  void (*SSL_CTX_set_verify)(void* context, int mode, void* callback);
  void* (*SSL_new)(void* context);
  void (*SSL_free)(void* ssl);
  int (*SSL_set_fd)(void* ssl, int fd);
  int (*SSL_set1_host)(void* ssl, const char* name);
  void* (*SSL_get0_param)(void* ssl);
  int (*X509_VERIFY_PARAM_set1_ip_asc)(void* parameters, const char* address);
  long (*SSL_ctrl)(void* ssl, int command, long number, void* pointer);
  void (*SSL_set_accept_state)(void* ssl);
  void (*SSL_set_connect_state)(void* ssl);
  int (*SSL_do_handshake)(void* ssl);
  int (*SSL_read)(void* ssl, void* buffer, int size);
  int (*SSL_write)(void* ssl, const void* buffer, int size);
  int (*SSL_shutdown)(void* ssl);
  int (*SSL_pending)(const void* ssl);
  int (*SSL_get_error)(const void* ssl, int result);
  long (*SSL_get_verify_result)(const void* ssl);
  const char* (*X509_verify_cert_error_string)(long result);
  unsigned long (*ERR_get_error)();
  void (*ERR_error_string_n)(unsigned long error, char* buffer, unsigned long size);
  void (*ERR_clear_error)();
};

// The loaded table, or the reason why there is none. Loaded once per process.
Result<const OpenSsl*> openssl();

}  // namespace mooncache::net
