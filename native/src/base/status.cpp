#include "mooncache/status.h"

#include <algorithm>
#include <array>

namespace mooncache {
namespace {

struct Named {
  Code code;
  std::string_view name;
};

constexpr auto kNames = std::to_array<Named>({
    {Code::kOk, "OK"},
    {Code::kInvalidArgument, "INVALID_ARGUMENT"},
    {Code::kBufferTooSmall, "BUFFER_TOO_SMALL"},
    {Code::kKeyInvalid, "KEY_INVALID"},
    {Code::kTooLarge, "TOO_LARGE"},
    {Code::kClosed, "CLOSED"},
    {Code::kLimitExceeded, "LIMIT_EXCEEDED"},
    {Code::kNotFound, "NOT_FOUND"},
    {Code::kAlreadyExists, "ALREADY_EXISTS"},
    {Code::kChecksumMismatch, "CHECKSUM_MISMATCH"},
    {Code::kGenerationChanged, "GENERATION_CHANGED"},
    {Code::kPinned, "PINNED"},
    {Code::kReservationUnknown, "RESERVATION_UNKNOWN"},
    {Code::kPinUnknown, "PIN_UNKNOWN"},
    {Code::kIncomplete, "INCOMPLETE"},
    {Code::kFewerReplicas, "FEWER_REPLICAS"},
    {Code::kNoSpace, "NO_SPACE"},
    {Code::kBackPressure, "BACK_PRESSURE"},
    {Code::kQuotaExceeded, "QUOTA_EXCEEDED"},
    {Code::kDraining, "DRAINING"},
    {Code::kNodeUnavailable, "NODE_UNAVAILABLE"},
    {Code::kDeadlineExceeded, "DEADLINE_EXCEEDED"},
    {Code::kCancelled, "CANCELLED"},
    {Code::kConnectionLost, "CONNECTION_LOST"},
    {Code::kTransportUnavailable, "TRANSPORT_UNAVAILABLE"},
    {Code::kNoNodes, "NO_NODES"},
    {Code::kMasterUnavailable, "MASTER_UNAVAILABLE"},
    {Code::kNotLeader, "NOT_LEADER"},
    {Code::kUnauthenticated, "UNAUTHENTICATED"},
    {Code::kPermissionDenied, "PERMISSION_DENIED"},
    {Code::kProtocolError, "PROTOCOL_ERROR"},
    {Code::kVersionSkew, "VERSION_SKEW"},
    {Code::kTlsError, "TLS_ERROR"},
    {Code::kUnknownNode, "UNKNOWN_NODE"},
    {Code::kStaleIncarnation, "STALE_INCARNATION"},
    {Code::kReportGap, "REPORT_GAP"},
    {Code::kTaskUnknown, "TASK_UNKNOWN"},
    {Code::kInternal, "INTERNAL"},
    {Code::kConfigInvalid, "CONFIG_INVALID"},
    {Code::kUnsupported, "UNSUPPORTED"},
});

}  // namespace

std::string_view code_name(Code code) {
  const auto found =
      std::find_if(kNames.begin(), kNames.end(), [&](const Named& n) { return n.code == code; });
  return found != kNames.end() ? found->name : "UNKNOWN";
}

}  // namespace mooncache
