"""What OpenAI requests say, checked: bodies become prompts of tokens and settings, or an error that names the field.

The schema is open: fields that mean nothing here are ignored. Fields that would change the answer and that this engine
does not have (penalties, structured output, images ...) are refused by name, never silently dropped. Error texts begin
with the field ("n: ..."), from which the server takes OpenAI's `param`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from mooncache.errors import InvalidArgument, ModelUnknown, PromptTooLong
from mooncache.hf_engine.core.sequence import Sampling
from mooncache.hf_engine.tokens import ChatTokenizer
from mooncache.kvcache.leg_hint import FIELD, LegHint

CHOICES_MAX = 128
LOGPROBS_MAX = 20
STOPS_MAX = 16
_COMPLETION_TOKENS_DEFAULT = 16
_INT64_MAX = 2**63 - 1

# field -> values that mean "not used"
_REFUSED: dict[str, tuple[object, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "chat_template": (None,),
    "documents": (None,),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None, {}),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
}


class _StreamFields(BaseModel):
    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class _Body(BaseModel):
    """Fields that completions and chat share. `extra` fields were looked at before."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=None, ge=0, le=100, allow_inf_nan=False)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    n: int | None = Field(default=None, ge=1, le=CHOICES_MAX)
    seed: int | None = Field(default=None, ge=-_INT64_MAX, le=_INT64_MAX)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=1024)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: _StreamFields | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = Field(default=None, max_length=4096)
    priority: int | None = Field(default=None, ge=-_INT64_MAX, le=_INT64_MAX)


class _CompletionFields(_Body):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=LOGPROBS_MAX)


class _ChatFields(_Body):
    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, object]] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=LOGPROBS_MAX)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, object] | None = None
    reasoning_effort: str | None = Field(default=None, max_length=64)


_AnyBody = TypeVar("_AnyBody", _ChatFields, _CompletionFields)


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A request that can be served: one sequence for each prompt and choice, choices of a prompt side by side."""

    chat: bool
    prompts: tuple[list[int], ...]
    n: int
    sampling: tuple[Sampling, ...]  # one for each prompt
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    skip_special_tokens: bool
    salt: str
    hint: LegHint
    priority: int


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What a request may ask for."""

    model: str
    tokens_max: int
    vocab: int
    eos_ids: frozenset[int]


def parse(body: object, tokenizer: ChatTokenizer, limits: RequestLimits, *, chat: bool) -> ParsedRequest:
    """The request of a decoded body.

    Raises:
        ModelUnknown, PromptTooLong, InvalidArgument: the text says which field and why.
    """
    if not isinstance(body, dict):
        raise InvalidArgument("The body has to be a JSON object.")
    for name, neutral in _REFUSED.items():
        if name in body and body[name] not in neutral:
            raise InvalidArgument(f"{name}: this engine does not support it; leave the field out.")
    fields: _ChatFields | _CompletionFields = (
        _validated(_ChatFields, body) if chat else _validated(_CompletionFields, body)
    )
    if fields.model is not None and fields.model != limits.model:
        raise ModelUnknown(f"model: The model `{fields.model}` does not exist.")
    prompts = (
        _chat_prompt(fields, tokenizer) if isinstance(fields, _ChatFields) else _prompts(fields, tokenizer)
    )
    n = fields.n or 1
    if len(prompts) * n > CHOICES_MAX:
        raise InvalidArgument(f"n: {len(prompts)} prompts times n = {n} is more than {CHOICES_MAX} choices.")
    for prompt in prompts:
        if not prompt:
            raise InvalidArgument("prompt: it has to have at least one token.")
        if not 0 <= min(prompt) <= max(prompt) < limits.vocab:
            raise InvalidArgument(f"prompt: token ids have to be from 0 to {limits.vocab - 1}.")
    return ParsedRequest(
        chat=chat,
        prompts=tuple(prompts),
        n=n,
        sampling=tuple(_sampling(fields, len(prompt), limits) for prompt in prompts),
        stops=_stops(fields.stop),
        stream=bool(fields.stream),
        include_usage=bool(fields.stream_options and fields.stream_options.include_usage),
        return_token_ids=bool(fields.return_token_ids),
        skip_special_tokens=fields.skip_special_tokens is not False,
        salt=fields.cache_salt or "",
        hint=LegHint.from_params(body.get(FIELD)),
        priority=fields.priority or 0,
    )


def _validated(kind: type[_AnyBody], body: dict[str, object]) -> _AnyBody:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = str(first["loc"][0]) if first["loc"] else "body"
        raise InvalidArgument(f"{where}: {first['msg']}") from None


def _prompts(fields: _CompletionFields, tokenizer: ChatTokenizer) -> list[list[int]]:
    given: Any = fields.prompt  # one of four shapes, as pydantic has checked
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise InvalidArgument("prompt: it has to have at least one token.")
    if len(given) > CHOICES_MAX:
        raise InvalidArgument(f"prompt: at most {CHOICES_MAX} prompts.")
    special = fields.add_special_tokens is not False
    return [tokenizer.encode(one, special) if isinstance(one, str) else one for one in given]


def _chat_prompt(fields: _ChatFields, tokenizer: ChatTokenizer) -> list[list[int]]:
    variables = dict(fields.chat_template_kwargs or {})
    effort = fields.reasoning_effort
    if effort is not None:
        variables.setdefault("enable_thinking", effort != "none")
        variables["reasoning_effort"] = effort
    tokens = tokenizer.encode_chat(
        fields.messages,
        tools=fields.tools,
        add_generation_prompt=fields.add_generation_prompt is not False,
        continue_final_message=bool(fields.continue_final_message),
        variables=variables,
    )
    return [tokens]


def _sampling(fields: _ChatFields | _CompletionFields, prompt_count: int, limits: RequestLimits) -> Sampling:
    room = limits.tokens_max - prompt_count
    wanted = fields.max_completion_tokens if fields.max_completion_tokens is not None else fields.max_tokens
    if wanted is None:
        wanted = room if isinstance(fields, _ChatFields) else min(_COMPLETION_TOKENS_DEFAULT, room)
    if wanted == 0:
        raise InvalidArgument("max_tokens: it has to be at least 1.")
    if room < 1 or wanted > room:
        raise PromptTooLong(
            f"max_tokens: This model's maximum context length is {limits.tokens_max} tokens. However, you requested "
            f"{max(wanted, 1)} output tokens and your prompt has {prompt_count}; shorten one of them."
        )
    if (fields.min_tokens or 0) > wanted:
        raise InvalidArgument(f"min_tokens: it is more than max_tokens = {wanted}.")
    stop_ids = set(fields.stop_token_ids or ())
    if any(not 0 <= token < limits.vocab for token in stop_ids):
        raise InvalidArgument(f"stop_token_ids: token ids have to be from 0 to {limits.vocab - 1}.")
    if not fields.ignore_eos:
        stop_ids |= limits.eos_ids
    if isinstance(fields, _ChatFields):
        logprobs = (fields.top_logprobs or 0) if fields.logprobs else -1
    else:
        logprobs = -1 if fields.logprobs is None else fields.logprobs
    return Sampling(
        max_tokens=wanted,
        min_tokens=fields.min_tokens or 0,
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=max(0, fields.top_k or 0),
        min_p=fields.min_p or 0.0,
        seed=fields.seed,
        stop_ids=frozenset(stop_ids),
        logprobs=logprobs,
    )


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > STOPS_MAX or any(not 0 < len(stop) <= 1024 for stop in stops):
        raise InvalidArgument(f"stop: at most {STOPS_MAX} strings of 1 to 1024 characters.")
    return stops
