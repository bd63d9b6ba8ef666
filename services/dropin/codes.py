"""The original's result codes, and which of them stands for each error of ours."""

from __future__ import annotations

from typing import Final

from mooncache import errors as err

OK: Final = 0
INTERNAL: Final = -1
NO_SPACE: Final = -200
INVALID_KEY: Final = -400
INVALID_PARAMS: Final = -600
ILLEGAL_CLIENT: Final = -601
NOT_FOUND: Final = -704
HAS_LEASE: Final = -706
TRANSFER_FAIL: Final = -800
CHECKSUM: Final = -801
RPC_FAIL: Final = -900
RPC_TIMEOUT: Final = -901
UNAVAILABLE_IN_MODE: Final = -1010

_CODES: Final[dict[int, int]] = {
    err.OK: OK,
    err.AlreadyExists.code: OK,  # a put of what is there is done, as in the original
    err.InvalidArgument.code: INVALID_PARAMS,
    err.BufferTooSmall.code: INVALID_PARAMS,
    err.TooLarge.code: INVALID_PARAMS,
    err.KeyInvalid.code: INVALID_KEY,
    err.Closed.code: INVALID_PARAMS,
    err.NotFound.code: NOT_FOUND,
    err.ChecksumMismatch.code: CHECKSUM,
    err.Pinned.code: HAS_LEASE,
    err.LimitExceeded.code: NO_SPACE,
    err.NoSpace.code: NO_SPACE,
    err.BackPressure.code: NO_SPACE,
    err.QuotaExceeded.code: NO_SPACE,
    err.NoNodes.code: NO_SPACE,
    err.Draining.code: NO_SPACE,
    err.GenerationChanged.code: TRANSFER_FAIL,
    err.NodeUnavailable.code: TRANSFER_FAIL,
    err.ConnectionLost.code: TRANSFER_FAIL,
    err.TransportUnavailable.code: TRANSFER_FAIL,
    err.DeadlineExceeded.code: RPC_TIMEOUT,
    err.MasterUnavailable.code: RPC_FAIL,
    err.NotLeader.code: RPC_FAIL,
    err.Unauthenticated.code: ILLEGAL_CLIENT,
    err.PermissionDenied.code: ILLEGAL_CLIENT,
}


def code_of(ours: int) -> int:
    """The original's number for one of our codes; INTERNAL for what it has no number for."""
    return _CODES.get(ours, INTERNAL)


def code_of_error(error: err.MooncacheError) -> int:
    """The original's number for an error that ended a whole call; never 0."""
    return code_of(error.code) or INTERNAL
