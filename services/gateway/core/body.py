"""Request bodies: what the gateway has to know of a client's, checked, and what engines get of it, byte for byte.

The schema is open: a body is a JSON object of which `_Known` names the fields that are read here. A field that is not
named, and the value of one that is, goes to the engine exactly as it came. Fields that engines and gateways use among
themselves (`INTERNAL`) name hosts, blocks and queues: from a client they are dropped.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Raw

from mooncache.errors import PromptTooLong, TooLarge
from mooncache.gateway.core import faults
from mooncache.gateway.core.faults import Refusal, bad_request
from mooncache.kvcache.leg_hint import FIELD, LegHint

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
_SALT: Final = "cache_salt"
_PRIORITY: Final = "priority"
_PROMPT_SHAPES: Final = "a string, a list of strings, of tokens, or of lists of tokens"

_Count = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Number = int | float
_Tokens = list[Annotated[int, Meta(ge=0, lt=1 << 32)]]
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


_OBJECT: Final = msgspec.json.Decoder(dict[str, object])
_RAW: Final = msgspec.json.Decoder(dict[str, Raw])


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One request as the gateway understands it; small, so that it may be kept as long as the request lives."""

    chat: bool
    model: str
    stream: bool
    wants_usage: bool
    choices: int  # sequences that will be generated
    max_output_tokens: int  # 0 when the client did not say
    cache_salt: str
    session: str
    priority: int
    ttft_slo_ms: int
    tbt_slo_ms: int
    whole_prompt: bool
    """The engine has to compute every prompt token itself (log probabilities of the prompt, beam search), so neither a
    prefill leg nor a cache can help."""
    truncates: bool

    @property
    def path(self) -> str:
        """Path of the engine's endpoint."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"


@dataclass(frozen=True, slots=True)
class Content:
    """A body as it was sent. It takes many times its size: not to be kept."""

    fields: dict[str, Any] = field(repr=False)  # decoded
    raw: dict[str, Raw] = field(repr=False)  # each field's own bytes


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """What is known about one request's prompt."""

    lengths: tuple[int, ...]  # tokens of each prompt
    prompts: list[array[int]] = field(default_factory=list, repr=False)
    """The tokens themselves; given up when no leg needs them."""
    prompt_json: bytes = field(default=b"", repr=False)
    """The same tokens as JSON; given up alike."""
    keys: bytes = field(default=b"", repr=False)  # of its longest prompt
    content_keys: bytes = field(default=b"", repr=False)
    public_tokens: int = 0
    block_tokens: int = 0
    passport_root: bytes = b""

    @property
    def token_count(self) -> int:
        """Tokens of all prompts together."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be scheduled."""

    request: InferenceRequest
    forward: bytes = field(repr=False)  # the client's fields for the decode leg (see `forwarded`)
    tokenized: TokenizedPrompt | None = field(repr=False)


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
    if isinstance(known, _Chat):
        if "messages" not in body:
            raise bad_request("`messages` is missing; it is a list of objects with a role.", "messages")
    else:
        try:
            prompts = prompt_count(known.prompt, embedded=body.get("prompt_embeds") is not None)
        except RecursionError:
            raise bad_request("`prompt` is nested too deeply.", "prompt") from None
    answers = known.n or 1
    if answers > choice_count_max:
        raise bad_request(f"n is {answers}; the maximum is {choice_count_max}.", "n")
    if prompts > choice_count_max:
        raise bad_request(f"`prompt` has {prompts} prompts; the maximum is {choice_count_max}.", "prompt")
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


def forwarded(request: InferenceRequest, content: Content) -> bytes:
    """The client's fields as an engine gets them, a JSON object: internal ones dropped, all others as they came."""
    fields = {
        name: value
        for name, value in content.raw.items()
        if name not in INTERNAL and not name.startswith(INTERNAL_PREFIX) and name != _SALT
    }
    if request.stream and not request.wants_usage:
        # Counted for the tenant and for metrics; the client does not see it.
        options = content.fields.get("stream_options") or {}
        fields["stream_options"] = _raw({**options, "include_usage": True, "continuous_usage_stats": False})
    elif not request.stream:
        fields.pop("stream_options", None)  # engines refuse it without a stream
    return msgspec.json.encode(fields)


