"""Request bodies: what the gateway has to know of them, checked; all else forwarded byte for byte.

The schema is open: a body is a JSON object of which `_Known` names the fields that are read here. A field that is not
named, and the value of one that is, goes to the engine exactly as it came. Fields that engines and gateways use among
themselves (`INTERNAL`) name hosts, blocks and queues: from a client they are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

from mooncache.errors import TooLarge
from mooncache.gateway.core import faults
from mooncache.gateway.core.faults import Refusal, bad_request
from mooncache.gateway.core.prompts import count, whole

SALT_CHARS_MAX: Final = 1024
MODEL_CHARS_MAX: Final = 256
EXTENSION: Final = "mooncache"
CHOICES_MAX: Final = 128  # answers of one request, and prompts
INTERNAL: Final = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "request_id",
        "rid",
        "priority",
        "data_parallel_rank",
        "routed_dp_rank",
        "disagg_prefill_dp_rank",
        "extra_key",
        EXTENSION,
    }
)
INTERNAL_PREFIX: Final = "bootstrap_"
_BESIDE_PROMPT_BYTES: Final = 4 << 20

_Count = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Number = int | float
_Slo = Annotated[int, Meta(ge=0, lt=1 << 32)]


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Extension(msgspec.Struct):
    """Our own field `mooncache`: promises wanted, and how many leading messages others may share the cache of."""

    ttft_slo_ms: _Slo = 0
    tbt_slo_ms: _Slo = 0
    public_messages: Annotated[int, Meta(ge=0)] = 0


class _Known(msgspec.Struct):
    model: Annotated[str, Meta(min_length=1, max_length=MODEL_CHARS_MAX)]
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: _Count | None = None
    max_completion_tokens: _Count | None = None
    temperature: _Number | None = None
    top_p: _Number | None = None
    presence_penalty: _Number | None = None
    frequency_penalty: _Number | None = None
    seed: int | None = None
    echo: bool | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    truncate_prompt_tokens: int | None = None
    cache_salt: Annotated[str, Meta(max_length=SALT_CHARS_MAX)] | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    priority: Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    mooncache: _Extension | None = None


class _Message(msgspec.Struct):
    role: str


class _Chat(_Known):
    messages: Annotated[list[_Message], Meta(min_length=1)] = field(default_factory=list)


class _Completion(_Known):
    prompt: Any = None


_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])
_RAW: Final = msgspec.json.Decoder(dict[str, Raw])


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One request as the gateway understands it; small, so that it may be kept as long as the request lives.

    choices: sequences that will be generated. max_output_tokens: 0 when the client did not say. whole_prompt: the
    engine has to compute every prompt token itself (log probabilities of the prompt, beam search), so neither a
    prefill leg nor a cache can help.
    """

    chat: bool
    model: str
    stream: bool
    wants_usage: bool
    choices: int
    max_output_tokens: int
    cache_salt: str
    session: str
    priority: int
    ttft_slo_ms: int
    tbt_slo_ms: int
    whole_prompt: bool
    truncates: bool

    @property
    def path(self) -> str:
        """Path of the engine's endpoint."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"


@dataclass(frozen=True, slots=True)
class Content:
    """A body as it was sent. fields: decoded. raw: each field's own bytes. Many times its size: not to be kept."""

    fields: dict[str, Any] = field(repr=False)
    raw: dict[str, Raw] = field(repr=False)


