"""Files and batches as OpenAI's API has them: what is kept of each, and how clients see it. Times are Unix seconds."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

ENDPOINTS: Final = ("/v1/chat/completions", "/v1/completions")
WINDOW: Final = "24h"
WINDOW_S: Final = 86_400
ERRORS_MAX: Final = 100  # that a batch names; the error file has all of them


class Purpose(StrEnum):
    """What a file is for."""

    BATCH = "batch"
    BATCH_OUTPUT = "batch_output"


class BatchStatus(StrEnum):
    """Where a batch is; the last four are its ends."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


ENDS: Final = frozenset(
    {BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED}
)


class StoredFile(msgspec.Struct, kw_only=True):
    """One file. `filename` is what its owner called it; nothing on disk has that name."""

    id: str
    tenant: str
    size_bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose

    def described(self) -> dict[str, object]:
        """The object `file` of the API."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class BatchFault(msgspec.Struct):
    """Why a line of the input, or all of it, is no request."""

    code: str
    message: str
    line: int | None = None


class BatchUsage(msgspec.Struct):
    """Tokens of the requests that were answered."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def add(self, other: BatchUsage) -> None:
        """Count another request's."""
        self.input_tokens += other.input_tokens
        self.cached_tokens += other.cached_tokens
        self.output_tokens += other.output_tokens


class OfflineBatch(msgspec.Struct, kw_only=True):
    """One batch.

    `admin`: whoever made it had the cluster token; `key_id`: names the key that made it, for usage; `at`: when it
    reached each status.
    """

    id: str
    tenant: str
    admin: bool
    endpoint: str
    input_file_id: str
    metadata: dict[str, str] | None
    created_at: int
    expires_at: int
    status: BatchStatus = BatchStatus.VALIDATING
    at: dict[str, int] = {}
    errors: list[BatchFault] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: BatchUsage = msgspec.field(default_factory=BatchUsage)
    key_id: str = "token"

    @property
    def has_ended(self) -> bool:
        return self.status in ENDS

    def move(self, status: BatchStatus, wall_s: float) -> None:
        """It is there from now on."""
        self.status = status
        self.at[status] = int(wall_s)

    def described(self) -> dict[str, object]:
        """The object `batch` of the API."""
        usage = self.usage
        faults = [{**msgspec.to_builtins(each), "param": None} for each in self.errors]
        moments = {f"{status}_at": self.at.get(status) for status in BatchStatus if status != "validating"}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": faults} if faults else None,
            "input_file_id": self.input_file_id,
            "completion_window": WINDOW,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **moments,
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "usage": {
                "input_tokens": usage.input_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.input_tokens + usage.output_tokens,
            },
            "metadata": self.metadata,
        }


def next_batch(batches: list[OfflineBatch], running: list[OfflineBatch]) -> OfflineBatch | None:
    """The batch to begin next: of the tenant with the fewest under way, and of its batches the oldest."""
    under_way = {each.id for each in running}
    waiting = [each for each in batches if not each.has_ended and each.id not in under_way]
    counts: dict[str, int] = {}
    for each in running:
        counts[each.tenant] = counts.get(each.tenant, 0) + 1
    return min(waiting, key=lambda each: (counts.get(each.tenant, 0), each.created_at, each.id), default=None)
