// Extents of one arena in O(1): two-level segregated fit. Sizes and offsets count quanta, so that all
// links are 32 bits. The boundary tags live in a node array outside the arena: no peer that maps the
// arena can damage them, and free memory is never touched.
//
// Invariant: the nodes in address order tile [0, quanta) without gap; no two neighbours are both free;
// each free node is in exactly the list of its size class, and a bitmap bit is set iff its list is not
// empty. Not thread-safe: the owner's lock guards it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "store/slab.h"

namespace mooncache::store {

class ExtentAllocator {
 public:
  struct Allocation {
    uint32_t node = kNone;
    uint32_t offset = 0;  // quanta
  };

  explicit ExtentAllocator(uint32_t quanta);  // 1 .. 2^31 - 1

  // Extents that are in use from the start, in the order of their offsets and without overlap; of a fresh
  // allocator. Their nodes, in the same order.
  struct Taken {
    uint32_t offset = 0, quanta = 0;
  };
  std::vector<uint32_t> take(std::span<const Taken> extents);

  // node == kNone when nothing fits.
  Allocation allocate(uint32_t quanta);
  void free(uint32_t node);

  // Who holds an extent in use; the allocator only keeps it.
  void set_owner(uint32_t node, uint32_t owner) { nodes_[node].previous = owner; }
  struct Owned {
    uint32_t owner = kNone;
    uint32_t offset = 0;  // quanta; tells the extent from one that the owner got since
  };
  // Owners whose extents, freed together, would join the `rank`-th of the largest free extents to one of
  // at least `quanta`. Empty when an extent without owner is in the way or too many are needed.
  std::vector<Owned> owners_around(uint32_t quanta, uint32_t rank) const;

  uint32_t capacity() const { return capacity_; }
  uint32_t free_quanta() const { return free_quanta_; }
  uint32_t free_extents() const { return free_extents_; }
  // At least the class bound of the largest free extent; exact when its class holds few extents.
  uint32_t largest_free() const;
  uint32_t size_of(uint32_t node) const { return nodes_[node].size; }
  uint32_t offset_of(uint32_t node) const { return nodes_[node].offset; }
  uint32_t used_extents() const { return nodes_.used() - free_extents_; }
  uint64_t memory_bytes() const { return nodes_.memory_bytes() + sizeof(*this); }
  bool check(std::string* why) const;

 private:
  // 28 bytes per extent.
  struct Node {
    uint32_t offset = 0;
    uint32_t size = 0;
    uint32_t left = kNone;  // neighbours by address
    uint32_t right = kNone;
    uint32_t previous = kNone;  // neighbours in the free list; in use: previous is the owner
    uint32_t next = kNone;
    uint32_t is_free = 0;
  };
  static constexpr uint32_t kFineBits = 5;
  static constexpr uint32_t kFine = 1u << kFineBits;
  static constexpr uint32_t kCoarse = 32 - kFineBits;
  // How many extents of the request's own class are tried before a larger one is cut. Blocks of one size
  // fall into one class, where the first one fits.
  static constexpr int kProbes = 16;

  struct Class {
    uint32_t coarse;
    uint32_t fine;
  };
  static Class class_of(uint32_t size);
  uint32_t find(uint32_t quanta) const;
  void link(uint32_t node);
  void unlink(uint32_t node);
  bool check_lists(std::string* why, uint32_t* seen) const;

  Slab<Node, 1024> nodes_;
  uint32_t capacity_;
  uint32_t free_quanta_ = 0;
  uint32_t free_extents_ = 0;
  uint32_t coarse_map_ = 0;
  std::array<uint32_t, kCoarse> fine_map_{};
  std::array<std::array<uint32_t, kFine>, kCoarse> heads_;
};

}  // namespace mooncache::store