def parse(data: bytes, *, chat: bool, choice_count_max: int) -> tuple[InferenceRequest, Content]:
    """Check a body. Raises Refusal (400) with a sentence that names the field."""
    body, raw = _decode(data)
    known: _Chat | _Completion
    try:
        plain = _whole_numbers(body)
        known = msgspec.convert(plain, type=_Chat) if chat else msgspec.convert(plain, type=_Completion)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    prompts = 1
    if chat:
        if "messages" not in body:
            raise bad_request("`messages` is missing; it is a list of objects with a role.", "messages")
    else:
        assert isinstance(known, _Completion)
        try:
            prompts = count(known.prompt, embedded=body.get("prompt_embeds") is not None)
        except RecursionError:
            raise bad_request("`prompt` is nested too deeply.", "prompt") from None
    answers = known.n or 1
    if answers > choice_count_max:
        raise bad_request(f"n is {answers}, at most {choice_count_max} are possible.", "n")
    if prompts > choice_count_max:
        raise bad_request(
            f"`prompt` has {prompts} prompts, at most {choice_count_max} are possible.", "prompt"
        )
    options = known.stream_options
    asks = known.mooncache or _Extension()
    most = known.max_completion_tokens if known.max_completion_tokens is not None else known.max_tokens
    prompt_logprobs = known.prompt_logprobs is not None or bool(
        known.echo and known.logprobs not in (None, False)
    )
    request = InferenceRequest(
        chat=chat,
        model=known.model,
        stream=bool(known.stream),
        wants_usage=bool(options and options.include_usage),
        choices=prompts * answers,
        max_output_tokens=most or 0,
        cache_salt=known.cache_salt or "",
        session=(known.prompt_cache_key or known.session_id or "")[:256],
        priority=known.priority or 0,
        ttft_slo_ms=asks.ttft_slo_ms,
        tbt_slo_ms=asks.tbt_slo_ms,
        whole_prompt=prompt_logprobs or bool(known.use_beam_search),
        truncates=known.truncate_prompt_tokens is not None,
    )
    return request, Content(body, raw)


def bytes_max(cap: int, bytes_per_token: int, model_tokens: int) -> int:
    """Size of the largest body that a model with so many tokens can have a use for; `cap` while they are not known.

    A token is a few bytes of JSON whether it comes as text or as a number. Beside the prompt a body holds tools,
    schemas and images, which is what `_BESIDE_PROMPT_BYTES` is for.
    """
    if not model_tokens or not bytes_per_token:
        return cap
    return min(cap, _BESIDE_PROMPT_BYTES + bytes_per_token * model_tokens)


def too_large(limit: int) -> Refusal:
    """413."""
    return faults.refuse(TooLarge(f"The request's body is larger than {limit} bytes."))


def _decode(data: bytes) -> tuple[dict[str, Any], dict[str, Raw]]:
    if not data.strip():
        raise bad_request("The body is empty; send a JSON object.")
    try:
        data.decode("utf-8")  # parts that the parser skips have to be UTF-8 too
        return _OBJECT.decode(data), _RAW.decode(data)
    except UnicodeDecodeError as error:
        raise bad_request(f"The body is not UTF-8 (byte {error.start}).") from None
    except msgspec.ValidationError as error:
        if "out of range" in str(error):  # 1e999, or an integer of thousands of digits
            raise bad_request("The body has a number that is too large.") from None
        raise bad_request("The body is JSON but no object; send {...}.") from None
    except msgspec.DecodeError as error:
        raise bad_request(f"We could not parse the JSON body of your request: {error}.") from None
    except RecursionError:
        raise bad_request("The body's JSON is nested too deeply.") from None


def _whole_numbers(body: dict[str, Any]) -> dict[str, Any]:
    """The body with 5.0 as 5 wherever a field is read."""
    changed = {name: whole(value) for name, value in body.items() if type(value) is float}
    ours = body.get(EXTENSION)
    if isinstance(ours, dict):
        changed[EXTENSION] = {name: whole(value) for name, value in ours.items()}
    return {**body, **changed} if changed else body


def _invalid(text: str) -> Refusal:
    """msgspec's sentence, with the field as `param`."""
    sentence, _, where = text.partition(" - at `$.")
    if where:
        name = where.rstrip("`").split(".")[0].split("[")[0]
        return bad_request(f"`{where.rstrip('`')}`: {sentence}.", name)
    if "missing required field" in sentence:
        name = sentence.rpartition("field `")[2].rstrip("`")
        return bad_request(f"`{name}` is missing.", name)
    return bad_request(f"{sentence}.")
