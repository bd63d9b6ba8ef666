// Results as values. The data path never throws: a function that can be refused returns Status or
// Result<T>, and callers branch on the stable code, never on the text.
#pragma once

#include <cassert>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace mooncache {

// Stable numbers: the same in services/errors.py, in docs/errors.md and on the wire. Never reuse one.
enum class Code : uint16_t {
  kOk = 0,
  // the caller's arguments or state
  kInvalidArgument = 100,
  kBufferTooSmall = 101,
  kKeyInvalid = 102,
  kTooLarge = 103,
  kClosed = 104,
  kLimitExceeded = 105,
  // looking a block up
  kNotFound = 200,
  kAlreadyExists = 201,
  kChecksumMismatch = 202,
  kGenerationChanged = 203,
  kPinned = 204,
  kReservationUnknown = 205,
  kPinUnknown = 206,
  kIncomplete = 207,
  kFewerReplicas = 208,
  // capacity
  kNoSpace = 300,
  kBackPressure = 301,
  kQuotaExceeded = 302,
  kDraining = 303,
  // connections
  kNodeUnavailable = 400,
  kDeadlineExceeded = 401,
  kCancelled = 402,
  kConnectionLost = 403,
  kTransportUnavailable = 404,
  kNoNodes = 405,
  kMasterUnavailable = 406,
  kNotLeader = 407,
  // security and protocol
  kUnauthenticated = 500,
  kPermissionDenied = 501,
  kProtocolError = 502,
  kVersionSkew = 503,
  kTlsError = 504,
  // cluster
  kUnknownNode = 600,
  kStaleIncarnation = 601,
  kReportGap = 602,
  kTaskUnknown = 603,
  // everything else
  kInternal = 900,
  kConfigInvalid = 901,
  kUnsupported = 902,
};

// The catalogue's name of a code, e.g. "NOT_FOUND"; "UNKNOWN" for a number that is not in it.
std::string_view code_name(Code code);

struct [[nodiscard]] Status {
  Code code = Code::kOk;
  std::string message;

  static Status ok() { return {}; }
  bool is_ok() const { return code == Code::kOk; }
  explicit operator bool() const { return is_ok(); }
};

// A value or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}  // NOLINT(google-explicit-constructor)
  Result(Status status) : status_(std::move(status)) { assert(!status_.is_ok()); }  // NOLINT
  Result(Code code, std::string message) : status_{code, std::move(message)} { assert(code != Code::kOk); }

  bool is_ok() const { return value_.has_value(); }
  explicit operator bool() const { return is_ok(); }
  const Status& status() const { return status_; }
  Code code() const { return status_.code; }
  T& value() { return *value_; }
  const T& value() const { return *value_; }
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace mooncache
