"""The prompts of a request, read the way the engine will read them.

The invariant: an answer is exactly what the engine computes for the same body, or it is None.
"""

from __future__ import annotations

import asyncio
from array import array
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mooncache.gateway.core.body import TokenizedPrompt
from mooncache.gateway.tokens.chains import ChainMemo
from mooncache.gateway.tokens.encoder import Encoder, EncodingPlan
from mooncache.gateway.tokens.loading import load_templates, load_tokenizer
from mooncache.gateway.tokens.template import ChatTemplates, Unreadable, flag
from mooncache.kvcache.keys import content_passport, request_keys, salted
from mooncache.kvcache.passport import Passport

_INLINE_CHARS = 16_384  # about 2 ms of tokenising: less than a hop to a thread costs under load
_TOKEN_ID_MAX = 0xFFFF_FFFF

# Of the memory: 32 tokens take two keys, 64 bytes, and twice 128 bytes as tokens.
_KEYS_SHARE = 5


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of each prompt of one request, in the request's order."""

    token_ids: list[array[int]] = field(default_factory=list)
    """Arrays of 32-bit unsigned integers ("I"). Chat requests have one."""
    texts: list[str | None] = field(default_factory=list)
    """What was encoded, None where the request gave token ids."""

    @property
    def token_count(self) -> int:
        """Tokens of all prompts together."""
        return sum(map(len, self.token_ids))


