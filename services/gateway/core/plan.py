"""Where a request goes, what was tried for it, and what its answer's headers say of that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from mooncache.errors import ModelUnknown, PromptTooLong
from mooncache.gateway.core import faults
from mooncache.gateway.core.body import Content, InferenceRequest
from mooncache.gateway.core.faults import Refusal
from mooncache.gateway.core.prompts import longest_ids

DECODE_ATTEMPTS: Final = 3
DECISION_HEADER: Final = "x-mooncache-decision"
PLAN_HEADER: Final = "x-mooncache-plan"


@dataclass(frozen=True, slots=True)
class LegPlan:
    """One leg: where it goes and what it waits for."""

    instance_id: str
    url: str
    wait_tokens: int = 0
    wait_ms: int = 0
    handover_ms: int = 0  # of a decode leg: how long after the end of its prefill leg blocks may still come


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Where a request goes. `prefill` None: decode computes the prompt. `decision_id` "": no conductor made it.

    `hit_tokens`: leading prompt tokens that a cache held when the plan was made.
    """

    decode: LegPlan
    prefill: LegPlan | None = None
    decision_id: str = ""
    summary: str = ""
    hit_tokens: int = 0


@dataclass(slots=True)
class Attempts:
    """What has been tried for one request."""

    number: int = 1
    prefill_failures: int = 0
    decode_failures: int = 0
    deaths: int = 0
    exclude: list[str] = field(default_factory=list)

    def failed(self, instance_id: str, *, prefill: bool) -> None:
        """Count a failed leg; its instance is not asked again."""
        self.number += 1
        if prefill:
            self.prefill_failures += 1
        else:
            self.decode_failures += 1
        if instance_id not in self.exclude:
            self.exclude.append(instance_id)


def unknown_model(model: str) -> Refusal:
    """404 in the words that clients know."""
    return faults.refuse(ModelUnknown(f"The model `{model[:256]}` does not exist."), param="model")


def check_length(limit: int, prompt_tokens: int, output_tokens: int, *, chat: bool) -> None:
    """Nothing when prompt and answer can fit into the model or the limit is not known. Raises Refusal (400)."""
    if not limit or prompt_tokens + max(1, output_tokens) <= limit:
        return
    asked = f" and max_tokens asks for {output_tokens} more" if output_tokens else ""
    what = "messages" if chat else "prompt"
    text = (
        f"This model's maximum context length is {limit} tokens, but the {what} has {prompt_tokens} tokens{asked}. "
        "Shorten it or ask for fewer tokens."
    )
    raise faults.refuse(PromptTooLong(text), param=what)


def check_ids(limit: int, request: InferenceRequest, content: Content) -> None:
    """Refuse token ids that are more than the model takes before any work is put into them. Raises Refusal (400)."""
    tokens = 0 if request.chat else longest_ids(content.fields.get("prompt"))
    if tokens:
        check_length(limit, tokens, request.max_output_tokens, chat=False)


def headers(made: RequestPlan, *, is_admin: bool) -> dict[str, str]:
    """What the answer's headers tell of the plan: tenants get a name that means something to `mooncache why` only.

    The summary names instances and tells of their load; it is for callers with the cluster token.
    """
    found = {DECISION_HEADER: _header_text(made.decision_id) or "unscheduled"}
    if is_admin:
        found[PLAN_HEADER] = _header_text(made.summary)
    return found


def _header_text(text: str) -> str:
    """A text as a header's value: one line of printable ASCII."""
    return "".join(c if " " <= c <= "~" else "?" for c in text[:1024])
