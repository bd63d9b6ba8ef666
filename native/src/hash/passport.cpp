#include "mooncache/passport.h"

#include <algorithm>

#include "mooncache/bytes.h"

namespace mooncache {
namespace {

constexpr std::string_view kRootContext = "mooncache passport v1";
constexpr std::string_view kNameContext = "mooncache user key v1";

}  // namespace

Result<std::vector<std::byte>> passport_encoding(std::span<const PassportField> fields) {
  if (fields.empty()) return {Code::kInvalidArgument, "a passport needs at least one field"};
  if (fields.size() > kPassportFieldsMax) return {Code::kTooLarge, "a passport has at most 256 fields"};
  std::vector<const PassportField*> sorted;
  for (const PassportField& field : fields) {
    if (field.name.empty()) return {Code::kInvalidArgument, "a passport field needs a name"};
    if (field.name.size() > kPassportTextBytesMax || field.value.size() > kPassportTextBytesMax) {
      return {Code::kTooLarge, "a name or value of a passport has at most 65,536 bytes"};
    }
    sorted.push_back(&field);
  }
  std::sort(sorted.begin(), sorted.end(), [](const auto* a, const auto* b) { return a->name < b->name; });
  Writer writer;
  writer.u32(kPassportEncoding);
  writer.u32(static_cast<uint32_t>(sorted.size()));
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (i != 0 && sorted[i]->name == sorted[i - 1]->name) {
      return {Code::kInvalidArgument, "passport field given twice: " + sorted[i]->name};
    }
    for (const std::string* text : {&sorted[i]->name, &sorted[i]->value}) {
      writer.u32(static_cast<uint32_t>(text->size()));
      writer.raw(std::as_bytes(std::span(*text)));
    }
  }
  return writer.take();
}

Result<Digest> passport_root(std::span<const PassportField> fields) {
  const auto encoding = passport_encoding(fields);
  if (!encoding) return encoding.status();
  return blake3_derive_key(kRootContext, *encoding);
}

Result<std::vector<Key>> chain_keys(const Digest& root, std::span<const uint32_t> tokens,
                                    uint32_t block_tokens, const Key& parent) {
  if (block_tokens == 0 || block_tokens > kBlockTokensMax) {
    return {Code::kInvalidArgument, "block_tokens must be from 1 to 1,048,576"};
  }
  std::vector<Key> keys(tokens.size() / block_tokens);
  std::vector<std::byte> input(kKeyBytes + size_t{block_tokens} * sizeof(uint32_t));
  Key previous = parent;
  for (size_t i = 0; i < keys.size(); ++i) {
    std::copy(previous.bytes.begin(), previous.bytes.end(), input.begin());
    const auto block = std::as_bytes(tokens.subspan(i * block_tokens, block_tokens));
    std::copy(block.begin(), block.end(), input.begin() + kKeyBytes);
    previous = Key{blake3_keyed(root, input)};
    keys[i] = previous;
  }
  return keys;
}

Key key_of_name(std::string_view name) {
  return Key{blake3_derive_key(kNameContext, std::as_bytes(std::span(name)))};
}

TenantId tenant_id_of(std::string_view name) {
  return Key{blake3(std::as_bytes(std::span(name)))}.word(0);
}

}  // namespace mooncache
