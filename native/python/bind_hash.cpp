// Python: CRC-32C, BLAKE3, passports and key chains.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "buffer_view.h"
#include "hash/memory_benchmark.h"
#include "module.h"
#include "mooncache/blake3.h"
#include "mooncache/crc32c.h"
#include "mooncache/passport.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncache::python {
namespace {

// Below this, giving the GIL up and taking it again costs more than the work.
constexpr size_t kReleaseFromBytes = 16 << 10;

template <typename Work>
auto without_gil(size_t bytes, Work work) {
  std::optional<nb::gil_scoped_release> release;
  if (bytes >= kReleaseFromBytes) release.emplace();
  return work();
}

uint32_t py_crc32c(nb::handle data, uint32_t seed) {
  const BufferView view(data);
  return without_gil(view.size(), [&] { return crc32c(view.bytes(), seed); });
}

std::span<const std::byte, 32> digest_span(const BufferView& view, const char* sentence) {
  if (view.size() != 32) throw nb::value_error(sentence);
  return view.bytes().first<32>();
}

nb::bytes py_blake3(nb::handle data) {
  const BufferView view(data);
  return to_bytes(without_gil(view.size(), [&] { return blake3(view.bytes()); }));
}

nb::bytes py_blake3_keyed(nb::handle key, nb::handle data) {
  const BufferView key_view(key);
  const auto key_bytes = digest_span(key_view, "key must be 32 bytes: pass a digest or a 32-byte secret");
  const BufferView view(data);
  return to_bytes(without_gil(view.size(), [&] { return blake3_keyed(key_bytes, view.bytes()); }));
}

nb::bytes py_blake3_derive_key(std::string_view context, nb::handle data) {
  const BufferView view(data);
  return to_bytes(without_gil(view.size(), [&] { return blake3_derive_key(context, view.bytes()); }));
}

// One integer type of the caller's token array; false when a token does not fit 32 bits.
template <typename T>
bool widen(std::span<const std::byte> bytes, std::vector<uint32_t>& tokens) {
  tokens.resize(bytes.size() / sizeof(T));
  bool ok = true;
  for (size_t i = 0; i < tokens.size(); ++i) {
    T value;
    std::memcpy(&value, bytes.data() + i * sizeof(T), sizeof value);
    ok &= std::in_range<uint32_t>(value);
    tokens[i] = static_cast<uint32_t>(value);
  }
  return ok;
}

using Widen = bool (*)(std::span<const std::byte>, std::vector<uint32_t>&);

// Reads the struct-module format; refuses what is not a native 32- or 64-bit integer.
Widen widener(const BufferView& view) {
  std::string format = view.format();
  if (format.size() == 2 && (format[0] == '@' || format[0] == '=' || format[0] == '<')) format.erase(0, 1);
  const bool is_signed = format == "i" || format == "l" || format == "q";
  const bool is_unsigned = format == "I" || format == "L" || format == "Q";
  if (is_signed && view.item_size() == 4) return widen<int32_t>;
  if (is_signed && view.item_size() == 8) return widen<int64_t>;
  if (is_unsigned && view.item_size() == 4) return widen<uint32_t>;
  if (is_unsigned && view.item_size() == 8) return widen<uint64_t>;
  throw nb::value_error(
      "tokens must be a contiguous array of 32- or 64-bit integers: pass array('I', tokens) or a numpy "
      "array");
}

nb::bytes py_chain_keys(nb::handle root, nb::handle tokens, uint32_t block_tokens, nb::object parent) {
  const BufferView root_view(root);
  Digest root_digest;
  const auto root_bytes = digest_span(root_view, "root must be 32 bytes: pass what passport_root returned");
  std::copy(root_bytes.begin(), root_bytes.end(), root_digest.begin());
  Key parent_key;
  if (!parent.is_none()) {
    const BufferView parent_view(parent);
    const auto bytes =
        digest_span(parent_view, "parent must be 32 bytes: pass the last key of the chain or None");
    std::copy(bytes.begin(), bytes.end(), parent_key.bytes.begin());
  }
  const BufferView view(tokens, PyBUF_CONTIG_RO | PyBUF_FORMAT);
  const Widen widen_tokens = widener(view);
  bool in_range = true;
  const auto keys = without_gil(view.size(), [&] {
    std::vector<uint32_t> words;
    in_range = widen_tokens(view.bytes(), words);
    return chain_keys(root_digest, words, block_tokens, parent_key);
  });
  if (!in_range) throw nb::value_error("a token id must be from 0 to 4294967295");
  if (!keys) throw nb::value_error(keys.status().message.c_str());
  return to_bytes(std::as_bytes(std::span(*keys)));
}

nb::bytes py_passport_root(const std::vector<std::pair<std::string, std::string>>& fields) {
  std::vector<PassportField> list;
  for (const auto& [name, value] : fields) list.push_back({name, value});
  const auto root = passport_root(list);
  if (!root) throw nb::value_error(root.status().message.c_str());
  return to_bytes(*root);
}

nb::typed<nb::dict, nb::str, double> py_memory_benchmark(uint64_t block_bytes, uint64_t count,
                                                         uint64_t repeats) {
  const auto result = [&] {
    const nb::gil_scoped_release release;
    return memory_benchmark(block_bytes, count, repeats);
  }();
  if (!result) throw nb::value_error(result.status().message.c_str());
  nb::typed<nb::dict, nb::str, double> out;
  out["memcpy_bytes_per_s"] = result->memcpy_bytes_per_s;
  out["crc32c_bytes_per_s"] = result->crc32c_bytes_per_s;
  out["memcpy_then_crc32c_bytes_per_s"] = result->memcpy_then_crc32c_bytes_per_s;
  out["copy_crc32c_bytes_per_s"] = result->copy_crc32c_bytes_per_s;
  return out;
}

}  // namespace

