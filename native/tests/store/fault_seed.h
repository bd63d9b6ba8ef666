// The seed of tests that break what they store in random places. `make soak` runs them with many; a failure
// prints the one that repeats it: MOONCACHE_FAULT_SEED=N test_store.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace mooncache::test {

inline uint64_t fault_seed() {
  const char* const text = std::getenv("MOONCACHE_FAULT_SEED");
  return text == nullptr ? 1 : std::strtoull(text, nullptr, 10);
}

}  // namespace mooncache::test
