#include "server/disk_reads.h"

#include <algorithm>
#include <utility>

#include "server/connection.h"
#include "server/peer_session.h"

namespace mooncache::server {

namespace {

constexpr size_t kAhead = 256;
// What was in memory when it was asked for may be on the disk when it is its turn, and the other way round.
constexpr uint8_t kTries = 3;

}  // namespace

void DiskReads::ask(PeerSession& session, const Key& key, Item& item) {
  ++item.tries;
  auto ended = std::make_shared<std::atomic<bool>>(false);
  auto done = [&loop = session.loop(), serial = session.serial, ended] {
    ended->store(true, std::memory_order_release);
    loop.landed(serial);
  };
  if (session.store().fetch(session.who.tenant, key, std::move(done))) item.ended = std::move(ended);
}

bool DiskReads::waits(PeerSession& session, size_t at, size_t count, const KeyOf& key_of) {
  if (!session.store().has_disk()) return false;
  if (items_.empty()) items_.resize(count);
  Item& mine = items_[at];
  if (mine.ended != nullptr && mine.ended->load(std::memory_order_acquire)) mine.ended.reset();
  if (mine.ended == nullptr && mine.tries < kTries) ask(session, key_of(at), mine);
  for (asked_ = std::max(asked_, at + 1); asked_ < std::min(count, at + kAhead); ++asked_) {
    ask(session, key_of(asked_), items_[asked_]);
  }
  return mine.ended != nullptr;
}

// The loop's side --------------------------------------------------------------------------------------

void Loop::landed(uint64_t serial) {
  {
    const std::lock_guard lock(mutex_);
    landed_.push_back(serial);
  }
  wake();
}

void Loop::await_disk(Connection& connection) {
  awaiting_disk_.emplace(connection.session().serial, &connection);
}

void Loop::take_landed() {
  std::vector<uint64_t> serials;
  {
    const std::lock_guard lock(mutex_);
    serials.swap(landed_);
  }
  retry_disk(serials);
}

// A connection may be gone, or wait for something else by now.
void Loop::retry_disk(const std::vector<uint64_t>& serials) {
  for (const uint64_t serial : serials) {
    const auto found = awaiting_disk_.find(serial);
    if (found == awaiting_disk_.end()) continue;
    Connection& connection = *found->second;
    awaiting_disk_.erase(found);
    if (!connection.awaits_disk()) continue;
    connection.retry_disk();
    connection.account();
  }
}

}  // namespace mooncache::server