class PromptReader:
    """Tokeniser and chat template of one model. Safe to use from several threads."""

    def __init__(
        self,
        encoder: Encoder,
        templates: ChatTemplates,
        *,
        threads: int = 1,
        inline_chars: int = _INLINE_CHARS,
        chains: ChainMemo | None = None,
    ) -> None:
        self._encoder = encoder
        self._chains = chains or ChainMemo(0)
        self._templates = templates
        self._inline_chars = inline_chars
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, folder: Path | str, *, cache_bytes: int = 0, threads: int = 1) -> PromptReader | None:
        """Read a tokenizer's folder; None without a tokenizer.json. This may take seconds: call it in a thread.

        Args:
            folder: holds tokenizer.json, tokenizer_config.json and perhaps chat_template.jinja.
            cache_bytes: memory for tokens and block keys of earlier texts.
            threads: threads for long texts.

        Raises:
            ValueError, OSError, jinja2.TemplateError: files that are there and cannot be used.
        """
        folder = Path(folder)
        loaded = load_tokenizer(folder)
        if loaded is None:
            return None
        tokenizer, specials = loaded
        for_keys = cache_bytes // _KEYS_SHARE
        encoder = Encoder(tokenizer, cache_bytes=cache_bytes - for_keys)
        chains = ChainMemo(for_keys)
        return cls(encoder, load_templates(folder, specials), threads=threads, chains=chains)

    def read(self, body: dict[str, Any], chat: bool, *, scope: str = "") -> Prompt | None:
        """Tokens of a request's prompts; None when only the engine can know them.

        Args:
            body: of POST /v1/chat/completions when `chat`, else of /v1/completions. Not changed.
            scope: the tenant: cached tokens of one scope are never used for another, so times tell nothing.
        """
        try:
            texts, special = self._texts(body, chat)
            return self._encoded(texts, special, scope)
        except (Unreadable, ValueError):
            return None

    async def read_async(self, body: dict[str, object], chat: bool, *, scope: str = "") -> Prompt | None:
        """As `read`; when much has to be encoded a thread does it, so that the event loop goes on."""
        try:
            texts, special = self._texts(body, chat)
            if sum(len(text) for text in texts if isinstance(text, str)) <= self._inline_chars:
                return self._encoded(texts, special, scope)
            plans = [self._plan(text, special, scope) for text in texts]
            new_chars = sum(plan.new_chars for plan in plans if isinstance(plan, EncodingPlan))
            if new_chars <= self._inline_chars:
                return self._finished(plans)
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._finished, plans)
        except (Unreadable, ValueError):
            return None

    def tokenized(
        self,
        fields: dict[str, object],
        prompt: Prompt,
        passport: Passport | None,
        *,
        salt: str,
        public_salt: str,
    ) -> TokenizedPrompt:
        """The tokens of `read` with their block keys: the one rule for prompts read in the gateway and beside it.

        Args:
            passport: of the model's engines; None: there are no keys.
            public_salt: "" while nothing is shared.
        """
        lengths = tuple(map(len, prompt.token_ids))
        if passport is None:
            return TokenizedPrompt(lengths, prompt.token_ids)
        longest = max(prompt.token_ids, key=len)
        public = self.public_tokens(fields, prompt, scope=salt) if public_salt else 0
        content = content_passport(passport.block_tokens)
        private, content_keys = self._chains.chain_keys(salted(passport, salt), content, longest, scope=salt)
        return TokenizedPrompt(
            lengths,
            prompt.token_ids,
            keys=request_keys(
                passport,
                longest,
                salt=salt,
                public_tokens=public,
                public_salt=public_salt,
                private=private,
            ),
            content_keys=content_keys,
            public_tokens=public,
            block_tokens=passport.block_tokens,
            passport_root=passport.root(),
        )

    def public_tokens(self, body: dict[str, object], prompt: Prompt, *, scope: str = "") -> int:
        """Leading tokens of a chat `prompt` that come from body["mooncache"]["public_messages"] messages alone.

        They are the common beginning of the prompt and of the tokens of those messages by themselves, so
        nothing that follows, nor tools, documents or other settings of the request, can be in them. 0 when the body
        declares nothing.
        """
        ours = body.get("mooncache")
        count = ours.get("public_messages") if isinstance(ours, dict) else None
        messages = body.get("messages")
        if (
            type(count) is not int
            or count < 1
            or not isinstance(messages, list)
            or len(prompt.token_ids) != 1
        ):
            return 0
        alone = {"messages": messages[:count], "add_generation_prompt": False}
        public = self.read(alone, True, scope=scope)
        return _common(public.token_ids[0], prompt.token_ids[0]) if public is not None else 0

    def close(self) -> None:
        """End the threads without waiting; running encodings end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _texts(self, body: dict[str, object], chat: bool) -> tuple[list[str | array[int]], bool]:
        """The prompts as text or as ids, and whether begin and end tokens are added."""
        if body.get("truncate_prompt_tokens") is not None or body.get("prompt_embeds") is not None:
            raise Unreadable("only the engine can enforce its limits")
        special = flag(body, "add_special_tokens", not chat)
        if chat:
            return [self._templates.choose(body).render(body)], special
        return _completion_prompts(body.get("prompt")), special

    def _encoded(self, prompts: list[str | array[int]], special: bool, scope: str) -> Prompt:
        return self._finished([self._plan(prompt, special, scope) for prompt in prompts])

    def _plan(self, prompt: str | array[int], special: bool, scope: str) -> EncodingPlan | array[int]:
        if not isinstance(prompt, str):
            return prompt
        return self._encoder.plan(prompt, add_special_tokens=special, scope=scope)

    def _finished(self, plans: list[EncodingPlan | array[int]]) -> Prompt:
        ids = [self._encoder.finish(plan) if isinstance(plan, EncodingPlan) else plan for plan in plans]
        return Prompt(ids, [plan.text if isinstance(plan, EncodingPlan) else None for plan in plans])


def _completion_prompts(prompt: object) -> list[str | array[int]]:
    """The field `prompt`: a text, texts, token ids, or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise Unreadable("prompt")
    if all(isinstance(one, str) for one in prompt):
        return list(prompt)
    if all(isinstance(one, list) and one for one in prompt):
        return [_ids(one) for one in prompt]
    return [_ids(prompt)]


def _ids(given: list[Any]) -> array[int]:
    if not all(type(one) is int and 0 <= one <= _TOKEN_ID_MAX for one in given):
        raise Unreadable("prompt")
    return array("I", given)


def _common(left: array[int], right: array[int]) -> int:
    """Length of the common beginning."""
    count = min(len(left), len(right))
    if left[:count] == right[:count]:
        return count
    return next(at for at in range(count) if left[at] != right[at])
