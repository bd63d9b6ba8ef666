// GET and PUT frames of about 1 MiB, several in flight. A frame's CRCs are computed right before it is sent
// and right after a piece of it was received, while the bytes are in cache.
#include <algorithm>
#include <deque>

#include "client/batch.h"
#include "mooncache/crc32c.h"
#include "transport/grant_messages.h"

namespace mooncache {

uint64_t GetBatch::capacity(uint32_t item) const {
  if (how->allocate) return known_bytes[item] > 0 ? known_bytes[item] : wire::kMaxPayloadBytes;
  uint64_t total = 0;
  for (const Slice& slice : blocks[item].slices) total += slice.size;
  return total;
}

void GetBatch::set_outcome(uint32_t item, Code code, uint64_t size, const Node& node) const {
  outcomes[item] = {code, size, node.info().index};
  if (how->allocate && (code == Code::kOk || code == Code::kBufferTooSmall)) {
    known_bytes[item] = size;
    if (code == Code::kBufferTooSmall) return;  // no answer yet: it is asked for again
  }
  switch (code) {
    case Code::kOk:
      counters->add(Counter::kGetHits);
      counters->add(Counter::kGetBytes, size);
      return;
    case Code::kNotFound:
      return counters->add(Counter::kMissNotFound);
    case Code::kChecksumMismatch:
      return counters->add(Counter::kMissChecksum);
    case Code::kGenerationChanged:
      return counters->add(Counter::kMissGeneration);
    case Code::kBufferTooSmall:
      return counters->add(Counter::kMissTooSmall);
    case Code::kTransportUnavailable:
      return;  // it goes another way
    default:
      return counters->add(Counter::kMissOther);
  }
}

uint32_t PutBatch::wait_ms() const {
  const int left = deadline.remaining_ms(static_cast<int>(wire::kMaxWaitMs));
  return std::min(config->put_wait_ms, static_cast<uint32_t>(left) / 2);
}

namespace {

// With unknown sizes, so many blocks at most are asked for in one frame.
constexpr size_t kUnsizedItems = 16;

class FusedGet final : public Program {
 public:
  FusedGet(const GetBatch& batch, Work& work, const Node& node, uint64_t unsized_max)
      : batch_(batch), work_(work), node_(node), unsized_max_(unsized_max), sent_(work.answered) {}

  bool next(Request& request) override {
    if (sent_ == work_.items.size()) return false;
    const size_t begin = sent_;
    uint64_t bytes = 0;
    size_t unsized = 0;
    while (sent_ < work_.items.size() && sent_ - begin < batch_.config->frame_items) {
      const uint32_t item = work_.items[sent_];
      if (!sized(item) && ++unsized > kUnsizedItems) break;
      const uint64_t capacity = sized(item) ? batch_.capacity(item) : 0;
      if (sent_ > begin && bytes + capacity > batch_.config->frame_bytes) break;
      bytes += capacity;
      ++sent_;
    }
    request.opcode = wire::Opcode::kGet;
    request.flags = batch_.how->whole ? wire::kFlagWhole : 0;
    request.meta.u32(static_cast<uint32_t>(sent_ - begin));
    for (size_t i = begin; i < sent_; ++i) {
      const uint32_t item = work_.items[i];
      wire::GetItem{batch_.blocks[item].key, batch_.blocks[item].offset, wanted_bytes(item)}.encode(
          request.meta);
    }
    frames_.push_back(sent_ - begin);
    return true;
  }

  bool finished() const override { return work_.answered == work_.items.size(); }

  Status on_response(const wire::FrameHeader& header, const Status& status, Reader& in,
                     PayloadSink& sink) override {
    const size_t count = frames_.front();
    results_.clear();
    if (!status.is_ok()) {
      results_.assign(count, wire::GetResult{.code = status.code});
      return Status::ok();
    }
    if (in.u32() != count) return {Code::kProtocolError, "GET answered another number of items"};
    uint64_t total = 0;
    for (size_t i = 0; i < count; ++i) {
      wire::GetResult result = wire::GetResult::decode(in);
      if (result.code != Code::kOk && result.length != 0)
        return {Code::kProtocolError, "bytes for a failed item"};
      const uint32_t item = work_.items[work_.answered + i];
      if (result.length > wanted_bytes(item)) return {Code::kProtocolError, "more bytes than asked for"};
      total += result.length;
      if (total > header.payload_bytes) return {Code::kProtocolError, "GET's lengths do not fit its payload"};
      if (result.code == Code::kOk) take_destination(item, result, sink);
      results_.push_back(result);
    }
    return in.done() ? Status::ok() : Status{Code::kProtocolError, "malformed GET answer"};
  }

