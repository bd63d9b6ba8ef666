// The pool from C: puts a block of two pieces, gets it back, removes it.
//
//   c_put_get SEED TOKEN_FILE
//
// SEED is the data port of any store node, "host:port" or "unix:/path"; the client finds the other nodes by
// itself.
#include <stdio.h>
#include <string.h>

#include "mooncache/c_api.h"

#define HEAD_BYTES 1000
#define BLOCK_BYTES 4096
#define TIMEOUT_MS 5000

static int fail(const char* what, mooncache_code code) {
  fprintf(stderr, "%s: %s %s\n", what, mooncache_code_name(code), mooncache_message());
  return 1;
}

// 0: the block went there and back.
static int put_and_get(mooncache_client* client) {
  static char head[HEAD_BYTES], tail[BLOCK_BYTES - HEAD_BYTES], copy[BLOCK_BYTES];
  memset(head, 'a', sizeof head);
  memset(tail, 'b', sizeof tail);
  mooncache_block block;
  mooncache_code code = mooncache_key_of_name("put_get in C", block.key);
  if (code != 0) return fail("key", code);

  const mooncache_slice pieces[] = {{head, sizeof head}, {tail, sizeof tail}};
  block.slices = pieces;
  block.slice_count = 2;
  mooncache_outcome outcome;
  code = mooncache_put(client, &block, 1, 1, TIMEOUT_MS, &outcome);
  if (code != 0) return fail("put", code);
  if (outcome.code != 0 && strcmp(mooncache_code_name(outcome.code), "ALREADY_EXISTS") != 0)
    return fail("put", outcome.code);

  const mooncache_slice destination = {copy, sizeof copy};
  block.slices = &destination;
  block.slice_count = 1;
  code = mooncache_get(client, &block, 1, TIMEOUT_MS, &outcome);
  if (code != 0) return fail("get", code);
  if (outcome.code != 0) return fail("get", outcome.code);
  const int equal = memcmp(copy, head, sizeof head) == 0 && memcmp(copy + HEAD_BYTES, tail, sizeof tail) == 0;
  printf("put and got %llu bytes: %s\n", (unsigned long long)outcome.bytes, equal ? "equal" : "DIFFERENT");

  mooncache_code removed;
  code = mooncache_remove(client, block.key, 1, TIMEOUT_MS, &removed);
  if (code != 0) return fail("remove", code);
  code = mooncache_exists(client, block.key, 1, TIMEOUT_MS, &removed);
  if (code != 0) return fail("exists", code);
  printf("after its removal: %s\n", mooncache_code_name(removed));
  return equal ? 0 : 1;
}

int main(int argc, char** argv) {
  char token[256] = "";
  if (argc != 3) {
    fprintf(stderr, "usage: %s SEED TOKEN_FILE\n", argv[0]);
    return 2;
  }
  FILE* file = fopen(argv[2], "r");
  if (file == NULL || fgets(token, sizeof token, file) == NULL) {
    fprintf(stderr, "%s cannot be read\n", argv[2]);
    return 1;
  }
  fclose(file);

  const char* seeds[] = {argv[1]};
  mooncache_options options;
  memset(&options, 0, sizeof options);
  options.struct_bytes = sizeof options;
  options.seeds = seeds;
  options.seed_count = 1;
  options.token = token;
  mooncache_client* client = NULL;
  const mooncache_code code = mooncache_connect(&options, &client);
  if (code != 0) return fail("connect", code);
  const int result = put_and_get(client);
  mooncache_close(client);
  return result;
}
