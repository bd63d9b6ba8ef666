#include "gpu/gather.h"

#include <dlfcn.h>

#include <algorithm>

namespace mooncache::gpu {
namespace {

constexpr const char* kGatherSource =
#include "gather_text.inc"  // gather.cu as a string, made by CMake
    ;
constexpr uint32_t kPolynomial = 0x82f63b78;
constexpr uint64_t kSkippedBytes = 31 * 16;  // of the other lanes, between two elements of one

uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

uint32_t move_on(std::span<const uint32_t> powers, uint32_t state, uint64_t count) {
  for (size_t k = 0; count != 0; ++k, count >>= 1) {
    if (count & 1) state = multiply(powers[k], state);
  }
  return state;
}

std::array<uint32_t, kConstants> make_constants() {
  std::array<uint32_t, kConstants> all{};
  const std::span<uint32_t> powers = std::span(all).subspan(2048);
  powers[0] = 0x80000000u >> 8;
  for (size_t k = 1; k < powers.size(); ++k) powers[k] = multiply(powers[k - 1], powers[k - 1]);
  for (uint32_t byte = 0; byte < 256; ++byte) {
    // a byte is fed by adding it to a state of zero and moving that on by one byte, then by those behind it
    for (uint32_t row = 0; row < 4; ++row) {
      all[row * 256 + byte] = move_on(powers, byte, 4 - row);
      all[1024 + row * 256 + byte] = move_on(powers, byte << (8 * row), kSkippedBytes);
    }
  }
  return all;
}

struct Nvrtc {
  void* library = nullptr;
  int (*create)(void** program, const char* source, const char* name, int headers, const char* const* texts,
                const char* const* names) = nullptr;
  int (*compile)(void* program, int options, const char* const* list) = nullptr;
  int (*destroy)(void** program) = nullptr;
  int (*ptx_size)(void* program, size_t* size) = nullptr;
  int (*ptx)(void* program, char* text) = nullptr;
  int (*log_size)(void* program, size_t* size) = nullptr;
  int (*log)(void* program, char* text) = nullptr;
};

template <typename Function>
bool bind(void* library, const char* name, Function& slot) {
  slot = reinterpret_cast<Function>(dlsym(library, name));
  return slot != nullptr;
}

Status open(const std::string& path, Nvrtc& t) {
  const std::vector<std::string> names =
      path.empty() ? std::vector<std::string>{"libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"}
                   : std::vector<std::string>{path};
  for (const std::string& name : names) {
    if (t.library == nullptr) t.library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  if (t.library == nullptr) {
    return {Code::kTransportUnavailable,
            "libnvrtc cannot be opened (a part of CUDA; as a wheel nvidia-cuda-nvrtc-cu12)"};
  }
  const bool whole =
      bind(t.library, "nvrtcCreateProgram", t.create) && bind(t.library, "nvrtcCompileProgram", t.compile) &&
      bind(t.library, "nvrtcDestroyProgram", t.destroy) && bind(t.library, "nvrtcGetPTXSize", t.ptx_size) &&
      bind(t.library, "nvrtcGetPTX", t.ptx) && bind(t.library, "nvrtcGetProgramLogSize", t.log_size) &&
      bind(t.library, "nvrtcGetProgramLog", t.log);
  return whole ? Status::ok() : Status{Code::kTransportUnavailable, "this libnvrtc lacks a function"};
}

}  // namespace

const std::array<uint32_t, kConstants>& gather_constants() {
  static const auto constants = make_constants();
  return constants;
}

Result<std::vector<GatherPiece>> cut(std::span<const DeviceSlice> slices, std::span<const uint32_t> blocks,
                                     uint64_t packed, bool into) {
  std::vector<GatherPiece> pieces;
  size_t next = 0;
  uint64_t all = 0;
  for (size_t block = 0; block < blocks.size(); ++block) {
    if (blocks[block] > slices.size() - next)
      return {Code::kInvalidArgument, "the blocks have more slices than there are"};
    const auto mine = slices.subspan(next, blocks[block]);
    next += blocks[block];
    uint64_t behind = 0;
    for (const DeviceSlice& slice : mine) {
      if (slice.size > UINT64_MAX - all) return {Code::kInvalidArgument, "the slices are too long"};
      all += slice.size;
      if (slice.address != 0) behind += slice.size;  // a gap has no place in the checksum
    }
    for (const DeviceSlice& slice : mine) {
      if (slice.address == 0) {  // a gap
        packed += slice.size;
        continue;
      }
      for (uint64_t at = 0; at < slice.size;) {
        const auto size = static_cast<uint32_t>(std::min<uint64_t>(kPieceBytes, slice.size - at));
        behind -= size;
        const uint64_t here = slice.address + at;
        pieces.push_back(
            {into ? packed : here, into ? here : packed, behind, size, static_cast<uint32_t>(block)});
        packed += size;
        at += size;
      }
    }
  }
  if (next != slices.size()) return {Code::kInvalidArgument, "the blocks have fewer slices than there are"};
  return pieces;
}

uint32_t finish_crc(uint32_t sum, uint64_t size) {
  const auto powers = std::span(gather_constants()).subspan(2048);
  return ~(sum ^ move_on(powers, 0xffffffffu, size));
}

Result<std::string> compile_gather(const std::string& nvrtc, int major, int minor) {
  Nvrtc t;
  if (Status status = open(nvrtc, t); !status) return status;
  void* program = nullptr;
  if (t.create(&program, kGatherSource, "gather.cu", 0, nullptr, nullptr) != 0)
    return {Code::kTransportUnavailable, "nvrtcCreateProgram failed"};
  const std::string architecture =
      "--gpu-architecture=compute_" + std::to_string(major) + std::to_string(minor);
  const char* options[] = {architecture.c_str()};
  const int compiled = t.compile(program, 1, options);
  size_t size = 0;
  std::string text;
  if (compiled != 0) {
    if (t.log_size(program, &size) == 0 && size > 1) {
      text.resize(size);
      (void)t.log(program, text.data());
    }
    t.destroy(&program);
    return {Code::kTransportUnavailable, "the kernel was not compiled: " + text.substr(0, 400)};
  }
  const bool got = t.ptx_size(program, &size) == 0 && size > 0;
  text.resize(size);
  const bool read = got && t.ptx(program, text.data()) == 0;
  t.destroy(&program);
  return read ? Result<std::string>(text)
              : Result<std::string>(Status{Code::kTransportUnavailable, "no PTX"});
}

}  // namespace mooncache::gpu
