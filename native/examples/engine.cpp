// An engine in few lines: it "computes" the KV of a prompt block by block, saves what it computed in the
// pool, and loads what is there already, be it its own work or that of another engine.
//
//   example_engine SEED TOKEN_FILE PROMPT_TOKENS [FIRST_TOKEN]
//
// SEED is the data port of any store node. It prints how many blocks it loaded and how many it computed.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <string>
#include <vector>

#include "mooncache/cluster_client.h"
#include "mooncache/passport.h"

using namespace mooncache;

namespace {

// The shape of the KV cache: of each block, K and V of each layer lie in memory of their own.
constexpr uint32_t kBlockTokens = 16;
constexpr size_t kLayers = 4;
constexpr size_t kTokenBytes = 256;  // K, or V, of one token in one layer
constexpr size_t kPageBytes = kBlockTokens * kTokenBytes;
constexpr size_t kPagesPerBlock = 2 * kLayers;
constexpr int64_t kTimeoutMs = 10'000;

// Paged KV memory, one arena per layer and kind, as engines have it.
class KvCache {
 public:
  explicit KvCache(size_t blocks) : arenas_(kPagesPerBlock, std::vector<std::byte>(blocks * kPageBytes)) {}

  // The memory of one block: what a put reads and a get fills, without a copy in between.
  std::vector<Slice> pages(size_t block) {
    std::vector<Slice> slices;
    for (auto& arena : arenas_) slices.push_back({arena.data() + block * kPageBytes, kPageBytes});
    return slices;
  }
  std::vector<std::vector<std::byte>>& arenas() { return arenas_; }

 private:
  std::vector<std::vector<std::byte>> arenas_;
};

// Stands for a forward pass: like real KV, the bytes depend on all tokens up to here.
void compute(KvCache& kv, size_t block, std::span<const uint32_t> tokens) {
  uint64_t state =
      std::accumulate(tokens.begin(), tokens.begin() + (block + 1) * kBlockTokens, uint64_t{1},
                      [](uint64_t sum, uint32_t token) { return sum * 0x100000001b3ull + token; });
  for (const Slice& page : kv.pages(block)) {
    for (size_t i = 0; i < page.size; ++i) {
      state = state * 6364136223846793005ull + 1442695040888963407ull;
      page.data[i] = static_cast<std::byte>(state >> 56);
    }
  }
}

CallOptions within() {
  CallOptions options;
  options.deadline = Deadline::after_ms(kTimeoutMs);
  return options;
}

// All that decides what the bytes of a block mean. An engine with another value anywhere has other keys, so
// it can never load blocks that do not fit.
Result<std::vector<Key>> keys_of(std::span<const uint32_t> tokens) {
  const PassportField fields[] = {{"model", "example"},
                                  {"layers", std::to_string(kLayers)},
                                  {"token_bytes", std::to_string(kTokenBytes)},
                                  {"block_tokens", std::to_string(kBlockTokens)}};
  const auto root = passport_root(fields);
  if (!root) return root.status();
  return chain_keys(*root, tokens, kBlockTokens);
}

// Loads the longest prefix that the pool has; returns how many blocks came whole.
size_t load(ClusterClient& pool, KvCache& kv, std::span<const Key> keys) {
  const auto match = pool.match(keys, true, within());
  const size_t wanted = match ? match->leading_run : 0;  // without the pool an engine computes
  std::vector<std::vector<Slice>> memory;
  for (size_t i = 0; i < wanted; ++i) memory.push_back(kv.pages(i));
  std::vector<GetBlock> gets;
  for (size_t i = 0; i < wanted; ++i) gets.push_back({keys[i], memory[i]});
  std::vector<GetOutcome> outcomes(wanted);
  if (wanted == 0 || !pool.get(gets, {}, within(), outcomes)) return 0;
  size_t loaded = 0;
  while (loaded < wanted && outcomes[loaded].code == Code::kOk) ++loaded;
  return loaded;  // a block that was evicted meanwhile ends the prefix
}

// Saves blocks from `first` on; returns how many are in the pool now.
size_t save(ClusterClient& pool, KvCache& kv, std::span<const Key> keys, size_t first) {
  std::vector<std::vector<ConstSlice>> memory;
  for (size_t i = first; i < keys.size(); ++i) {
    const auto pages = kv.pages(i);
    memory.emplace_back(pages.begin(), pages.end());
  }
  std::vector<PutBlock> puts;
  for (size_t i = first; i < keys.size(); ++i) puts.push_back({keys[i], memory[i - first]});
  std::vector<PutOutcome> outcomes(puts.size());
  if (puts.empty() || !pool.put(puts, 1, within(), outcomes)) return 0;
  return static_cast<size_t>(std::count_if(outcomes.begin(), outcomes.end(), [](const PutOutcome& outcome) {
    return outcome.code == Code::kOk || outcome.code == Code::kAlreadyExists;
  }));
}

// Whether what was loaded is what this engine would have computed.
bool right(KvCache& kv, std::span<const uint32_t> tokens, size_t loaded) {
  KvCache own(loaded);
  for (size_t block = 0; block < loaded; ++block) {
    compute(own, block, tokens);
    const auto here = kv.pages(block), there = own.pages(block);
    for (size_t i = 0; i < here.size(); ++i)
      if (!std::equal(here[i].data, here[i].data + here[i].size, there[i].data)) return false;
  }
  return true;
}

int run(ClusterClient& pool, std::span<const uint32_t> tokens) {
  const auto keys = keys_of(tokens);
  if (!keys) return std::fprintf(stderr, "%s\n", keys.status().message.c_str()), 1;
  KvCache kv(keys->size());
  for (auto& arena : kv.arenas()) {  // so that RDMA, where there is any, moves blocks in place
    if (const Status listed = pool.register_buffer({arena.data(), arena.size()}); !listed)
      return std::fprintf(stderr, "%s\n", listed.message.c_str()), 1;
  }
  const size_t loaded = load(pool, kv, *keys);
  const bool sound = right(kv, tokens, loaded);
  for (size_t block = loaded; block < keys->size(); ++block) compute(kv, block, tokens);
  const size_t saved = save(pool, kv, *keys, loaded);
  std::printf("loaded %zu blocks (%s), computed %zu, saved %zu, %llu nodes\n", loaded,
              sound ? "right" : "WRONG", keys->size() - loaded, saved,
              static_cast<unsigned long long>(pool.state().nodes));
  for (auto& arena : kv.arenas()) (void)pool.unregister_buffer({arena.data(), arena.size()});
  return sound ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4)
    return std::fprintf(stderr, "usage: %s SEED TOKEN_FILE PROMPT_TOKENS [FIRST_TOKEN]\n", argv[0]), 2;
  ClusterConfig config;
  config.seeds = {argv[1]};
  std::ifstream file(argv[2]);
  std::getline(file, config.token);
  config.client.credentials.client_name = "example-engine";
  auto pool = ClusterClient::connect(std::move(config));
  if (!pool) {
    std::fprintf(stderr, "%s %s\n", std::string(code_name(pool.code())).c_str(),
                 pool.status().message.c_str());
    return 1;
  }
  std::vector<uint32_t> tokens(std::strtoul(argv[3], nullptr, 10));
  std::iota(tokens.begin(), tokens.end(), argc > 4 ? std::strtoul(argv[4], nullptr, 10) : 1);
  return run(**pool, tokens);
}
