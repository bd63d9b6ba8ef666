// The cluster's secrets that a server accepts. There is one, or two while a new one takes the place of the
// old one: connections that proved the old one go on until it is withdrawn, and then end with their next
// request.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "mooncache/server.h"
#include "mooncache/status.h"
#include "wire/messages.h"

namespace mooncache::server {

// One secret, and who proved it. Connections may outlive its place in the ring.
struct Secret {
  explicit Secret(const wire::Bytes32& bytes_in) : bytes(bytes_in) {}

  const wire::Bytes32 bytes;
  std::atomic<bool> withdrawn{false};
  std::atomic<uint64_t> last_proven_unix_s{0};  // 0 = never
  std::atomic<uint64_t> connections{0};
};

// What one connection proved; it is counted as long as this lives.
class ProvenSecret {
 public:
  ProvenSecret() = default;
  ProvenSecret(std::shared_ptr<Secret> secret, uint64_t now_unix_s) : secret_(std::move(secret)) {
    secret_->connections.fetch_add(1, std::memory_order_relaxed);
    secret_->last_proven_unix_s.store(now_unix_s, std::memory_order_relaxed);
  }
  ~ProvenSecret() {
    if (secret_) secret_->connections.fetch_sub(1, std::memory_order_relaxed);
  }
  ProvenSecret(ProvenSecret&& other) noexcept : secret_(std::move(other.secret_)) {}
  ProvenSecret& operator=(ProvenSecret&& other) noexcept {
    std::swap(secret_, other.secret_);
    return *this;
  }

  bool withdrawn() const { return secret_ && secret_->withdrawn.load(std::memory_order_relaxed); }
  const wire::Bytes32& bytes() const { return secret_->bytes; }

 private:
  std::shared_ptr<Secret> secret_;
};

class SecretRing {
 public:
  explicit SecretRing(const wire::Bytes32& first) : secrets_{std::make_shared<Secret>(first)} {}

  // These are accepted from now on, and no others. Those that stay keep their counts.
  // INVALID_ARGUMENT: none or too many, or one of them twice.
  Status replace(std::span<const wire::Bytes32> wanted);
  // The secret with which `proof_of(secret)` is what the peer sent. Each one is tried, whichever it is, so
  // the time tells nothing of them.
  template <typename ProofOf>
  std::optional<ProvenSecret> proven(const wire::Bytes32& presented, uint64_t now_unix_s,
                                     ProofOf&& proof_of) const {
    std::shared_ptr<Secret> found;
    for (const auto& secret : all()) {
      if (wire::equal_constant_time(proof_of(secret->bytes), presented)) found = secret;
    }
    if (!found) return std::nullopt;
    return ProvenSecret(std::move(found), now_unix_s);
  }
  std::vector<SecretUse> uses() const;

 private:
  std::vector<std::shared_ptr<Secret>> all() const {
    const std::lock_guard lock(mutex_);
    return secrets_;
  }

  mutable std::mutex mutex_;
  std::vector<std::shared_ptr<Secret>> secrets_;
};

}  // namespace mooncache::server
