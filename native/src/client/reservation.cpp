// What callers see of reservations: a batch with a code for each block, and one block with a Status.
#include <algorithm>

#include "client/reservations.h"

namespace mooncache {

namespace {

class Batch final : public ReservationBatch {
 public:
  explicit Batch(std::unique_ptr<Reservations> reservations) : reservations_(std::move(reservations)) {}

  size_t size() const override { return reservations_->size(); }
  uint64_t block_bytes() const override { return reservations_->block_bytes(); }
  Code code(size_t block) const override { return reservations_->state(block).code; }
  uint32_t node_index(size_t block) const override { return reservations_->node_index(block); }

  Status write(uint64_t offset, std::span<const Reservations::Source> sources, const CallOptions& options,
               std::span<Code> codes) override {
    std::vector<Status> ends(codes.size());
    return coded(reservations_->write(offset, sources, options, ends), ends, codes);
  }
  Status commit(const CallOptions& options, std::span<Code> codes) override {
    std::vector<Status> ends(codes.size());
    return coded(reservations_->commit(options, ends), ends, codes);
  }
  Status abort(const CallOptions& options) override { return reservations_->abort(options); }

 private:
  static Status coded(Status status, std::span<const Status> ends, std::span<Code> codes) {
    std::transform(ends.begin(), ends.end(), codes.begin(), [](const Status& end) { return end.code; });
    return status;
  }

  const std::unique_ptr<Reservations> reservations_;
};

class OneBlock final : public BlockReservation {
 public:
  explicit OneBlock(std::unique_ptr<Reservations> reservations) : reservations_(std::move(reservations)) {}

  uint32_t node_index() const override { return reservations_->node_index(0); }
  uint64_t size() const override { return reservations_->block_bytes(); }

  Status write(uint64_t offset, std::span<const ConstSlice> slices, const CallOptions& options) override {
    Status end;
    Status status = reservations_->write(offset, std::span(&slices, 1), options, std::span(&end, 1));
    return status ? end : status;
  }
  Status commit(const CallOptions& options) override {
    Status end;
    Status status = reservations_->commit(options, std::span(&end, 1));
    return status ? end : status;
  }
  Status abort(const CallOptions& options) override { return reservations_->abort(options); }

 private:
  const std::unique_ptr<Reservations> reservations_;
};

}  // namespace

Result<std::unique_ptr<ReservationBatch>> Client::reserve(std::span<const Key> keys, uint64_t size_bytes,
                                                          const CallOptions& options) {
  auto made = impl_->reserve(keys, size_bytes, options);
  if (!made) return made.status();
  return std::unique_ptr<ReservationBatch>(new Batch(std::move(*made)));
}

Result<std::unique_ptr<BlockReservation>> Client::reserve(const Key& key, uint64_t size_bytes,
                                                          const CallOptions& options) {
  auto made = impl_->reserve(std::span(&key, 1), size_bytes, options);
  if (!made) return made.status();
  if (Status refused = (*made)->state(0); !refused) return refused;
  return std::unique_ptr<BlockReservation>(new OneBlock(std::move(*made)));
}

}  // namespace mooncache
