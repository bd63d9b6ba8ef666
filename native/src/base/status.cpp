#include "mooncache/status.h"

namespace mooncache {

std::string_view code_name(Code code) {
  switch (code) {
    case Code::kOk:
      return "OK";
    case Code::kInvalidArgument:
      return "INVALID_ARGUMENT";
    case Code::kBufferTooSmall:
      return "BUFFER_TOO_SMALL";
    case Code::kKeyInvalid:
      return "KEY_INVALID";
    case Code::kTooLarge:
      return "TOO_LARGE";
    case Code::kClosed:
      return "CLOSED";
    case Code::kLimitExceeded:
      return "LIMIT_EXCEEDED";
    case Code::kNotFound:
      return "NOT_FOUND";
    case Code::kAlreadyExists:
      return "ALREADY_EXISTS";
    case Code::kChecksumMismatch:
      return "CHECKSUM_MISMATCH";
    case Code::kGenerationChanged:
      return "GENERATION_CHANGED";
    case Code::kPinned:
      return "PINNED";
    case Code::kReservationUnknown:
      return "RESERVATION_UNKNOWN";
    case Code::kPinUnknown:
      return "PIN_UNKNOWN";
    case Code::kIncomplete:
      return "INCOMPLETE";
    case Code::kNoSpace:
      return "NO_SPACE";
    case Code::kBackPressure:
      return "BACK_PRESSURE";
    case Code::kQuotaExceeded:
      return "QUOTA_EXCEEDED";
    case Code::kDraining:
      return "DRAINING";
    case Code::kNodeUnavailable:
      return "NODE_UNAVAILABLE";
    case Code::kDeadlineExceeded:
      return "DEADLINE_EXCEEDED";
    case Code::kCancelled:
      return "CANCELLED";
    case Code::kConnectionLost:
      return "CONNECTION_LOST";
    case Code::kTransportUnavailable:
      return "TRANSPORT_UNAVAILABLE";
    case Code::kNoNodes:
      return "NO_NODES";
    case Code::kMasterUnavailable:
      return "MASTER_UNAVAILABLE";
    case Code::kNotLeader:
      return "NOT_LEADER";
    case Code::kUnauthenticated:
      return "UNAUTHENTICATED";
    case Code::kPermissionDenied:
      return "PERMISSION_DENIED";
    case Code::kProtocolError:
      return "PROTOCOL_ERROR";
    case Code::kVersionSkew:
      return "VERSION_SKEW";
    case Code::kTlsError:
      return "TLS_ERROR";
    case Code::kUnknownNode:
      return "UNKNOWN_NODE";
    case Code::kStaleIncarnation:
      return "STALE_INCARNATION";
    case Code::kReportGap:
      return "REPORT_GAP";
    case Code::kTaskUnknown:
      return "TASK_UNKNOWN";
    case Code::kInternal:
      return "INTERNAL";
    case Code::kConfigInvalid:
      return "CONFIG_INVALID";
    case Code::kUnsupported:
      return "UNSUPPORTED";
  }
  return "UNKNOWN";
}

}  // namespace mooncache