void bind_hash(nb::module_& m) {
  m.def("crc32c", &py_crc32c, "data"_a, "seed"_a = 0,
        "CRC-32C of a bytes-like object, continuing from seed (the CRC of what came before).");
  m.def("crc32c_combine", &crc32c_combine, "crc_a"_a, "crc_b"_a, "length_b"_a,
        "CRC of A followed by B from both CRCs and the length of B in bytes.");
  m.def(
      "crc32c_implementation", [] { return std::string(crc32c_implementation()); },
      "The version this processor runs: portable, sse42, avx512 or armv8.");
  m.def("blake3", &py_blake3, "data"_a, "BLAKE3 digest (32 bytes) of a bytes-like object.");
  m.def("blake3_keyed", &py_blake3_keyed, "key"_a, "data"_a,
        "Keyed BLAKE3 digest (32 bytes). ValueError unless key has 32 bytes.");
  m.def("blake3_derive_key", &py_blake3_derive_key, "context"_a, "data"_a,
        "BLAKE3 key derivation (32 bytes): context is a constant of the program, data the key material.");
  m.def("chain_keys", &py_chain_keys, "root"_a, "tokens"_a, "block_tokens"_a, "parent"_a = nb::none(),
        "Keys of the complete blocks of tokens, 32 bytes each, concatenated. tokens is a contiguous array of "
        "32- "
        "or 64-bit integers; parent is the last key of a chain to continue. ValueError for anything else.");
  m.def("passport_root", &py_passport_root, "fields"_a,
        "Digest (32 bytes) of the canonical encoding of (name, value) fields; their order does not matter. "
        "ValueError for no field, an empty or repeated name, or text beyond the limits.");
  m.def(
      "key_of_name", [](std::string_view name) { return to_bytes(key_of_name(name).bytes); }, "name"_a,
      "Block key (32 bytes) of a user-chosen name.");
  m.def(
      "tenant_id_of", [](std::string_view name) { return tenant_id_of(name); }, "name"_a,
      "Number of a tenant (64 bits) from its name.");
  m.def("memory_benchmark", &py_memory_benchmark, "block_bytes"_a, "count"_a, "repeats"_a,
        "Median bytes per second of memcpy, crc32c, memcpy then crc32c, and copy_crc32c over count distinct "
        "buffers of block_bytes. ValueError for zeros or more than 16 GiB.");
}

}  // namespace mooncache::python
