"""An engine's answer as the client sees it: events cut out of a byte stream and edited, tokens counted.

Events: nearly all events are plain text chunks that clients may see as they are, so a whole block of complete events is
searched for a few byte strings and forwarded untouched when it has none. Only events that carry usage, transfer
parameters, an error or the end are parsed. An event is never forwarded in part: a broken engine must not leave half a
JSON object in a client's stream.

Tokens: with a prefill leg the prompt was looked up and computed there. The decode leg finds nearly all of it in the
cache, which saves the client nothing. So `cached_tokens` is what the prefill leg found, and the prefill leg's own
output token never shows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

import msgspec

from mooncache.accounts.core.usage import tokens_of
from mooncache.errors import EngineFailed
from mooncache.gateway.core import faults
from mooncache.gateway.core.faults import Fault
from mooncache.kvcache.leg_hint import FIELD, CacheOutcome, CacheReport

EVENT_BYTES_MAX: Final = 64 << 20
_EVENTS: Final = re.compile(rb".*?\r?\n\r?\n", re.DOTALL)
_ENCODER_FIELD: Final = (
    "ec_transfer_params"  # where another engine finds what an encoder made: nothing for clients
)
_RAW: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PLAIN: Final = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one request; `cached_tokens` None: the engine did not say."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None


class Splitter:
    """Turns pieces of a stream into blocks of complete events."""

    def __init__(self, event_bytes_max: int = EVENT_BYTES_MAX) -> None:
        self._rest = bytearray()
        self._max = event_bytes_max

    def feed(self, data: bytes) -> bytes:
        """All events that `data` completes, as one block; b"" when there is none yet.

        Raises:
            EngineFailed: one event is longer than the limit.
        """
        if not self._rest and data.endswith(b"\n\n"):
            return data
        seen = max(0, len(self._rest) - 3)
        self._rest += data
        end = _last_boundary(self._rest, seen)
        if not end:
            if len(self._rest) > self._max:
                raise EngineFailed(f"The engine sent an event of more than {self._max} bytes.")
            return b""
        block = bytes(self._rest[:end])
        del self._rest[:end]
        return block

    @property
    def rest(self) -> bytes:
        """What has come of an event that is not complete."""
        return bytes(self._rest)


def _last_boundary(data: bytearray, start: int) -> int:
    """Offset behind the last empty line at or after `start`, 0 when there is none."""
    at = data.rfind(b"\n\n", start)
    found = at + 2 if at >= 0 else 0
    if b"\r" in data:
        at = data.rfind(b"\r\n\r\n", start)
        found = max(found, at + 4 if at >= 0 else 0)
    return found


def has_data(block: bytes) -> bool:
    """Whether a block has an event with data, not only comments."""
    return block.startswith(b"data:") or b"\ndata:" in block


class StreamEditor:
    """What a client sees of an engine's stream, and what the gateway learns from it.

    Args:
        wants_usage: the client asked for usage; otherwise the gateway did, and the usage event is dropped.

    Attributes: `prefill_tokens` and `planned_tokens` are set from outside, see `settled_cached_tokens`; `usage`,
    `cache`, `fault`, `done`, `event_count` what the stream said so far.
    """

    def __init__(self, wants_usage: bool) -> None:
        self._wants_usage = wants_usage
        self.prefill_tokens: int | None = None
        self.planned_tokens: int | None = None
        self.usage: TokenUsage | None = None
        self.cache: CacheReport | None = None
        self.fault: Fault | None = None
        self.done = False
        self.event_count = 0

    def take(self, block: bytes) -> bytes:
        """The bytes to forward for a block of complete events; an event that is not JSON sets `fault`."""
        if (
            b'"usage"' not in block
            and b'"error"' not in block
            and b"_transfer_params" not in block
            and b"[DONE]" not in block
        ):
            self.event_count += block.count(b"\n\n") or 1
            return block
        return b"".join(self._event(event) for event in _EVENTS.findall(block))

    def _event(self, event: bytes) -> bytes:
        data = b"\n".join(
            line[5:].strip()
            for line in event.replace(b"\r\n", b"\n").split(b"\n")
            if line.startswith(b"data:")
        )
        if self.done or self.fault is not None:
            return b""  # nothing comes after an end
        if not data:
            return event
        if data == b"[DONE]":
            self.done = True
            return event
        self.event_count += 1
        try:
            fields = _RAW.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # Not raised: the events before it in the same block still belong to the client.
            self.fault = faults.of_error(EngineFailed("The engine sent an event that is not a JSON object."))
            return self.fault.event()
        if "error" in fields or bytes(fields.get("object", b"")) == b'"error"':
            self.fault = faults.engine_event_fault(_PLAIN.decode(data))
            if self.fault is not None:
                return self.fault.event()
        return self._edited(event, fields)

    def _edited(self, event: bytes, fields: dict[str, msgspec.Raw]) -> bytes:
        changed = fields.pop(_ENCODER_FIELD, None) is not None
        if FIELD in fields:
            cache = CacheReport.from_params(_PLAIN.decode(fields.pop(FIELD)))
            self.cache, changed = cache or self.cache, True
        counts = _PLAIN.decode(fields["usage"]) if "usage" in fields else None
        if isinstance(counts, dict):
            self.usage = read_usage(counts)
            changed = True
            if self._wants_usage:
                merged = merged_usage(counts, self._cached())
                fields["usage"] = msgspec.Raw(msgspec.json.encode(merged))
            else:
                del fields["usage"]
                if fields.get("choices") is not None and _PLAIN.decode(fields["choices"]) == []:
                    return b""
        return b"data: " + msgspec.json.encode(fields) + b"\n\n" if changed else event

    def _cached(self) -> int | None:
        own = cached_of_leg(self.usage, self.cache)
        return settled_cached_tokens(own, self.prefill_tokens, self.planned_tokens)


def edit_answer(
    body: bytes, prefill_tokens: int | None = None, planned_tokens: int | None = None
) -> tuple[bytes, TokenUsage, CacheReport | None]:
    """A whole (not streamed) answer as the client sees it, its usage, and what the engine's connector said.

    `prefill_tokens` and `planned_tokens`: see `settled_cached_tokens`.

    Raises:
        EngineFailed: the body is not a JSON object.
    """
    try:
        fields = _RAW.decode(body)
        fields.pop(_ENCODER_FIELD, None)
        cache = CacheReport.from_params(_PLAIN.decode(fields.pop(FIELD))) if FIELD in fields else None
        counts: object = _PLAIN.decode(fields["usage"]) if "usage" in fields else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise EngineFailed("The engine's answer is not a JSON object.") from None
    found = read_usage(counts)
    if isinstance(counts, dict):
        known = settled_cached_tokens(cached_of_leg(found, cache), prefill_tokens, planned_tokens)
        fields["usage"] = msgspec.Raw(msgspec.json.encode(merged_usage(counts, known)))
    return msgspec.json.encode(fields), found, cache


_FELL_SHORT = frozenset({CacheOutcome.TIMEOUT, CacheOutcome.FAILED, CacheOutcome.LOAD_CUT})


def read_usage(usage: object) -> TokenUsage:
    """From an engine's `usage` object; fields that are missing or invalid count as 0."""
    if not isinstance(usage, dict):
        return TokenUsage()
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return TokenUsage(
        prompt_tokens=_count(usage.get("prompt_tokens")),
        completion_tokens=_count(usage.get("completion_tokens")),
        cached_tokens=_count(cached) if isinstance(cached, int) else None,
    )


