// The cluster client for C, and for every language that calls C: libmooncache.so, CMake target mooncache::c.
//
// Every call answers a code of docs/reference-errors.md (0 is OK) and never throws. Batches have one outcome
// for each item; the code of the call itself is not 0 only when the call as a whole made no sense or could
// not be made. After such a code, mooncache_message() is the sentence that says why. All calls are
// thread-safe.
#ifndef MOONCACHE_C_API_H
#define MOONCACHE_C_API_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MOONCACHE_API __attribute__((visibility("default")))
#else
#define MOONCACHE_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Grows when a call or a structure changes its meaning. Structures that may grow begin with their size.
#define MOONCACHE_ABI 1
#define MOONCACHE_KEY_BYTES 32

typedef int32_t mooncache_code;
typedef struct mooncache_client mooncache_client;

typedef struct mooncache_options {
  size_t struct_bytes;          // sizeof(mooncache_options)
  const char* const* seeds;     // data ports of any nodes: "host:port" or "unix:/path"
  size_t seed_count;            // 1 to 64
  const char* token;            // one line: "mcc1.…", "mct1.<tenant>.…" or "mcs1.<tenant>.<end>.…"
  const char* client_name;      // null: "mooncache-c"
  uint32_t connect_timeout_ms;  // 0: 5000
  uint32_t refresh_ms;          // between two questions for the cluster map; 0: 1000
  uint32_t no_shared_memory;    // not 0: blocks of nodes on this host go over sockets, too
  uint32_t no_rdma;             // not 0: RDMA is not tried
  uint32_t tls;                 // not 0: the nodes' data ports speak TLS
  const char* tls_ca;           // file; null: the system's authorities
  const char* tls_cert;         // file of the client's certificate, and of its key; null: none
  const char* tls_key;
  const char* tls_server_name;  // null: the node's address
} mooncache_options;

typedef struct mooncache_slice {
  void* data;  // a put only reads it
  size_t bytes;
} mooncache_slice;

typedef struct mooncache_block {
  uint8_t key[MOONCACHE_KEY_BYTES];
  const mooncache_slice* slices;  // the block is their concatenation
  size_t slice_count;
} mooncache_block;

typedef struct mooncache_outcome {
  mooncache_code code;
  uint32_t copies;  // of a put: that exist now
  uint64_t bytes;   // of a get: in the slices; with BUFFER_TOO_SMALL (101): of the block
} mooncache_outcome;

typedef struct mooncache_state {
  size_t struct_bytes;  // sizeof(mooncache_state)
  uint64_t term, epoch;
  uint64_t nodes;
  uint64_t confirmed_ms_ago;
} mooncache_state;

MOONCACHE_API uint32_t mooncache_abi(void);
// "NOT_FOUND" and the like; "UNKNOWN" for a number that is no code.
MOONCACHE_API const char* mooncache_code_name(mooncache_code code);
// Why the last call of this thread failed; "" when it did not. Good until the thread's next call.
MOONCACHE_API const char* mooncache_message(void);

// Waits until a seed has answered. *client is set only if the code is 0; it ends with mooncache_close().
MOONCACHE_API mooncache_code mooncache_connect(const mooncache_options* options, mooncache_client** client);
// No other call of this client may be under way. Null does nothing.
MOONCACHE_API void mooncache_close(mooncache_client* client);

// An outcome's code is OK, ALREADY_EXISTS (201: the same block is there), FEWER_REPLICAS (208), or the
// failure.
MOONCACHE_API mooncache_code mooncache_put(mooncache_client* client, const mooncache_block* blocks,
                                           size_t count, uint32_t replicas, uint32_t timeout_ms,
                                           mooncache_outcome* outcomes);
// The slices have to hold the whole block. OK: its bytes were compared with their checksum in this process.
MOONCACHE_API mooncache_code mooncache_get(mooncache_client* client, const mooncache_block* blocks,
                                           size_t count, uint32_t timeout_ms, mooncache_outcome* outcomes);
// `keys` are MOONCACHE_KEY_BYTES each. OK, NOT_FOUND (200), or NODE_UNAVAILABLE (400): a node that may have
// it did not answer.
MOONCACHE_API mooncache_code mooncache_exists(mooncache_client* client, const uint8_t* keys, size_t count,
                                              uint32_t timeout_ms, mooncache_code* codes);
MOONCACHE_API mooncache_code mooncache_remove(mooncache_client* client, const uint8_t* keys, size_t count,
                                              uint32_t timeout_ms, mooncache_code* codes);

// From now on, until it is unregistered, devices may use this memory in place; it has to stay mapped so long.
MOONCACHE_API mooncache_code mooncache_register_buffer(mooncache_client* client, void* data, size_t bytes);
MOONCACHE_API mooncache_code mooncache_unregister_buffer(mooncache_client* client, void* data, size_t bytes);

// The token that replaces the present one, of the same tenant.
MOONCACHE_API mooncache_code mooncache_set_token(mooncache_client* client, const char* token);
MOONCACHE_API mooncache_code mooncache_cluster_state(const mooncache_client* client, mooncache_state* state);

// The key of a name that the program chose.
MOONCACHE_API mooncache_code mooncache_key_of_name(const char* name, uint8_t key[MOONCACHE_KEY_BYTES]);
// The root of a chain of block keys: a digest of all that decides what the bytes of a block mean, as names
// and values.
MOONCACHE_API mooncache_code mooncache_passport_root(const char* const* names, const char* const* values,
                                                     size_t count, uint8_t root[MOONCACHE_KEY_BYTES]);
// Keys of the complete blocks of a prompt, token_count / block_tokens of them. `parent`: the last key of a
// chain that goes on, or null.
MOONCACHE_API mooncache_code mooncache_chain_keys(const uint8_t root[MOONCACHE_KEY_BYTES],
                                                  const uint32_t* tokens, size_t token_count,
                                                  uint32_t block_tokens, const uint8_t* parent,
                                                  uint8_t* keys);

#ifdef __cplusplus
}
#endif

#endif
