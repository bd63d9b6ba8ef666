// What the memory of a list costs, and how to give it back.
#pragma once

#include <cstdint>
#include <vector>

namespace mooncache {

// `list = {}` keeps the memory.
template <typename T>
void free_memory(std::vector<T>& list) {
  std::vector<T>().swap(list);
}

template <typename T>
uint64_t held_bytes(const std::vector<T>& list) {
  return list.capacity() * sizeof(T);
}

}  // namespace mooncache
