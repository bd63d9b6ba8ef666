// The few calls of OpenSSL's libcrypto that encryption at rest needs, bound at run time (libcrypto.so.3 or
// libcrypto.so.1.1), so that the extension imports and works on a machine without it. The numbers are
// OpenSSL's public constants.
#pragma once

#include "mooncache/status.h"

namespace mooncache::store::disk {

struct Libcrypto {
  static constexpr int kCtrlGcmGetTag = 0x10;
  static constexpr int kCtrlGcmSetTag = 0x11;

  void* (*EVP_CIPHER_CTX_new)();
  void (*EVP_CIPHER_CTX_free)(void* context);
  int (*EVP_CIPHER_CTX_set_padding)(void* context, int padding);
  int (*EVP_CIPHER_CTX_ctrl)(void* context, int command, int number, void* pointer);
  const void* (*EVP_aes_256_ecb)();
  const void* (*EVP_aes_256_gcm)();
  int (*EVP_EncryptInit_ex)(void* context, const void* cipher, void* engine, const unsigned char* key,
                            const unsigned char* nonce);
  int (*EVP_EncryptUpdate)(void* context, unsigned char* out, int* written, const unsigned char* in,
                           int bytes);
  int (*EVP_EncryptFinal_ex)(void* context, unsigned char* out, int* written);
  int (*EVP_DecryptInit_ex)(void* context, const void* cipher, void* engine, const unsigned char* key,
                            const unsigned char* nonce);
  int (*EVP_DecryptUpdate)(void* context, unsigned char* out, int* written, const unsigned char* in,
                           int bytes);
  int (*EVP_DecryptFinal_ex)(void* context, unsigned char* out, int* written);
};

// The loaded table, or CONFIG_INVALID with the reason why there is none. Loaded once per process.
Result<const Libcrypto*> libcrypto();

}  // namespace mooncache::store::disk
