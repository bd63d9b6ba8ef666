#include "store/disk/libcrypto.h"

#include <dlfcn.h>

#include <string>

namespace mooncache::store::disk {

namespace {

struct LoadedLibcrypto {
  Libcrypto table{};
  std::string why;  // empty: the table is whole
};

template <typename Function>
void bind(void* library, const char* name, Function& slot, std::string& why) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr && why.empty()) why = std::string("this libcrypto lacks ") + name;
  slot = reinterpret_cast<Function>(symbol);
}

LoadedLibcrypto load() {
  LoadedLibcrypto loaded;
  void* library = nullptr;
  for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1"}) {
    library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) break;
  }
  if (library == nullptr) {
    loaded.why = "libcrypto.so.3 was not found (Debian package libssl3)";
    return loaded;
  }
  Libcrypto& t = loaded.table;
  std::string& why = loaded.why;
#define MOONCACHE_BIND(name) bind(library, #name, t.name, why)
  MOONCACHE_BIND(EVP_CIPHER_CTX_new);
  MOONCACHE_BIND(EVP_CIPHER_CTX_free);
  MOONCACHE_BIND(EVP_CIPHER_CTX_set_padding);
  MOONCACHE_BIND(EVP_CIPHER_CTX_ctrl);
  MOONCACHE_BIND(EVP_aes_256_ecb);
  MOONCACHE_BIND(EVP_aes_256_gcm);
  MOONCACHE_BIND(EVP_EncryptInit_ex);
  MOONCACHE_BIND(EVP_EncryptUpdate);
  MOONCACHE_BIND(EVP_EncryptFinal_ex);
  MOONCACHE_BIND(EVP_DecryptInit_ex);
  MOONCACHE_BIND(EVP_DecryptUpdate);
  MOONCACHE_BIND(EVP_DecryptFinal_ex);
#undef MOONCACHE_BIND
  return loaded;
}

}  // namespace

Result<const Libcrypto*> libcrypto() {
  static const LoadedLibcrypto loaded = load();
  if (!loaded.why.empty())
    return {Code::kConfigInvalid, "encryption at rest is unavailable, because " + loaded.why};
  return &loaded.table;
}

}  // namespace mooncache::store::disk
