// Fuzzes how frames are put together from pieces. The first byte says how the rest is cut. However it is cut,
// the same frames come out as when all bytes come at once, and a refusal is a refusal.
//
//   fuzz_frames native/fuzz/fuzz_frames_corpus
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <span>
#include <vector>

#include "server/frame_reader.h"

namespace {

using namespace mooncache;
using server::FrameReader;
using Step = FrameReader::Step;

struct Outcome {
  std::vector<std::vector<std::byte>> frames;
  bool refused = false;
  bool partial = false;
  bool operator==(const Outcome&) const = default;
};

std::optional<size_t> meta_bytes(FrameReader::Header header) {
  const auto decoded = wire::decode_header(header);
  return decoded ? std::optional<size_t>(decoded->meta_bytes) : std::nullopt;
}

// `cut`: bytes in each piece; 0 = all of them.
Outcome read(std::span<const std::byte> bytes, size_t cut) {
  FrameReader reader;
  Outcome outcome;
  while (!bytes.empty() && !outcome.refused) {
    std::span<const std::byte> piece = bytes.first(cut == 0 ? bytes.size() : std::min(cut, bytes.size()));
    bytes = bytes.subspan(piece.size());
    while (!piece.empty() && !outcome.refused) {
      const Step step = reader.take(piece, meta_bytes);
      outcome.refused = step == Step::kRefused;
      if (step != Step::kFrame) continue;
      outcome.frames.emplace_back(reader.header().begin(), reader.header().end());
      outcome.frames.back().insert(outcome.frames.back().end(), reader.meta().begin(), reader.meta().end());
      reader.release();
    }
  }
  outcome.partial = !outcome.refused && reader.partial();
  return outcome;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data + 1), size - 1);
  if (!(read(bytes, data[0]) == read(bytes, 0))) std::abort();
  return 0;
}
