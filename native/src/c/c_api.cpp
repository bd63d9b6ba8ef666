// mooncache/c_api.h on ClusterClient: arguments become C++ ones, nothing is thrown across.
#include "mooncache/c_api.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "mooncache/cluster_client.h"
#include "mooncache/passport.h"

static_assert(MOONCACHE_KEY_BYTES == mooncache::kKeyBytes);

struct mooncache_client {
  std::unique_ptr<mooncache::ClusterClient> cluster;
};

namespace mooncache {

namespace {

thread_local std::string last_message;

mooncache_code number_of(Code code) {
  return static_cast<mooncache_code>(code);
}

// Keeps the sentence of a call that failed.
mooncache_code answered(Status status) {
  last_message = std::move(status.message);
  return number_of(status.code);
}

template <typename Work>
mooncache_code guarded(const Work& work) noexcept {
  try {
    return answered(work());
  } catch (const std::bad_alloc&) {
    last_message.clear();  // a sentence would need memory
    return number_of(Code::kLimitExceeded);
  } catch (...) {
    last_message.clear();
    return number_of(Code::kInternal);
  }
}

Status missing(const char* what) {
  return {Code::kInvalidArgument, std::string(what) + " must not be null"};
}

// Null where a batch is not empty.
bool lacks(const void* items, size_t count) {
  return items == nullptr && count > 0;
}

std::string text_of(const char* text) {
  return text == nullptr ? "" : text;
}

CallOptions within(uint32_t timeout_ms) {
  CallOptions options;
  options.deadline = Deadline::after_ms(timeout_ms);
  return options;
}

Key key_of(const uint8_t* bytes) {
  Key key;
  std::memcpy(key.bytes.data(), bytes, kKeyBytes);
  return key;
}

std::vector<Key> keys_of(const uint8_t* bytes, size_t count) {
  std::vector<Key> keys(count);
  if (count > 0) std::memcpy(keys.data(), bytes, count * kKeyBytes);
  return keys;
}

// The slices of all blocks in one vector; block i has those before ends[i] that block i - 1 does not have.
template <typename S>
struct Blocks {
  std::vector<S> slices;
  std::vector<size_t> ends;

  Blocks(const mooncache_block* blocks, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      for (size_t k = 0; k < blocks[i].slice_count; ++k)
        slices.push_back(Slice{static_cast<std::byte*>(blocks[i].slices[k].data), blocks[i].slices[k].bytes});
      ends.push_back(slices.size());
    }
  }
  std::span<const S> of(size_t i) const {
    const size_t begin = i == 0 ? 0 : ends[i - 1];
    return std::span(slices).subspan(begin, ends[i] - begin);
  }
};

Status check_blocks(const mooncache_client* client, const mooncache_block* blocks, size_t count,
                    const mooncache_outcome* outcomes) {
  if (client == nullptr) return missing("client");
  if (lacks(blocks, count)) return missing("blocks");
  if (lacks(outcomes, count)) return missing("outcomes");
  for (size_t i = 0; i < count; ++i)
    if (lacks(blocks[i].slices, blocks[i].slice_count)) return missing("slices of a block");
  return Status::ok();
}

Status check_keys(const mooncache_client* client, const uint8_t* keys, size_t count,
                  const mooncache_code* codes) {
  if (client == nullptr) return missing("client");
  if (lacks(keys, count)) return missing("keys");
  if (lacks(codes, count)) return missing("codes");
  return Status::ok();
}

Result<ClusterConfig> config_of(const mooncache_options& options) {
  if (options.struct_bytes != sizeof options)
    return {Code::kVersionSkew, "the options are of another version of c_api.h than this library"};
  if (lacks(options.seeds, options.seed_count)) return missing("seeds");
  if (options.token == nullptr) return missing("token");
  ClusterConfig config;
  for (size_t i = 0; i < options.seed_count; ++i) config.seeds.push_back(text_of(options.seeds[i]));
  config.token = options.token;
  config.client.credentials.client_name =
      options.client_name == nullptr ? "mooncache-c" : options.client_name;
  if (options.connect_timeout_ms > 0) config.connect_timeout_ms = options.connect_timeout_ms;
  if (options.refresh_ms > 0) config.refresh_ms = options.refresh_ms;
  config.client.shm_enabled = options.no_shared_memory == 0;
  config.client.rdma.enabled = options.no_rdma == 0;
  config.client.tls.enabled = options.tls != 0;
  config.client.tls.ca_file = text_of(options.tls_ca);
  config.client.tls.cert_file = text_of(options.tls_cert);
  config.client.tls.key_file = text_of(options.tls_key);
  config.client.tls.server_name = text_of(options.tls_server_name);
  return config;
}

}  // namespace

}  // namespace mooncache

using namespace mooncache;

uint32_t mooncache_abi(void) {
  return MOONCACHE_ABI;
}

const char* mooncache_code_name(mooncache_code code) {
  // the catalogue's names are literals
  return code < 0 || code > UINT16_MAX ? "UNKNOWN" : code_name(static_cast<Code>(code)).data();
}

const char* mooncache_message(void) {
  return last_message.c_str();
}

mooncache_code mooncache_connect(const mooncache_options* options, mooncache_client** client) {
  return guarded([&] {
    if (options == nullptr) return missing("options");
    if (client == nullptr) return missing("client");
    auto config = config_of(*options);
    if (!config) return config.status();
    auto cluster = ClusterClient::connect(std::move(*config));
    if (!cluster) return cluster.status();
    *client = new mooncache_client{std::move(*cluster)};
    return Status::ok();
  });
}

void mooncache_close(mooncache_client* client) {
  delete client;
}

