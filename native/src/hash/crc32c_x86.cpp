// CRC-32C on x86-64. Two versions, chosen at run time, so one binary serves every machine:
//  - "sse42": the CRC32 instruction has a latency of three cycles and one can start every cycle, so
//    three independent runs are computed side by side and joined by a carry-less multiplication;
//  - "avx512": four 512-bit accumulators are folded over the data (carry-less multiplication by
//    x^2048 modulo the polynomial), and the last 128 bits are reduced with the CRC32 instruction.
#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "hash/crc32c_impl.h"

#define MOONCACHE_SSE42 __attribute__((target("sse4.2,pclmul")))
#define MOONCACHE_AVX512 __attribute__((target("sse4.2,pclmul,avx512f,avx512vl,avx512dq,vpclmulqdq")))

namespace mooncache::hash {
namespace {

uint64_t load64(const std::byte* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

MOONCACHE_SSE42 uint32_t serial(uint32_t state, const std::byte* bytes, size_t size) {
  uint64_t wide = state;
  for (; size >= 8; bytes += 8, size -= 8) wide = _mm_crc32_u64(wide, load64(bytes));
  state = static_cast<uint32_t>(wide);
  for (; size != 0; ++bytes, --size) state = _mm_crc32_u8(state, static_cast<uint8_t>(*bytes));
  return state;
}

// Advances `state` over zero bytes; `power` is x^(8 * bytes - 33): the multiplication of reflected
// operands contributes one factor x and the CRC32 instruction x^32.
MOONCACHE_SSE42 uint32_t shift(uint64_t state, uint32_t power) {
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(state)),
                                               _mm_cvtsi64_si128(static_cast<long long>(power)), 0x00);
  return static_cast<uint32_t>(_mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(product))));
}

// Three runs of kRun bytes side by side.
template <size_t kRun>
MOONCACHE_SSE42 uint32_t three_runs(uint32_t state, const std::byte* bytes) {
  static_assert(kRun % 8 == 0);
  constexpr uint32_t kPowerOne = power_mod(8 * kRun - 33);
  constexpr uint32_t kPowerTwo = power_mod(16 * kRun - 33);
  uint64_t a = state;
  uint64_t b = 0;
  uint64_t c = 0;
  for (size_t at = 0; at < kRun; at += 8) {
    a = _mm_crc32_u64(a, load64(bytes + at));
    b = _mm_crc32_u64(b, load64(bytes + kRun + at));
    c = _mm_crc32_u64(c, load64(bytes + 2 * kRun + at));
  }
  return shift(a, kPowerTwo) ^ shift(b, kPowerOne) ^ static_cast<uint32_t>(c);
}

constexpr size_t kLongRun = 4096;
constexpr size_t kShortRun = 256;

MOONCACHE_SSE42 uint32_t sse42_raw(uint32_t state, const std::byte* bytes, size_t size) {
  for (; size >= 3 * kLongRun; bytes += 3 * kLongRun, size -= 3 * kLongRun)
    state = three_runs<kLongRun>(state, bytes);
  for (; size >= 3 * kShortRun; bytes += 3 * kShortRun, size -= 3 * kShortRun) {
    state = three_runs<kShortRun>(state, bytes);
  }
  return serial(state, bytes, size);
}

// Bytes until `pointer` is a multiple of 64, at most `size`.
size_t bytes_to_line(const std::byte* pointer, size_t size) {
  const size_t gap = static_cast<size_t>(-reinterpret_cast<uintptr_t>(pointer)) & 63;
  return gap < size ? gap : size;
}

// Copies whole 64-byte lines to an aligned destination round the caches.
void stream_lines(std::byte* destination, const std::byte* source, size_t size) {
  for (size_t at = 0; at < size; at += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(destination + at),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + at)));
  }
}

MOONCACHE_SSE42 uint32_t sse42_copy_raw(uint32_t state, std::byte* destination, const std::byte* source,
                                        size_t size, bool stream) {
  if (stream) {
    const size_t head = bytes_to_line(destination, size);
    std::memcpy(destination, source, head);
    state = serial(state, destination, head);
    destination += head;
    source += head;
    size -= head;
  }
  // The chunk is read from memory once; the checksum then finds the copy in the first-level cache.
  constexpr size_t kChunk = 3 * kLongRun;
  static_assert(kChunk % 64 == 0);
  alignas(64) std::byte cached[kChunk];  // what is streamed to its destination is in no cache
  for (; size >= kChunk; destination += kChunk, source += kChunk, size -= kChunk) {
    std::byte* const copy = stream ? cached : destination;
    std::memcpy(copy, source, kChunk);
    state = three_runs<kLongRun>(state, copy);
    if (stream) stream_lines(destination, copy, kChunk);
  }
  if (size != 0) std::memcpy(destination, source, size);
  state = sse42_raw(state, destination, size);
  if (stream) _mm_sfence();
  return state;
}