def cached_of_leg(usage: TokenUsage | None, cache: CacheReport | None) -> int | None:
    """What one leg says about its cache: its usage when it has the number, otherwise its connector.

    vLLM counts what its connector promised. Where less came, the connector knows how much.
    """
    if usage is not None and usage.cached_tokens is not None:
        if cache is not None and cache.outcome in _FELL_SHORT:
            return min(usage.cached_tokens, cache.hit_tokens)
        return usage.cached_tokens
    return cache.hit_tokens if cache is not None else None


def settled_cached_tokens(own: int | None, prefill: int | None, planned: int | None) -> int | None:
    """The request's cached tokens.

    Args:
        own: what the decode leg found; that includes what a prefill leg computed for it a moment ago.
        prefill: what the prefill leg found, when it has said so.
        planned: while a prefill leg has not: what caches held when the request was planned. None: no such leg.
    """
    if prefill is not None:
        return prefill
    return min(own, planned) if own is not None and planned is not None else own


def merged_usage(usage: dict[str, object], cached_tokens: int | None) -> dict[str, object]:
    """The client's `usage`: the decode leg's with `cached_tokens` put in; None leaves the leg's own number."""
    if cached_tokens is None:
        return usage
    details = usage.get("prompt_tokens_details")
    details = dict(details) if isinstance(details, dict) else {}
    details["cached_tokens"] = min(cached_tokens, _count(usage.get("prompt_tokens")))
    return {**usage, "prompt_tokens_details": details}


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        return 0
    return tokens_of(value)
