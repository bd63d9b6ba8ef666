"""What the conductor is asked about a request."""

from __future__ import annotations

from mooncache.gateway.core.body import InferenceRequest
from mooncache.gateway.core.plan import Attempts
from mooncache.gateway.core.prepared import TokenizedPrompt
from mooncache.proto.v1 import conductor_pb2 as pb


def schedule_request(
    request_id: str,
    tenant: str,
    request: InferenceRequest,
    tokenized: TokenizedPrompt | None,
    attempts: Attempts,
    *,
    prompt_tokens: int,
    is_admin: bool,
) -> pb.ScheduleRequest:
    """The question. Keys are left out where no cache can help, and priority where the caller may not set it."""
    whole = request.whole_prompt
    return pb.ScheduleRequest(
        request_id=request_id,
        tenant=tenant,
        model=request.model,
        prompt_tokens=prompt_tokens,
        keys=tokenized.keys if tokenized and not whole else b"",
        content_keys=tokenized.content_keys if tokenized and not whole else b"",
        passport_root=tokenized.passport_root if tokenized else b"",
        max_output_tokens=request.max_output_tokens,
        ttft_slo_ms=request.ttft_slo_ms,
        tbt_slo_ms=request.tbt_slo_ms,
        sequence_count=request.choices,
        exclude=attempts.exclude,
        attempt=attempts.number,
        no_prefill=tokenized is None or not tokenized.block_tokens or whole,
        session=f"{tenant}/{request.session}" if request.session else "",
        priority=request.priority if is_admin else 0,
    )
