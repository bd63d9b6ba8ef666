# ruff: noqa: N818  (the classes are named after their codes, which have no suffix)
"""The catalogue of errors: one class for each stable code.

A caller branches on `code` (or the class), never on the text. Numbers equal
native/include/mooncache/status.h, which a test reads; a number is never given to another meaning. Codes of
serving (700 to 799) never reach the data plane, so the native catalogue does not have them. Every error says
whether trying again can help (`retryable`) and what a person can do (`hint`). Over gRPC the code travels as
trailing metadata `mooncache-code`, because gRPC's own seventeen codes are too few to branch on.

    MooncacheError
    |-- caller:     InvalidArgument BufferTooSmall KeyInvalid TooLarge Closed LimitExceeded
    |-- lookup:     NotFound AlreadyExists ChecksumMismatch GenerationChanged Pinned ReservationUnknown
    |               PinUnknown Incomplete FewerReplicas
    |-- capacity:   NoSpace BackPressure QuotaExceeded Draining
    |-- connection: NodeUnavailable DeadlineExceeded Cancelled ConnectionLost TransportUnavailable NoNodes
    |               MasterUnavailable NotLeader
    |-- security:   Unauthenticated PermissionDenied ProtocolError VersionSkew TlsError
    |-- cluster:    UnknownNode StaleIncarnation ReportGap TaskUnknown
    |-- serving:    ModelUnknown InstanceUnknown NoInstances Overloaded RateLimited BudgetSpent
    |               PromptTooLong
    |               EngineUnavailable EngineFailed (EngineDied) EngineTimeout PassportMismatch DecisionUnknown
    |               ConductorUnavailable ConductorSuperseded AccountsUnavailable
    |-- offline:    TraceInvalid TraceTooLarge ClusterInvalid ProfileInvalid ModelTooLarge SimulationInvalid
    |               PlanInvalid ModelDoesNotFit SloUnreachable PlanInfeasible PlanUnconfirmed ScenarioUnknown
    `-- other:      Internal ConfigInvalid Unsupported
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import ClassVar, Final

METADATA_KEY: Final = "mooncache-code"
OK: Final = 0


class GrpcStatus(enum.StrEnum):
    """The statuses of gRPC by their standard names.

    The catalogue has them as names of its own, so that a core that raises an error does not load gRPC;
    runtime/grpc_status.py turns them into the library's.
    """

    OK = "OK"
    CANCELLED = "CANCELLED"
    UNKNOWN = "UNKNOWN"
    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    FAILED_PRECONDITION = "FAILED_PRECONDITION"
    ABORTED = "ABORTED"
    OUT_OF_RANGE = "OUT_OF_RANGE"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    INTERNAL = "INTERNAL"
    UNAVAILABLE = "UNAVAILABLE"
    DATA_LOSS = "DATA_LOSS"
    UNAUTHENTICATED = "UNAUTHENTICATED"


_BY_CODE: dict[int, type[MooncacheError]] = {}


class MooncacheError(Exception):
    """Base of every error that Mooncache raises on purpose; `except MooncacheError` catches them all.

    Attributes: `code` stable number, `name` its name, `retryable` whether the same call may succeed later,
    `grpc_status` what it becomes over gRPC, `hint` a default sentence on what to do, `message` what happened.
    """

    code: ClassVar[int]
    name: ClassVar[str]
    retryable: ClassVar[bool]
    grpc_status: ClassVar[GrpcStatus]
    hint: ClassVar[str] = ""

    def __init_subclass__(cls, *, code: int, status: GrpcStatus, retryable: bool = False) -> None:
        cls.code, cls.grpc_status, cls.retryable = code, status, retryable
        cls.name = re.sub(r"(?<!^)([A-Z])", r"_\1", cls.__name__).upper()
        cls.__doc__ = f"{cls.name} ({code}). {cls.hint}"
        if code in _BY_CODE:
            raise TypeError(f"code {code} is already {_BY_CODE[code].name}")
        _BY_CODE[code] = cls

    def __init__(self, message: str = "") -> None:
        self.message = message or self.hint
        super().__init__(self.message)

    def __str__(self) -> str:
        return f"{self.name} ({self.code}): {self.message}"


# the caller's arguments or state


class InvalidArgument(MooncacheError, code=100, status=GrpcStatus.INVALID_ARGUMENT):
    hint = "An argument is out of range or of the wrong shape; the message names it."


class BufferTooSmall(MooncacheError, code=101, status=GrpcStatus.INVALID_ARGUMENT):
    hint = "The destination is smaller than the block; ask stat() for the size and pass a larger buffer."


class KeyInvalid(MooncacheError, code=102, status=GrpcStatus.INVALID_ARGUMENT):
    hint = "A key is 32 bytes, or a str that is hashed to 32 bytes; pass one of these."


class TooLarge(MooncacheError, code=103, status=GrpcStatus.INVALID_ARGUMENT):
    hint = "The value is larger than a node or a message allows; split it."


class Closed(MooncacheError, code=104, status=GrpcStatus.FAILED_PRECONDITION):
    hint = "The client, service or handle is closed; open a new one."


class LimitExceeded(MooncacheError, code=105, status=GrpcStatus.RESOURCE_EXHAUSTED, retryable=True):
    hint = "A limit on connections, requests or items is reached; wait a little or send fewer at once."


# looking a block up


class NotFound(MooncacheError, code=200, status=GrpcStatus.NOT_FOUND):
    hint = "The block is not in the pool; compute it and put it."


class AlreadyExists(MooncacheError, code=201, status=GrpcStatus.ALREADY_EXISTS):
    hint = "The block is already stored. Equal keys mean equal bytes, so there is nothing to do."


class ChecksumMismatch(MooncacheError, code=202, status=GrpcStatus.DATA_LOSS):
    hint = "Bytes did not match their checksum and were discarded. Check the node's disk and memory."


class GenerationChanged(MooncacheError, code=203, status=GrpcStatus.ABORTED, retryable=True):
    hint = "The block was moved or evicted during the read; read again."


class Pinned(MooncacheError, code=204, status=GrpcStatus.FAILED_PRECONDITION):
    hint = "The block is pinned; unpin it or wait until the pin expires."


class ReservationUnknown(MooncacheError, code=205, status=GrpcStatus.NOT_FOUND):
    hint = "The reservation was finished, aborted or belongs to a lost connection; reserve again."


class PinUnknown(MooncacheError, code=206, status=GrpcStatus.NOT_FOUND):
    hint = "The pin was released, expired or belongs to a lost connection; look the block up again."


class Incomplete(MooncacheError, code=207, status=GrpcStatus.FAILED_PRECONDITION):
    hint = "The written ranges do not cover the block; write all of it before commit."


class FewerReplicas(MooncacheError, code=208, status=GrpcStatus.FAILED_PRECONDITION):
    hint = "The block is stored, in fewer copies than asked for; `mooncache status` shows which nodes take blocks."


# capacity


class NoSpace(MooncacheError, code=300, status=GrpcStatus.RESOURCE_EXHAUSTED, retryable=True):
    hint = "Nothing on the node can be evicted now; wait, unpin blocks or add capacity."


class BackPressure(MooncacheError, code=301, status=GrpcStatus.RESOURCE_EXHAUSTED, retryable=True):
    hint = "The node is busy making space; slow down and try again."


class QuotaExceeded(MooncacheError, code=302, status=GrpcStatus.RESOURCE_EXHAUSTED):
    hint = "The tenant's quota is used up; remove blocks of the tenant, or wait until some are evicted."


class Draining(MooncacheError, code=303, status=GrpcStatus.UNAVAILABLE, retryable=True):
    hint = "The node is draining and takes no new blocks; use another node."


# connections


class NodeUnavailable(MooncacheError, code=400, status=GrpcStatus.UNAVAILABLE, retryable=True):
    hint = "The store node cannot be reached; check that it runs and that its address is reachable from here."


class DeadlineExceeded(MooncacheError, code=401, status=GrpcStatus.DEADLINE_EXCEEDED, retryable=True):
    hint = "The call did not finish in time; try again or give it a longer timeout."


class Cancelled(MooncacheError, code=402, status=GrpcStatus.CANCELLED):
    hint = "The call was cancelled by its caller."


class ConnectionLost(MooncacheError, code=403, status=GrpcStatus.UNAVAILABLE, retryable=True):
    hint = "The connection broke in the middle of the call; try again."


class TransportUnavailable(MooncacheError, code=404, status=GrpcStatus.FAILED_PRECONDITION):
    hint = "This machine cannot use the transport; the message says why. Other transports are used."


class NoNodes(MooncacheError, code=405, status=GrpcStatus.UNAVAILABLE, retryable=True):
    hint = "The cluster has no usable store node; start one or wait until one has registered."


class MasterUnavailable(MooncacheError, code=406, status=GrpcStatus.UNAVAILABLE, retryable=True):
    hint = "The master does not answer; check that it runs and that cluster.master_targets is right."


class NotLeader(MooncacheError, code=407, status=GrpcStatus.FAILED_PRECONDITION, retryable=True):
    hint = "This master or conductor is a standby; ask the leader that the message names."


# security and protocol


class Unauthenticated(MooncacheError, code=500, status=GrpcStatus.UNAUTHENTICATED):
    hint = "The token is missing or wrong; pass the cluster's token or a tenant token made from it."


class PermissionDenied(MooncacheError, code=501, status=GrpcStatus.PERMISSION_DENIED):
    hint = "The token does not allow this; use the cluster token, or ask only about the tenant's own blocks."


class ProtocolError(MooncacheError, code=502, status=GrpcStatus.INVALID_ARGUMENT):
    hint = (
        "The peer sent bytes that break the protocol; check that both ends are Mooncache and of a "
        "supported version."
    )


class VersionSkew(MooncacheError, code=503, status=GrpcStatus.FAILED_PRECONDITION):
    hint = "The two ends speak incompatible versions; upgrade the older one."


class TlsError(MooncacheError, code=504, status=GrpcStatus.UNAVAILABLE):
    hint = "The TLS handshake failed; check certificate, key and CA of both ends."


# cluster


class UnknownNode(MooncacheError, code=600, status=GrpcStatus.NOT_FOUND, retryable=True):
    hint = "The node is not registered with this master (it may have restarted); register again."


class StaleIncarnation(MooncacheError, code=601, status=GrpcStatus.ABORTED):
    hint = "Another process has the same name (node_id, instance_id); stop one of the two or give it another name."


class ReportGap(MooncacheError, code=602, status=GrpcStatus.OUT_OF_RANGE, retryable=True):
    hint = "The report leaves out changes of blocks; send a full report."


class TaskUnknown(MooncacheError, code=603, status=GrpcStatus.NOT_FOUND):
    hint = "There is no such task (tasks end with their master); start it again."


# serving: engines, scheduling and the HTTP edge; unknown to the native code


class ModelUnknown(MooncacheError, code=700, status=GrpcStatus.NOT_FOUND):
    hint = "No instance serves a model of this name; GET /v1/models lists the models."


class InstanceUnknown(MooncacheError, code=701, status=GrpcStatus.NOT_FOUND, retryable=True):
    hint = "The instance is not registered with the conductor (it may have restarted); register again."


class NoInstances(MooncacheError, code=702, status=GrpcStatus.UNAVAILABLE, retryable=True):
    hint = "No instance can take the request now; wait until an engine is ready. `mooncache status` lists the engines."


class Overloaded(MooncacheError, code=703, status=GrpcStatus.RESOURCE_EXHAUSTED, retryable=True):
    hint = "The request could not be served within its time limits; try again after the time in Retry-After."


class RateLimited(MooncacheError, code=704, status=GrpcStatus.RESOURCE_EXHAUSTED, retryable=True):
    hint = "The tenant's rate limit is reached; try again after the time in Retry-After."


class BudgetSpent(MooncacheError, code=714, status=GrpcStatus.RESOURCE_EXHAUSTED):
    hint = (
        "The money for this month is spent; ask the operator for more, or come back in the next month (UTC)."
    )


class PromptTooLong(MooncacheError, code=705, status=GrpcStatus.INVALID_ARGUMENT):
    hint = "Prompt and answer together exceed the model's context length; shorten the prompt or max_tokens."


class EngineUnavailable(MooncacheError, code=706, status=GrpcStatus.UNAVAILABLE, retryable=True):
    hint = "The engine cannot be reached. Its worker restarts it; `mooncache status` shows its state."


class EngineFailed(MooncacheError, code=707, status=GrpcStatus.INTERNAL, retryable=True):
    hint = "The engine answered with an error or closed the connection; its worker's log has the reason."


class EngineDied(EngineFailed, code=712, status=GrpcStatus.INTERNAL, retryable=True):
    hint = "The engine process ended during the request; its worker's log has the reason."


class EngineTimeout(MooncacheError, code=708, status=GrpcStatus.DEADLINE_EXCEEDED, retryable=True):
    hint = "The engine was silent for too long; it hangs or is overloaded."


class PassportMismatch(MooncacheError, code=709, status=GrpcStatus.FAILED_PRECONDITION):
    hint = (
        "The engines cannot share blocks because the named field differs; start them with the same settings."
    )


class DecisionUnknown(MooncacheError, code=710, status=GrpcStatus.NOT_FOUND):
    hint = "There is no decision with this id; only the latest 10,000 are kept."


class ConductorUnavailable(MooncacheError, code=711, status=GrpcStatus.UNAVAILABLE, retryable=True):
    hint = "The conductor does not answer; check that it runs and that cluster.conductor_target is right."


class ConductorSuperseded(MooncacheError, code=713, status=GrpcStatus.FAILED_PRECONDITION):
    hint = "Another conductor leads now, or two do not name each other; the order was not carried out."


class AccountsUnavailable(MooncacheError, code=715, status=GrpcStatus.UNAVAILABLE, retryable=True):
    hint = "The database of accounts does not answer; check that it runs, and cluster.accounts_dir."


class ClusterInvalid(MooncacheError, code=725, status=GrpcStatus.INVALID_ARGUMENT):
    hint = "The cluster description cannot be simulated; the message names the field, its value and its unit."


class ProfileInvalid(MooncacheError, code=726, status=GrpcStatus.INVALID_ARGUMENT):
    hint = "The model profile is not plausible; measure the named points again or correct the named number."


class ModelTooLarge(MooncacheError, code=727, status=GrpcStatus.FAILED_PRECONDITION):
    hint = (
        "The model does not fit in the memory of the instance; use more or larger GPUs, or a smaller model."
    )


class SimulationInvalid(MooncacheError, code=728, status=GrpcStatus.INVALID_ARGUMENT):
    hint = "The options of the simulation do not fit the trace or the cluster; the message names the option."


# 729 was SIMULATION_BROKEN, which nothing raised.


# plan: what to buy


class PlanInvalid(MooncacheError, code=730, status=GrpcStatus.INVALID_ARGUMENT):
    hint = "A value in the plan's input is not usable; the message names it, its unit and the usual range."


class ModelDoesNotFit(MooncacheError, code=731, status=GrpcStatus.FAILED_PRECONDITION):
    hint = "The weights do not fit the GPUs of any machine type; take more or larger GPUs for one instance."


class SloUnreachable(MooncacheError, code=732, status=GrpcStatus.FAILED_PRECONDITION):
    hint = "Even an idle cluster misses this limit, whatever its size; loosen it, or offer faster machines."


class PlanInfeasible(MooncacheError, code=733, status=GrpcStatus.FAILED_PRECONDITION):
    hint = "The allowed machines or the budget cannot meet the SLOs; the message says what would be needed."


class PlanUnconfirmed(MooncacheError, code=734, status=GrpcStatus.FAILED_PRECONDITION):
    hint = (
        "The simulator did not confirm any of the model's plans; allow more machines or simulate more plans."
    )


# reproduce: published figures, measured again


class ScenarioUnknown(MooncacheError, code=735, status=GrpcStatus.NOT_FOUND):
    hint = "There is no scenario of this name; `mooncache reproduce --list` lists them all."


# traces of requests, and what is computed from them without a cluster


class TraceInvalid(MooncacheError, code=720, status=GrpcStatus.INVALID_ARGUMENT):
    hint = (
        "The file is not a usable trace; the message names the line and the field. "
        "docs/traces.md describes the format."
    )


class TraceTooLarge(MooncacheError, code=721, status=GrpcStatus.RESOURCE_EXHAUSTED):
    hint = "The trace exceeds the limit on lines, blocks or bytes in a line; cut it into parts."


# everything else


class Internal(MooncacheError, code=900, status=GrpcStatus.INTERNAL):
    hint = "This is a defect; please report it with the log lines around it."


class ConfigInvalid(MooncacheError, code=901, status=GrpcStatus.FAILED_PRECONDITION):
    hint = "The configuration is not usable; the message names the setting and the values it takes."


class Unsupported(MooncacheError, code=902, status=GrpcStatus.UNIMPLEMENTED):
    hint = "This version or this machine cannot do it; the message says which part is missing."


# what is left without a code: gRPC statuses that the other end (or gRPC itself) chose
_BY_STATUS: Final[dict[GrpcStatus, type[MooncacheError]]] = {
    GrpcStatus.CANCELLED: Cancelled,
    GrpcStatus.INVALID_ARGUMENT: InvalidArgument,
    GrpcStatus.DEADLINE_EXCEEDED: DeadlineExceeded,
    GrpcStatus.NOT_FOUND: NotFound,
    GrpcStatus.ALREADY_EXISTS: AlreadyExists,
    GrpcStatus.PERMISSION_DENIED: PermissionDenied,
    GrpcStatus.UNAUTHENTICATED: Unauthenticated,
    GrpcStatus.RESOURCE_EXHAUSTED: LimitExceeded,
    GrpcStatus.UNIMPLEMENTED: Unsupported,
}


def catalogue() -> tuple[type[MooncacheError], ...]:
    """Every error class, ordered by code."""
    return tuple(_BY_CODE[code] for code in sorted(_BY_CODE))


def error_for(code: int, message: str = "") -> MooncacheError:
    """The error of a stable code, ready to raise; a number not known here becomes INTERNAL."""
    error_class = _BY_CODE.get(code)
    if error_class is None:
        return Internal(f"code {code} is not known to this version: {message or 'no message'}")
    return error_class(message)


def code_name(code: int) -> str:
    """The catalogue's name of a code; "OK" for 0, "UNKNOWN" for a number that is not in it."""
    if code == OK:
        return "OK"
    return _BY_CODE[code].name if code in _BY_CODE else "UNKNOWN"


def to_metadata(error: MooncacheError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata that carries the code."""
    return ((METADATA_KEY, str(error.code)),)


def from_grpc(
    status: GrpcStatus,
    details: str | None,
    trailing_metadata: Iterable[tuple[str, str | bytes]] | None,
    unavailable_error: type[MooncacheError] = MasterUnavailable,
) -> MooncacheError:
    """The error that a failed gRPC call means.

    The code in the trailing metadata wins. Without one the refusal came from gRPC itself: UNAVAILABLE becomes
    `unavailable_error` (which peer was meant only the caller knows), other statuses their nearest code.
    """
    message = details or ""
    for key, value in trailing_metadata or ():
        text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
        if key == METADATA_KEY and text.isascii() and text.isdigit() and len(text) <= 5:
            return error_for(int(text), message)
    if status is GrpcStatus.UNAVAILABLE:
        return unavailable_error(message)
    error_class = _BY_STATUS.get(status, Internal)
    return error_class(message or f"gRPC status {status.name}")