// Multiplier that moves a reflected 64-bit half by `bits`: rev(x^bits mod P) in the upper 32 bits.
constexpr long long fold_constant(uint64_t bits) {
  return static_cast<long long>(static_cast<uint64_t>(power_mod(bits)) << 32);
}

// Folds `accumulator` forward over kBits bits. The low half of a 128-bit lane holds the earlier
// bytes, that is the higher powers; the product of reflected halves carries one factor x already.
template <uint64_t kBits>
MOONCACHE_AVX512 inline __m512i fold(__m512i accumulator, __m512i data) {
  const __m512i constants = _mm512_set4_epi64(fold_constant(kBits - 1), fold_constant(kBits + 63),
                                              fold_constant(kBits - 1), fold_constant(kBits + 63));
  const __m512i low = _mm512_clmulepi64_epi128(accumulator, constants, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(accumulator, constants, 0x11);
  return _mm512_ternarylogic_epi64(low, high, data, 0x96);
}

template <uint64_t kBits>
MOONCACHE_AVX512 inline __m128i fold128(__m128i accumulator, __m128i data) {
  const __m128i constants = _mm_set_epi64x(fold_constant(kBits - 1), fold_constant(kBits + 63));
  const __m128i low = _mm_clmulepi64_si128(accumulator, constants, 0x00);
  const __m128i high = _mm_clmulepi64_si128(accumulator, constants, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), data);
}

enum class Store { kNone, kCached, kStream };

template <Store kStore>
MOONCACHE_AVX512 inline __m512i take_line(std::byte* destination, const std::byte* source, size_t at) {
  const __m512i line = _mm512_loadu_si512(source + at);
  if constexpr (kStore == Store::kCached) _mm512_storeu_si512(destination + at, line);
  if constexpr (kStore == Store::kStream) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(destination + at), line);
  }
  return line;
}

// `size` is a multiple of 256 and not 0.
template <Store kStore>
MOONCACHE_AVX512 uint32_t fold_lines(uint32_t state, std::byte* destination, const std::byte* source,
                                     size_t size) {
  __m512i a = take_line<kStore>(destination, source, 0);
  __m512i b = take_line<kStore>(destination, source, 64);
  __m512i c = take_line<kStore>(destination, source, 128);
  __m512i d = take_line<kStore>(destination, source, 192);
  a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));
  for (size_t at = 256; at < size; at += 256) {
    a = fold<2048>(a, take_line<kStore>(destination, source, at));
    b = fold<2048>(b, take_line<kStore>(destination, source, at + 64));
    c = fold<2048>(c, take_line<kStore>(destination, source, at + 128));
    d = fold<2048>(d, take_line<kStore>(destination, source, at + 192));
  }
  b = fold<512>(a, b);
  c = fold<512>(b, c);
  d = fold<512>(c, d);
  __m128i rest = _mm512_extracti64x2_epi64(d, 0);
  rest = fold128<128>(rest, _mm512_extracti64x2_epi64(d, 1));
  rest = fold128<128>(rest, _mm512_extracti64x2_epi64(d, 2));
  rest = fold128<128>(rest, _mm512_extracti64x2_epi64(d, 3));
  const uint64_t first = _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(rest)));
  return static_cast<uint32_t>(_mm_crc32_u64(first, static_cast<uint64_t>(_mm_extract_epi64(rest, 1))));
}

constexpr size_t kFoldFrom = 512;  // below this the set-up costs more than it saves

MOONCACHE_AVX512 uint32_t avx512_raw(uint32_t state, const std::byte* bytes, size_t size) {
  if (size < kFoldFrom) return serial(state, bytes, size);
  const size_t body = size & ~size_t{255};
  state = fold_lines<Store::kNone>(state, nullptr, bytes, body);
  return serial(state, bytes + body, size - body);
}

MOONCACHE_AVX512 uint32_t avx512_copy_raw(uint32_t state, std::byte* destination, const std::byte* source,
                                          size_t size, bool stream) {
  if (stream) {
    const size_t head = bytes_to_line(destination, size);
    std::memcpy(destination, source, head);
    state = serial(state, destination, head);
    destination += head;
    source += head;
    size -= head;
  }
  const size_t body = size < kFoldFrom ? 0 : size & ~size_t{255};
  if (body != 0) {
    state = stream ? fold_lines<Store::kStream>(state, destination, source, body)
                   : fold_lines<Store::kCached>(state, destination, source, body);
  }
  if (size != body) std::memcpy(destination + body, source + body, size - body);
  state = serial(state, destination + body, size - body);
  if (stream) _mm_sfence();
  return state;
}

}  // namespace

size_t detect_accelerated_crc32c(Crc32cImplementation* list) {
  size_t count = 0;
  if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul")) return count;
  list[count++] = {"sse42", sse42_raw, sse42_copy_raw};
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("vpclmulqdq")) {
    list[count++] = {"avx512", avx512_raw, avx512_copy_raw};
  }
  return count;
}

}  // namespace mooncache::hash

#endif  // __x86_64__
