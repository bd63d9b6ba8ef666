#include "store/extent_allocator.h"

#include <algorithm>
#include <bit>

namespace mooncache::store {

ExtentAllocator::ExtentAllocator(uint32_t quanta) : capacity_(quanta) {
  for (auto& lists : heads_) lists.fill(kNone);
  const uint32_t node = nodes_.allocate();
  nodes_[node] = Node{};
  nodes_[node].size = quanta;
  link(node);
}

std::vector<uint32_t> ExtentAllocator::take(std::span<const Taken> extents) {
  std::vector<uint32_t> nodes;
  nodes.reserve(extents.size());
  if (extents.empty()) return nodes;
  unlink(0);
  uint32_t last = kNone, at = 0;
  // Node 0 is the leftmost one.
  const auto append = [&](uint32_t size) {
    const uint32_t node = last == kNone ? 0 : nodes_.allocate();
    nodes_[node] = Node{};
    nodes_[node].offset = at;
    nodes_[node].size = size;
    nodes_[node].left = last;
    if (last != kNone) nodes_[last].right = node;
    at += size;
    return last = node;
  };
  for (const Taken& extent : extents) {
    if (extent.offset > at) link(append(extent.offset - at));
    nodes.push_back(append(extent.quanta));
  }
  if (at < capacity_) link(append(capacity_ - at));
  return nodes;
}

// Sizes below kFine have a class each; above, each power of two is cut into kFine classes.
ExtentAllocator::Class ExtentAllocator::class_of(uint32_t size) {
  if (size < kFine) return {0, size};
  const auto top = static_cast<uint32_t>(std::bit_width(size) - 1);
  return {top - kFineBits + 1, (size >> (top - kFineBits)) & (kFine - 1)};
}

uint32_t ExtentAllocator::find(uint32_t quanta) const {
  const Class own = class_of(quanta);
  uint32_t node = heads_[own.coarse][own.fine];
  for (int probe = 0; probe < kProbes && node != kNone; ++probe) {
    if (nodes_[node].size >= quanta) return node;
    node = nodes_[node].next;
  }
  // Every extent of a higher class is large enough.
  const uint32_t above = own.fine + 1 < kFine ? fine_map_[own.coarse] & (~0u << (own.fine + 1)) : 0;
  if (above != 0) return heads_[own.coarse][static_cast<uint32_t>(std::countr_zero(above))];
  const uint32_t coarse_above = own.coarse + 1 < kCoarse ? coarse_map_ & (~0u << (own.coarse + 1)) : 0;
  if (coarse_above == 0) return kNone;
  const auto coarse = static_cast<uint32_t>(std::countr_zero(coarse_above));
  return heads_[coarse][static_cast<uint32_t>(std::countr_zero(fine_map_[coarse]))];
}

ExtentAllocator::Allocation ExtentAllocator::allocate(uint32_t quanta) {
  if (quanta == 0 || quanta > free_quanta_) return {};
  const uint32_t node = find(quanta);
  if (node == kNone) return {};
  unlink(node);
  nodes_[node].previous = kNone;
  const uint32_t rest_size = nodes_[node].size - quanta;
  if (rest_size > 0) {
    const uint32_t rest = nodes_.allocate();
    Node& left = nodes_[node];
    Node& right = nodes_[rest];
    right = Node{};
    right.offset = left.offset + quanta;
    right.size = rest_size;
    right.left = node;
    right.right = left.right;
    if (left.right != kNone) nodes_[left.right].left = rest;
    left.right = rest;
    left.size = quanta;
    link(rest);
  }
  return {node, nodes_[node].offset};
}

void ExtentAllocator::free(uint32_t node) {
  const uint32_t left = nodes_[node].left;
  if (left != kNone && nodes_[left].is_free != 0) {
    unlink(left);
    nodes_[left].size += nodes_[node].size;
    nodes_[left].right = nodes_[node].right;
    if (nodes_[node].right != kNone) nodes_[nodes_[node].right].left = left;
    nodes_.release(node);
    node = left;
  }
  const uint32_t right = nodes_[node].right;
  if (right != kNone && nodes_[right].is_free != 0) {
    unlink(right);
    nodes_[node].size += nodes_[right].size;
    nodes_[node].right = nodes_[right].right;
    if (nodes_[right].right != kNone) nodes_[nodes_[right].right].left = node;
    nodes_.release(right);
  }
  link(node);
}

void ExtentAllocator::link(uint32_t node) {
  Node& entry = nodes_[node];
  const Class cls = class_of(entry.size);
  uint32_t& head = heads_[cls.coarse][cls.fine];
  entry.previous = kNone;
  entry.next = head;
  entry.is_free = 1;
  if (head != kNone) nodes_[head].previous = node;
  head = node;
  fine_map_[cls.coarse] |= 1u << cls.fine;
  coarse_map_ |= 1u << cls.coarse;
  free_quanta_ += entry.size;
  ++free_extents_;
}

void ExtentAllocator::unlink(uint32_t node) {
  Node& entry = nodes_[node];
  const Class cls = class_of(entry.size);
  uint32_t& head = heads_[cls.coarse][cls.fine];
  if (entry.previous != kNone) nodes_[entry.previous].next = entry.next;
  if (entry.next != kNone) nodes_[entry.next].previous = entry.previous;
  if (head == node) head = entry.next;
  if (head == kNone) {
    fine_map_[cls.coarse] &= ~(1u << cls.fine);
    if (fine_map_[cls.coarse] == 0) coarse_map_ &= ~(1u << cls.coarse);
  }
  entry.is_free = 0;
  free_quanta_ -= entry.size;
  --free_extents_;
}

uint32_t ExtentAllocator::largest_free() const {
  if (coarse_map_ == 0) return 0;
  const auto coarse = static_cast<uint32_t>(std::bit_width(coarse_map_) - 1);
  const auto fine = static_cast<uint32_t>(std::bit_width(fine_map_[coarse]) - 1);
  uint32_t largest = 0;
  uint32_t node = heads_[coarse][fine];
  for (int probe = 0; probe < 4 * kProbes && node != kNone; ++probe, node = nodes_[node].next) {
    largest = std::max(largest, nodes_[node].size);
  }
  return largest;
}

std::vector<ExtentAllocator::Owned> ExtentAllocator::owners_around(uint32_t quanta, uint32_t rank) const {
  constexpr size_t kOwnersMax = 256;
  if (coarse_map_ == 0) return {};
  const auto coarse = static_cast<uint32_t>(std::bit_width(coarse_map_) - 1);
  uint32_t node = heads_[coarse][static_cast<uint32_t>(std::bit_width(fine_map_[coarse]) - 1)];
  for (; rank > 0 && nodes_[node].next != kNone; --rank) node = nodes_[node].next;
  std::vector<Owned> owners;
  uint64_t total = nodes_[node].size;
  const auto extend = [&](uint32_t at, bool right) {
    while (at != kNone && total < quanta && owners.size() < kOwnersMax) {
      const Node& entry = nodes_[at];
      if (entry.is_free == 0) {
        if (entry.previous == kNone) return;
        owners.push_back({entry.previous, entry.offset});
      }
      total += entry.size;
      at = right ? entry.right : entry.left;
    }
  };
  extend(nodes_[node].right, true);
  extend(nodes_[node].left, false);
  if (total < quanta) owners.clear();
  return owners;
}

bool ExtentAllocator::check_lists(std::string* why, uint32_t* seen) const {
  for (uint32_t coarse = 0; coarse < kCoarse; ++coarse) {
    if (((coarse_map_ >> coarse) & 1u) != (fine_map_[coarse] != 0 ? 1u : 0u))
      return *why = "allocator: coarse bitmap", false;
    for (uint32_t fine = 0; fine < kFine; ++fine) {
      uint32_t node = heads_[coarse][fine];
      if (((fine_map_[coarse] >> fine) & 1u) != (node != kNone ? 1u : 0u))
        return *why = "allocator: fine bitmap", false;
      uint32_t previous = kNone;
      for (; node != kNone; previous = node, node = nodes_[node].next) {
        const Class cls = class_of(nodes_[node].size);
        if (nodes_[node].is_free == 0 || nodes_[node].previous != previous || cls.coarse != coarse ||
            cls.fine != fine) {
          return *why = "allocator: free list", false;
        }
        if (++*seen > free_extents_) return *why = "allocator: free list longer than counted", false;
      }
    }
  }
  return true;
}

bool ExtentAllocator::check(std::string* why) const {
  uint32_t in_lists = 0;
  if (!check_lists(why, &in_lists)) return false;
  uint32_t at = 0, count = 0, free_count = 0, free_sum = 0;
  bool left_free = false;
  // Node 0 is the leftmost forever: it is created first and merges keep the left node.
  for (uint32_t node = 0, left = kNone; node != kNone; left = node, node = nodes_[node].right) {
    const Node& entry = nodes_[node];
    if (entry.offset != at || entry.size == 0 || entry.left != left) return *why = "allocator: tiling", false;
    if (entry.is_free != 0 && left_free) return *why = "allocator: free neighbours not merged", false;
    left_free = entry.is_free != 0;
    if (left_free) {
      ++free_count;
      free_sum += entry.size;
    }
    at += entry.size;
    if (++count > nodes_.used()) return *why = "allocator: more nodes than counted", false;
  }
  if (at != capacity_ || count != nodes_.used()) return *why = "allocator: capacity not covered", false;
  if (free_count != free_extents_ || free_count != in_lists || free_sum != free_quanta_) {
    return *why = "allocator: free totals", false;
  }
  return true;
}

}  // namespace mooncache::store
