// What a build without the headers of verbs says.
#include "rdma/fabric.h"

namespace mooncache::rdma {

namespace {

Status absent() {
  return {Code::kTransportUnavailable,
          "RDMA unavailable, because this build was made without the verbs headers (Debian package "
          "libibverbs-dev)"};
}

}  // namespace

Result<std::shared_ptr<Fabric>> open_fabric(const Options&) {
  return absent();
}
Result<std::vector<RailReport>> look_for_rails(const Options&) {
  return absent();
}

}  // namespace mooncache::rdma
