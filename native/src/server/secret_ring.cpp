#include "server/secret_ring.h"

#include <algorithm>

namespace mooncache::server {

Status SecretRing::replace(std::span<const wire::Bytes32> wanted) {
  if (wanted.empty() || wanted.size() > kMaxSecrets)
    return {Code::kInvalidArgument, "a server accepts 1 to " + std::to_string(kMaxSecrets) + " secrets"};
  std::vector<std::shared_ptr<Secret>> next;
  const std::lock_guard lock(mutex_);
  for (const wire::Bytes32& bytes : wanted) {
    const auto is_it = [&](const auto& secret) { return wire::equal_constant_time(secret->bytes, bytes); };
    if (std::any_of(next.begin(), next.end(), is_it))
      return {Code::kInvalidArgument, "a secret was named twice"};
    const auto known = std::find_if(secrets_.begin(), secrets_.end(), is_it);
    next.push_back(known != secrets_.end() ? *known : std::make_shared<Secret>(bytes));
  }
  for (const auto& secret : secrets_)
    secret->withdrawn = std::find(next.begin(), next.end(), secret) == next.end();
  secrets_ = std::move(next);
  return Status::ok();
}

std::vector<SecretUse> SecretRing::uses() const {
  std::vector<SecretUse> uses;
  for (const auto& secret : all()) {
    uses.push_back({secret->connections.load(std::memory_order_relaxed),
                    secret->last_proven_unix_s.load(std::memory_order_relaxed)});
  }
  return uses;
}

}  // namespace mooncache::server