  void on_payload(std::span<const uint32_t> crcs) override {
    size_t next_crc = 0;
    for (size_t i = 0; i < results_.size(); ++i) {
      const wire::GetResult& result = results_[i];
      if (i > 0 && result.code == Code::kLimitExceeded) {
        request_again();
        continue;
      }
      const uint32_t item = work_.items[work_.answered++];
      Code code = result.code;
      uint64_t size = result.length;
      if (code == Code::kOk) {
        const uint32_t crc = crcs[next_crc++];
        if (std::find(lost_.begin(), lost_.end(), item) != lost_.end()) {
          code = Code::kLimitExceeded;
        } else if (crc != result.crc32c && result.length > 0) {
          code = Code::kChecksumMismatch;
        }
      }
      if (code == Code::kBufferTooSmall) size = result.block_size;
      batch_.set_outcome(item, code, size, node_);
    }
    frames_.pop_front();
    lost_.clear();
  }

 private:
  bool sized(uint32_t item) const { return !batch_.how->allocate || batch_.known_bytes[item] > 0; }
  // Not for what is known already: a size never changes between question and answer.
  uint64_t wanted_bytes(uint32_t item) const {
    return sized(item) ? batch_.capacity(item) : std::min(batch_.capacity(item), unsized_max_);
  }

  // The node had no room for this item behind the others of its frame: it goes to the end of the queue. The
  // first item of a frame is never asked for twice, so each frame settles at least one.
  void request_again() {
    const uint32_t item = work_.items[work_.answered];
    work_.items.erase(work_.items.begin() + static_cast<ptrdiff_t>(work_.answered));
    work_.items.push_back(item);
    --sent_;  // what is in flight behind it moved up by one
  }

  void take_destination(uint32_t item, const wire::GetResult& result, PayloadSink& sink) {
    if (!batch_.how->allocate) return sink.add_item(batch_.blocks[item].slices, 0, result.length);
    const Slice slice{batch_.how->allocate(item, result.length), static_cast<size_t>(result.length)};
    if (slice.data == nullptr) lost_.push_back(item);
    sink.add_item(std::span(&slice, 1), 0, result.length);
  }

  const GetBatch& batch_;
  Work& work_;
  const Node& node_;
  const uint64_t unsized_max_;
  size_t sent_;
  std::deque<size_t> frames_;  // items in each frame in flight
  std::vector<wire::GetResult> results_;
  std::vector<uint32_t> lost_;  // of the frame being received: they got no memory
};

class FusedPut final : public Program {
 public:
  FusedPut(PutBatch& batch, Work& work, std::span<Code> codes)
      : batch_(batch), work_(work), codes_(codes), sent_(work.answered) {}

  bool next(Request& request) override {
    if (sent_ == work_.items.size()) return false;
    const size_t begin = sent_;
    uint64_t bytes = 0;
    while (sent_ < work_.items.size() && sent_ - begin < batch_.config->frame_items) {
      const uint64_t size = batch_.sizes[work_.items[sent_]];
      if (sent_ > begin && bytes + size > batch_.config->frame_bytes) break;
      bytes += size;
      ++sent_;
    }
    request.opcode = wire::Opcode::kPut;
    request.meta.u32(static_cast<uint32_t>(sent_ - begin));
    const uint32_t wait_ms = batch_.wait_ms();
    for (size_t i = begin; i < sent_; ++i) {
      const uint32_t item = work_.items[i];
      const PutBlock& block = batch_.blocks[item];
      if (batch_.crc_known[item] == 0) {
        uint32_t crc = 0;
        for (const ConstSlice& slice : block.slices) crc = crc32c({slice.data, slice.size}, crc);
        batch_.crcs[item] = crc;
        batch_.crc_known[item] = 1;
      }
      request.payload.insert(request.payload.end(), block.slices.begin(), block.slices.end());
      wire::PutItem{block.key, batch_.sizes[item], batch_.crcs[item], wait_ms}.encode(request.meta);
    }
    frames_.push_back(sent_ - begin);
    return true;
  }

  bool finished() const override { return work_.answered == work_.items.size(); }

  Status on_response(const wire::FrameHeader&, const Status& status, Reader& in, PayloadSink&) override {
    const auto codes = decode_outcomes(status, in, frames_.front());
    if (!codes) return codes.status();
    for (const Code code : *codes) codes_[work_.items[work_.answered++]] = code;
    frames_.pop_front();
    return Status::ok();
  }

 private:
  PutBatch& batch_;
  Work& work_;
  std::span<Code> codes_;
  size_t sent_;
  std::deque<size_t> frames_;
};

}  // namespace

std::unique_ptr<Program> make_fused_get(const GetBatch& batch, Work& work, const Node& node,
                                        uint64_t unsized_max) {
  return std::make_unique<FusedGet>(batch, work, node, unsized_max);
}

std::unique_ptr<Program> make_fused_put(PutBatch& batch, Work& work, std::span<Code> codes) {
  return std::make_unique<FusedPut>(batch, work, codes);
}

}  // namespace mooncache