def decode_body(client_fields: bytes, salt: str, hint: LegHint, priority: int | None = None) -> bytes:
    """What `forwarded` made, for the engine that generates: with the request's salt and what it asks of the cache.

    priority: its place in the engine's queue; None: that engine takes none.
    """
    ours = msgspec.json.encode({_SALT: salt, FIELD: hint.to_params(), **_priority(priority)})
    return b"".join((memoryview(client_fields)[:-1], b",", ours[1:]))


def prompt_json(prompts: Sequence[array[int] | list[int]]) -> bytes:
    """The field `prompt` of a prefill leg: token ids."""
    lists = [list(tokens) for tokens in prompts]
    return msgspec.json.encode(lists[0] if len(lists) == 1 else lists)


def prefill_body(model: str, prompt: bytes, salt: str, hint: LegHint, priority: int | None = None) -> bytes:
    """The prompt alone, as tokens, for the engine that only fills the pool: one token is generated and thrown away.

    Everything else of the client's request (sampling, stop words, tools) is about tokens that this leg never makes.

    Args:
        prompt: what `prompt_json` made.
        priority: as in `decode_body`.
    """
    return msgspec.json.encode(
        {
            "model": model,
            "prompt": Raw(prompt),
            "max_tokens": 1,
            "temperature": 0,
            "stream": False,
            _SALT: salt,
            FIELD: hint.to_params(),
            **_priority(priority),
        }
    )


def _priority(value: int | None) -> dict[str, int]:
    """The field as engines read it: a lower one goes first."""
    return {} if value is None else {_PRIORITY: value}


def _decode(data: bytes) -> tuple[dict[str, object], dict[str, Raw]]:
    if not data.strip():
        raise bad_request("The body is empty; send a JSON object.")
    try:
        if not data.isascii():
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


def _whole_numbers(body: dict[str, object]) -> dict[str, object]:
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


def _raw(value: Any) -> Raw:
    return Raw(msgspec.json.encode(value))


def prompt_count(prompt: object, *, embedded: bool) -> int:
    """Number of prompts in the field `prompt` of a text completion. Raises Refusal.

    embedded: the body has prompt embeddings, so there need not be one.
    """
    if isinstance(prompt, str) or (prompt is None and embedded):
        return 1
    if prompt is None:
        raise bad_request(f"`prompt` is missing; it is {_PROMPT_SHAPES}.", "prompt")
    if not isinstance(prompt, list) or not prompt:
        raise bad_request(f"`prompt` has to be {_PROMPT_SHAPES}.", "prompt")
    first = prompt[0]
    kind: object = (
        list[str] if isinstance(first, str) else list[_Tokens] if isinstance(first, list) else _Tokens
    )
    try:
        _check_prompt(prompt, kind)
    except msgspec.ValidationError as error:
        raise bad_request(
            f"`prompt` must be {_PROMPT_SHAPES}, and must not mix kinds of items: {error}.", "prompt"
        ) from None
    if isinstance(first, list) and not all(prompt):
        raise bad_request("`prompt` has an empty list of tokens.", "prompt")
    return 1 if kind is _Tokens else len(prompt)


def longest_ids(prompt: object) -> int:
    """Tokens of the longest prompt that comes as token ids, known without reading it; 0 when none does."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], str):
        return 0
    return max(map(len, prompt)) if isinstance(prompt[0], list) else len(prompt)


def _check_prompt(prompt: list[object], kind: object) -> None:
    try:
        msgspec.convert(prompt, kind)
    except msgspec.ValidationError:
        msgspec.convert(_whole_prompt(prompt), kind)


def _whole_prompt(prompt: list[object]) -> list[object]:
    """With 5.0 as 5: to JSON they are the same."""
    return [_whole_prompt(item) if isinstance(item, list) else whole(item) for item in prompt]


def whole(value: object) -> object:
    """A whole number for a float that is one; everything else as it is."""
    return int(value) if type(value) is float and value.is_integer() else value
