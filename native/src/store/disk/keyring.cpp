#include "store/disk/keyring.h"

#include <algorithm>
#include <utility>

namespace mooncache::store::disk {

Status Keyring::set(TenantId tenant, const std::vector<RawKey>& keys) {
  Status loaded;
  std::vector<KeyRef> fresh;
  if (!keys.empty()) {
    const auto crypto = load_();
    if (!crypto) loaded = crypto.status();
    for (size_t at = 0; crypto && at < keys.size(); ++at)
      fresh.push_back(std::make_shared<TenantKey>(**crypto, keys[at]));
  }
  const std::lock_guard lock(mutex_);
  any_.store(true, std::memory_order_relaxed);
  Known& known = known_[tenant];
  known.had_key = true;
  known.keys.swap(fresh);
  return loaded;
}

void Keyring::require(TenantId tenant, bool required) {
  const std::lock_guard lock(mutex_);
  if (!required && !known_.contains(tenant)) return;
  any_.store(true, std::memory_order_relaxed);
  known_[tenant].required = required;
}

Keyring::Writing Keyring::writing(TenantId tenant) const {
  if (!any_.load(std::memory_order_relaxed)) return {};
  const std::lock_guard lock(mutex_);
  const auto found = known_.find(tenant);
  if (found == known_.end()) return {};
  const Known& known = found->second;
  if (known.keys.empty()) return {known.required || known.had_key, nullptr};
  return {false, known.keys.front()};
}

Keyring::KeyRef Keyring::find(TenantId tenant, uint32_t key_id) const {
  const std::lock_guard lock(mutex_);
  const auto found = known_.find(tenant);
  if (found == known_.end()) return nullptr;
  const auto& keys = found->second.keys;
  const auto key =
      std::find_if(keys.begin(), keys.end(), [&](const KeyRef& one) { return one->id() == key_id; });
  return key == keys.end() ? nullptr : *key;
}

bool Keyring::has_key(TenantId tenant) const {
  const std::lock_guard lock(mutex_);
  const auto found = known_.find(tenant);
  return found != known_.end() && !found->second.keys.empty();
}

}  // namespace mooncache::store::disk