mooncache_code mooncache_put(mooncache_client* client, const mooncache_block* blocks, size_t count,
                             uint32_t replicas, uint32_t timeout_ms, mooncache_outcome* outcomes) {
  return guarded([&] {
    if (Status wrong = check_blocks(client, blocks, count, outcomes); !wrong) return wrong;
    const Blocks<ConstSlice> sources(blocks, count);
    std::vector<PutBlock> puts;
    for (size_t i = 0; i < count; ++i) puts.push_back({key_of(blocks[i].key), sources.of(i)});
    std::vector<PutOutcome> done(count);
    if (Status failed = client->cluster->put(puts, replicas, within(timeout_ms), done); !failed)
      return failed;
    for (size_t i = 0; i < count; ++i) outcomes[i] = {number_of(done[i].code), done[i].copies, 0};
    return Status::ok();
  });
}

mooncache_code mooncache_get(mooncache_client* client, const mooncache_block* blocks, size_t count,
                             uint32_t timeout_ms, mooncache_outcome* outcomes) {
  return guarded([&] {
    if (Status wrong = check_blocks(client, blocks, count, outcomes); !wrong) return wrong;
    const Blocks<Slice> destinations(blocks, count);
    std::vector<GetBlock> gets;
    for (size_t i = 0; i < count; ++i) gets.push_back({key_of(blocks[i].key), destinations.of(i)});
    std::vector<GetOutcome> done(count);
    if (Status failed = client->cluster->get(gets, {}, within(timeout_ms), done); !failed) return failed;
    for (size_t i = 0; i < count; ++i) outcomes[i] = {number_of(done[i].code), 0, done[i].size};
    return Status::ok();
  });
}

mooncache_code mooncache_exists(mooncache_client* client, const uint8_t* keys, size_t count,
                                uint32_t timeout_ms, mooncache_code* codes) {
  return guarded([&] {
    if (Status wrong = check_keys(client, keys, count, codes); !wrong) return wrong;
    std::vector<Code> found(count);
    if (Status failed = client->cluster->exists(keys_of(keys, count), within(timeout_ms), found); !failed)
      return failed;
    std::transform(found.begin(), found.end(), codes, number_of);
    return Status::ok();
  });
}

mooncache_code mooncache_remove(mooncache_client* client, const uint8_t* keys, size_t count,
                                uint32_t timeout_ms, mooncache_code* codes) {
  return guarded([&] {
    if (Status wrong = check_keys(client, keys, count, codes); !wrong) return wrong;
    std::vector<Code> removed(count);
    if (Status failed = client->cluster->remove(keys_of(keys, count), within(timeout_ms), removed); !failed)
      return failed;
    std::transform(removed.begin(), removed.end(), codes, number_of);
    return Status::ok();
  });
}

mooncache_code mooncache_register_buffer(mooncache_client* client, void* data, size_t bytes) {
  return guarded([&] {
    if (client == nullptr) return missing("client");
    return client->cluster->register_buffer({static_cast<std::byte*>(data), bytes});
  });
}

mooncache_code mooncache_unregister_buffer(mooncache_client* client, void* data, size_t bytes) {
  return guarded([&] {
    if (client == nullptr) return missing("client");
    return client->cluster->unregister_buffer({static_cast<std::byte*>(data), bytes});
  });
}

mooncache_code mooncache_set_token(mooncache_client* client, const char* token) {
  return guarded([&] {
    if (client == nullptr) return missing("client");
    if (token == nullptr) return missing("token");
    return client->cluster->set_token(token);
  });
}

mooncache_code mooncache_cluster_state(const mooncache_client* client, mooncache_state* state) {
  return guarded([&] {
    if (client == nullptr) return missing("client");
    if (state == nullptr) return missing("state");
    if (state->struct_bytes != sizeof *state)
      return Status{Code::kVersionSkew, "the state is of another version of c_api.h than this library"};
    const ClusterState now = client->cluster->state();
    *state = {sizeof *state, now.term, now.epoch, now.nodes, now.confirmed_ms_ago};
    return Status::ok();
  });
}

mooncache_code mooncache_key_of_name(const char* name, uint8_t key[MOONCACHE_KEY_BYTES]) {
  return guarded([&] {
    if (name == nullptr) return missing("name");
    if (key == nullptr) return missing("key");
    std::memcpy(key, key_of_name(name).bytes.data(), kKeyBytes);
    return Status::ok();
  });
}

mooncache_code mooncache_passport_root(const char* const* names, const char* const* values, size_t count,
                                       uint8_t root[MOONCACHE_KEY_BYTES]) {
  return guarded([&] {
    if (lacks(names, count) || lacks(values, count)) return missing("names and values");
    if (root == nullptr) return missing("root");
    std::vector<PassportField> fields;
    for (size_t i = 0; i < count; ++i) fields.push_back({text_of(names[i]), text_of(values[i])});
    const auto digest = passport_root(fields);
    if (!digest) return digest.status();
    std::memcpy(root, digest->data(), digest->size());
    return Status::ok();
  });
}

mooncache_code mooncache_chain_keys(const uint8_t root[MOONCACHE_KEY_BYTES], const uint32_t* tokens,
                                    size_t token_count, uint32_t block_tokens, const uint8_t* parent,
                                    uint8_t* keys) {
  return guarded([&] {
    if (root == nullptr) return missing("root");
    if (lacks(tokens, token_count)) return missing("tokens");
    Digest digest;
    std::memcpy(digest.data(), root, digest.size());
    const auto chain = chain_keys(digest, {tokens, token_count}, block_tokens,
                                  parent == nullptr ? Key{} : mooncache::key_of(parent));
    if (!chain) return chain.status();
    if (lacks(keys, chain->size())) return missing("keys");
    if (!chain->empty()) std::memcpy(keys, chain->data(), chain->size() * kKeyBytes);
    return Status::ok();
  });
}
