"""Answers in OpenAI's shapes: whole, and as chunks of a stream."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mooncache.hf_engine.core.sequence import FinishReason
from mooncache.hf_engine.core.text import TextStream
from mooncache.hf_engine.output import Output
from mooncache.hf_engine.requests import ParsedRequest
from mooncache.hf_engine.sampling import SampledToken
from mooncache.hf_engine.tokens import ChatTokenizer
from mooncache.kvcache.leg_hint import FIELD, CacheOutcome, CacheReport, most_loaded


@dataclass(slots=True)
class ChoiceBuilder:
    """What one sequence has given so far."""

    index: int
    prompt: list[int]
    text: TextStream
    parts: list[str] = field(default_factory=list)
    chosen: list[SampledToken] = field(default_factory=list)
    cache: CacheReport | None = None
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    chars: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in a choice: text, tokens, and whether they are its first ones."""

    text: str
    chosen: tuple[SampledToken, ...]
    first: bool


class CompletionBuilder:
    """The answer to one request as it grows."""

    def __init__(
        self, asked: ParsedRequest, tokenizer: ChatTokenizer, *, ident: str, model: str, created: int
    ) -> None:
        self.asked, self._tokenizer = asked, tokenizer
        self._head = {"id": ident, "created": created, "model": model}

        def decode(ids: list[int]) -> str:
            return tokenizer.decode(ids, skip_special=asked.skip_special_tokens)

        self.choices = [
            ChoiceBuilder(number * asked.n + copy, prompt, TextStream(decode, asked.stops))
            for number, prompt in enumerate(asked.prompts)
            for copy in range(asked.n)
        ]

    @property
    def finished(self) -> bool:
        """True when every choice is over."""
        return all(choice.finish for choice in self.choices)

    def take(self, output: Output) -> tuple[ChoiceBuilder, Delta] | None:
        """Add an output. None when the choice was over already (by a stop string)."""
        choice = self.choices[output.index]
        choice.cache = output.cache or choice.cache
        if choice.finish:
            return None
        first = not choice.chosen
        text = ""
        new: tuple[SampledToken, ...] = ()
        if output.chosen is not None:
            choice.chosen.append(output.chosen)
            new = (output.chosen,)
            if output.stop_id is None:  # the token that ends an answer is not part of its text
                text = choice.text.push(output.chosen.token)
        if output.finish:
            text += choice.text.finish()
            choice.finish, choice.stop_reason = output.finish, output.stop_id
        if choice.text.stopped:
            choice.finish, choice.stop_reason = FinishReason.STOP, choice.text.stopped
        choice.parts.append(text)
        return choice, Delta(text, new, first)

    # --- whole -----------------------------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        chat = self.asked.chat
        body = {**self._head, "object": "chat.completion" if chat else "text_completion"}
        body["choices"] = [self._whole_choice(choice) for choice in self.choices]
        if chat and self.asked.return_token_ids:
            body["prompt_token_ids"] = self.choices[0].prompt
        return {**body, "usage": self.usage(), FIELD: self.cache_report().to_params()}

    def _whole_choice(self, choice: ChoiceBuilder) -> dict[str, object]:
        text = "".join(choice.parts)
        found: dict[str, Any] = {
            "index": choice.index,
            "logprobs": self._logprobs(choice, choice.chosen),
            "finish_reason": choice.finish,
            "stop_reason": choice.stop_reason,
        }
        if self.asked.chat:
            found["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            found["text"] = text
        if self.asked.return_token_ids:
            found["token_ids"] = [chosen.token for chosen in choice.chosen]
            if not self.asked.chat:
                found["prompt_token_ids"] = choice.prompt
        return found

    # --- streamed --------------------------------------------------------------------------------------------

    def chunk(self, choice: ChoiceBuilder, delta: Delta) -> dict[str, object]:
        """The next event of a stream."""
        found: dict[str, Any] = {
            "index": choice.index,
            "logprobs": self._logprobs(choice, delta.chosen),
            "finish_reason": choice.finish,
        }
        if choice.finish:
            found["stop_reason"] = choice.stop_reason
        if self.asked.chat:
            found["delta"] = {"content": delta.text}
        else:
            found["text"] = delta.text
        if self.asked.return_token_ids:
            found["token_ids"] = [chosen.token for chosen in delta.chosen]
            if delta.first:
                found["prompt_token_ids"] = choice.prompt
        body = self._chunk([found])
        if self.finished:
            body[FIELD] = self.cache_report().to_params()
        return body

    def role_chunk(self, choice: ChoiceBuilder) -> dict[str, object]:
        """The first event of a choice of a chat."""
        delta = {"role": "assistant", "content": ""}
        return self._chunk([{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}])

    def usage_chunk(self) -> dict[str, object]:
        """The last event when usage was asked for."""
        return {**self._chunk([]), "usage": self.usage()}

    def _chunk(self, choices: list[dict[str, object]]) -> dict[str, object]:
        kind = "chat.completion.chunk" if self.asked.chat else "text_completion"
        body: dict[str, object] = {**self._head, "object": kind, "choices": choices}
        if self.asked.include_usage and choices:
            body["usage"] = None
        return body

    # --- numbers ---------------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """Token counts; a prompt counts once, whatever n is."""
        prompt = sum(len(tokens) for tokens in self.asked.prompts)
        completion = sum(len(choice.chosen) for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cache_report().hit_tokens},
        }

    def cache_report(self) -> CacheReport:
        """What the cache did, over the first choice of every prompt; the outcome is the worst one."""
        parts = [choice.cache for choice in self.choices[:: self.asked.n] if choice.cache]
        if not parts:
            return CacheReport()
        outcomes = [part.outcome for part in parts]
        numbers = {
            name: sum(getattr(part, name) for part in parts)
            for name in CacheReport.__slots__
            if name not in {"outcome", "reason", "waited_ms", "load_ms", "hidden_ms", "loaded_from"}
        }
        return CacheReport(
            **numbers,
            waited_ms=max(part.waited_ms for part in parts),
            load_ms=max(part.load_ms for part in parts),
            hidden_ms=max(part.hidden_ms for part in parts),
            reason=next((part.reason for part in parts if part.reason), ""),
            loaded_from=most_loaded(place for part in parts for place in part.loaded_from),
            outcome=next(
                (outcome for outcome in outcomes if outcome is not CacheOutcome.HIT), CacheOutcome.HIT
            ),
        )

    def _logprobs(
        self, choice: ChoiceBuilder, chosen: list[SampledToken] | tuple[SampledToken, ...]
    ) -> dict[str, object] | None:
        if self.asked.sampling[0].logprobs < 0:
            return None
        if self.asked.chat:
            return {"content": [self._chat_logprob(one) for one in chosen]}
        tokens = [self._piece(one.token) for one in chosen]
        offsets = []
        for token in tokens:
            offsets.append(choice.chars)
            choice.chars += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in chosen],
            "top_logprobs": [
                {self._piece(token): value for token, value in (*one.top, (one.token, one.logprob))}
                for one in chosen
            ],
            "text_offset": offsets,
        }

    def _chat_logprob(self, one: SampledToken) -> dict[str, object]:
        return {
            **self._entry(one.token, one.logprob),
            "top_logprobs": [self._entry(token, value) for token, value in one.top],
        }

    def _entry(self, token: int, value: float) -> dict[str, object]:
        piece = self._piece(token)
        return {"token": piece, "logprob": value, "bytes": list(piece.encode())}

    def _piece(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special=False)
