// Which tenants' blocks are encrypted on disks, and with which keys. Any thread; a leaf lock.
//
// A tenant without keys is written as it is. A tenant whose blocks have to be encrypted, and cannot be, is
// not written at all: its key is missing, or libcrypto is. Once keys of a tenant were set here, and be it
// none, it is never written as it is before the next start.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "mooncache/types.h"
#include "store/disk/cipher.h"

namespace mooncache::store::disk {

class Keyring {
 public:
  using Load = std::function<Result<const Libcrypto*>()>;
  using KeyRef = std::shared_ptr<const TenantKey>;
  // How a tenant's blocks are written. With a key: encrypted.
  struct Writing {
    bool refused = false;
    KeyRef key;
  };

  explicit Keyring(Load load = libcrypto) : load_(std::move(load)) {}

  // The keys of a tenant from now on: the first one writes, all of them read. CONFIG_INVALID: libcrypto is
  // missing, and the tenant's blocks do not go to disks.
  Status set(TenantId tenant, const std::vector<RawKey>& keys);
  // Whether a tenant without keys is refused.
  void require(TenantId tenant, bool required);

  Writing writing(TenantId tenant) const;
  // Null: it is not here.
  KeyRef find(TenantId tenant, uint32_t key_id) const;
  // Whether any key of the tenant is here.
  bool has_key(TenantId tenant) const;

 private:
  struct Known {
    bool required = false, had_key = false;
    std::vector<KeyRef> keys;
  };

  const Load load_;
  mutable std::mutex mutex_;
  std::unordered_map<TenantId, Known> known_;
  std::atomic<bool> any_{false};  // false: no tenant is known, and no lock is taken
};

}  // namespace mooncache::store::disk
