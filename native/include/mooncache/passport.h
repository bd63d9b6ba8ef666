// The identity of KV. A passport is a set of named fields that describe everything that decides
// what the bytes of a block mean; its digest is the root of every block key. Two engines whose
// fields differ anywhere cannot form the same key, so they can never read each other's blocks.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "mooncache/blake3.h"
#include "mooncache/status.h"
#include "mooncache/types.h"

namespace mooncache {

inline constexpr uint32_t kPassportEncoding = 1;
inline constexpr size_t kPassportFieldsMax = 256;
inline constexpr size_t kPassportTextBytesMax = 1 << 16;  // of one name or one value
inline constexpr uint32_t kBlockTokensMax = 1 << 20;

struct PassportField {
  std::string name;
  std::string value;
};

// The canonical encoding: u32 version, u32 count, then the fields sorted by name, each as u32 length
// and bytes of the name, u32 length and bytes of the value. Order of the argument does not matter.
// INVALID_ARGUMENT for an empty or repeated name or no field at all, TOO_LARGE beyond the limits.
Result<std::vector<std::byte>> passport_encoding(std::span<const PassportField> fields);

// Digest of the canonical encoding.
Result<Digest> passport_root(std::span<const PassportField> fields);

// Keys of the complete blocks of `tokens`: key i = keyed BLAKE3(root, key i-1 || tokens of block i,
// each u32 little endian). In front of the first block stands `parent`: the last key of a chain that
// is being continued, or 32 zero bytes. Tokens that do not fill a block get no key.
// INVALID_ARGUMENT when block_tokens is 0 or above kBlockTokensMax.
Result<std::vector<Key>> chain_keys(const Digest& root, std::span<const uint32_t> tokens,
                                    uint32_t block_tokens, const Key& parent = {});

// Key of a user-chosen name (UTF-8).
Key key_of_name(std::string_view name);

// Number of a tenant from its name.
TenantId tenant_id_of(std::string_view name);

}  // namespace mooncache
