// A tutorial: put a block into a running store node and get it back.
//
//   example_put_get HOST PORT TOKEN_FILE
//
// The token file holds one line: the cluster's token "mcc1.<64 hex digits>", or a tenant's "mct1.<tenant>.<64
// hex digits>". `mooncache up` prints all three.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "mooncache/blake3.h"
#include "mooncache/client.h"

using namespace mooncache;

namespace {

int fail(const char* what, Code code, const std::string& message = {}) {
  std::fprintf(stderr, "%s: %s %s\n", what, std::string(code_name(code)).c_str(), message.c_str());
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s HOST PORT TOKEN_FILE\n", argv[0]);
    return 2;
  }

  // Step 1: the token. What a client proves when it connects is a key that follows from the token; neither
  // goes over the network.
  std::ifstream file(argv[3]);
  std::string token;
  std::getline(file, token);
  const auto credentials = credentials_from_token(token);
  if (!credentials) return fail(argv[3], credentials.code(), credentials.status().message);
  ClientConfig config;
  config.credentials = *credentials;

  // Step 2: a client, and the map that tells it which nodes there are. A program inside a cluster gets the
  // map from the master; here it has one line. An empty node_id means: any node that answers at this address.
  auto client = Client::create(config);
  if (!client) return fail("client", client.code(), client.status().message);
  NodeInfo node;
  node.tcp_host = argv[1];
  node.tcp_port = static_cast<uint16_t>(std::strtoul(argv[2], nullptr, 10));
  (*client)->set_map(1, {node});

  // Step 3: a key. Engines derive keys from a model's passport and tokens (passport.h); any 32 bytes will do.
  const std::string name = "put_get example";
  Key key;
  const Digest digest =
      blake3_derive_key("mooncache user key v1", std::as_bytes(std::span(name.data(), name.size())));
  std::copy(digest.begin(), digest.end(), key.bytes.begin());

  // Step 4: put. A block may come from many pieces (one per layer, say); no piece is copied on the way.
  std::vector<std::byte> head(1000, std::byte{'a'});
  std::vector<std::byte> tail(3096, std::byte{'b'});
  const ConstSlice pieces[] = {{head.data(), head.size()}, {tail.data(), tail.size()}};
  const PutBlock source{key, pieces};
  CallOptions options;
  options.deadline = Deadline::after_ms(5000);  // no call waits longer than its deadline
  PutOutcome put;
  Status status = (*client)->put(std::span(&source, 1), 1, options, std::span(&put, 1));
  if (!status) return fail("put", status.code, status.message);
  // ALREADY_EXISTS is good news: blocks never change, so the one that is there has the same bytes.
  if (put.code != Code::kOk && put.code != Code::kAlreadyExists) return fail("put", put.code);

  // Step 5: get, into any pieces. OK means that the bytes were compared with their checksum in this process.
  std::vector<std::byte> copy(4096);
  const Slice destination{copy.data(), copy.size()};
  const GetBlock wanted{key, std::span(&destination, 1)};
  GetOutcome got;
  options.deadline = Deadline::after_ms(5000);
  status = (*client)->get(std::span(&wanted, 1), {}, options, std::span(&got, 1));
  if (!status) return fail("get", status.code, status.message);
  if (got.code != Code::kOk) return fail("get", got.code);
  const bool equal = std::equal(head.begin(), head.end(), copy.begin()) &&
                     std::equal(tail.begin(), tail.end(), copy.begin() + 1000);
  std::printf("put and got %llu bytes: %s\n", static_cast<unsigned long long>(got.size),
              equal ? "equal" : "DIFFERENT");

  // Step 6: a block stays until the node needs its space; this one is no longer needed.
  Code removed = Code::kOk;
  (void)(*client)->remove(std::span(&key, 1), options, std::span(&removed, 1));
  return equal ? 0 : 1;
}
