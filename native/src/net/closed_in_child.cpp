#include "net/closed_in_child.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>

namespace mooncache::net {

namespace {

// The list is read in a child, where a lock may be held by a thread that does not exist: no locks, and
// nothing is ever freed.
constexpr int kFree = -1;

struct ListChunk {
  ListChunk() {
    for (auto& slot : slots) slot.store(kFree, std::memory_order_relaxed);
  }
  std::array<std::atomic<int>, 128> slots;
  ListChunk* next = nullptr;
};

std::atomic<ListChunk*> chunks{nullptr};

void empty_in_child() {
  const int inert = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  for (ListChunk* chunk = chunks.load(std::memory_order_acquire); chunk != nullptr; chunk = chunk->next) {
    for (auto& slot : chunk->slots) {
      const int fd = slot.load(std::memory_order_relaxed);
      if (fd == kFree) continue;
      if (inert < 0 || dup3(inert, fd, O_CLOEXEC) < 0) (void)close(fd);
      // not again in a child of this child: the number may stand for another file by then
      slot.store(kFree, std::memory_order_relaxed);
    }
  }
  if (inert >= 0) (void)close(inert);
}

std::atomic<int>* claim(int fd) {
  static const bool registered = pthread_atfork(nullptr, nullptr, empty_in_child) == 0;
  (void)registered;
  for (ListChunk* chunk = chunks.load(std::memory_order_acquire); chunk != nullptr; chunk = chunk->next) {
    for (auto& slot : chunk->slots) {
      int expected = kFree;
      if (slot.load(std::memory_order_relaxed) == kFree && slot.compare_exchange_strong(expected, fd))
        return &slot;
    }
  }
  auto* more = new ListChunk;
  more->slots[0].store(fd, std::memory_order_relaxed);
  more->next = chunks.load(std::memory_order_relaxed);
  while (
      !chunks.compare_exchange_weak(more->next, more, std::memory_order_release, std::memory_order_relaxed)) {
  }
  return &more->slots[0];
}

}  // namespace

ClosedInChild::ClosedInChild(int fd) : fd_(fd) {
  if (fd >= 0) slot_ = claim(fd);
}

void ClosedInChild::release() {
  int expected = fd_;  // in a child the slot may serve another descriptor
  if (slot_ != nullptr) (void)std::exchange(slot_, nullptr)->compare_exchange_strong(expected, kFree);
}

}  // namespace mooncache::net
