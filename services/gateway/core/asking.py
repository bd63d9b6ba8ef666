"""What the conductor is asked about a request."""

from __future__ import annotations

from mooncache.gateway.core.body import InferenceRequest
from mooncache.gateway.core.plan import Attempts
from mooncache.gateway.core.prepared import TokenizedPrompt
from mooncache.proto.v1 import conductor_pb2 as pb


def schedule_request(
    request_id: str,
    tenant: str,
    inquiry: InferenceRequest,
    known: TokenizedPrompt | None,
    attempts: Attempts,
    *,
    prompt_tokens: int,
    is_admin: bool,
) -> pb.ScheduleRequest:
    """The question. Keys are left out where no cache can help, and priority where the caller may not set it."""
    whole = inquiry.whole_prompt
    return pb.ScheduleRequest(
        request_id=request_id,
        tenant=tenant,
        model=inquiry.model,
        prompt_tokens=prompt_tokens,
        keys=known.keys if known and not whole else b"",
        content_keys=known.content_keys if known and not whole else b"",
        passport_root=known.passport_root if known else b"",
        max_output_tokens=inquiry.max_output_tokens,
        ttft_slo_ms=inquiry.ttft_slo_ms,
        tbt_slo_ms=inquiry.tbt_slo_ms,
        sequence_count=inquiry.choices,
        exclude=attempts.exclude,
        attempt=attempts.number,
        no_prefill=known is None or not known.block_tokens or whole,
        session=f"{tenant}/{inquiry.session}" if inquiry.session else "",
        priority=inquiry.priority if is_admin else 0,
    )
