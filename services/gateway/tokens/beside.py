"""Reads large bodies beside the gateway: `python -m mooncache.gateway.tokens.beside`, asked over its standard input.

To parse, render and tokenise tens of megabytes takes seconds and twenty times their size in memory. Here no stream
stops for it, and the memory goes back. Frames are a length of 8 bytes and msgpack (core/prepared.py); the process ends
with its input. It knows no secret: salts are what the gateway sends for one request.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from mooncache.gateway import heap
from mooncache.gateway.core import body, faults
from mooncache.gateway.core.body import Content, InferenceRequest, TokenizedPrompt
from mooncache.gateway.core.prepared import (
    COMMANDS,
    FRAME_BYTES_MAX,
    Drop,
    Parse,
    Parsed,
    Refused,
    Tokenize,
    TokenizerSource,
    message_of,
)
from mooncache.gateway.tokens.reader import PromptReader
from mooncache.kvcache.identity import tokenizer_digest
from mooncache.kvcache.keys import passport_from_json

# The gateway's event loop goes first: it has all streams.
_NICE: Final = 5
_READERS_MAX: Final = 64


class TokenizerCache:
    """Tokenizers by folder, loaded when first used."""

    def __init__(self, cache_bytes: int) -> None:
        self._cache_bytes = cache_bytes
        self._readers: dict[str, tuple[str, PromptReader | None]] = {}

    def get(self, source: TokenizerSource) -> PromptReader | None:
        """None when there is none or its files are not those that the gateway has read."""
        found = self._readers.get(source.folder)
        if found is None or found[0] != source.digest:
            if len(self._readers) >= _READERS_MAX:
                self._readers.pop(next(iter(self._readers)))
            folder = Path(source.folder)
            reader = None
            if tokenizer_digest(folder) == source.digest:
                reader = PromptReader.load(folder, cache_bytes=self._cache_bytes)
            found = self._readers[source.folder] = (source.digest, reader)
        return found[1]


def main() -> int:
    """Answer until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's Ctrl-C is the gateway's business
    os.nice(_NICE)
    source, out = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not come between two frames
    tokenizers = TokenizerCache(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    decoder = msgspec.msgpack.Decoder(COMMANDS)
    while (frame := read_frame(source)) is not None:
        ask = decoder.decode(frame)
        assert isinstance(ask, Parse)
        serve(ask, source, out, tokenizers, decoder)
        gc.collect()
        heap.trim()
    return 0


def serve(
    ask: Parse,
    source: BinaryIO,
    out: BinaryIO,
    tokenizers: TokenizerCache,
    decoder: msgspec.msgpack.Decoder[object],
) -> None:
    """One body: parse it, say what it wants, make what is asked for."""
    data = read_frame(source)
    assert data is not None
    try:
        request, content = body.parse(bytes(data), chat=ask.chat, choice_count_max=ask.choice_count_max)
    except faults.Refusal as wrong:
        write_frame(out, Refused(wrong.fault))
        return
    del data
    write_frame(out, Parsed(request))
    frame = read_frame(source)
    found = decoder.decode(frame) if frame is not None else Drop()
    if not isinstance(found, Tokenize):
        return
    try:
        body.check_ids(found.model_tokens, request, content)
        tokenized = tokenize(request, content, found, tokenizers)
    except faults.Refusal as wrong:
        write_frame(out, Refused(wrong.fault))
        return
    write_frame(out, message_of(body.forwarded(request, content), tokenized))


def tokenize(
    request: InferenceRequest, content: Content, make: Tokenize, tokenizers: TokenizerCache
) -> TokenizedPrompt | None:
    """Tokens and keys; None when they cannot be known for sure. Raises Refusal when they are too many."""
    source = make.source
    if source is None:
        return None
    try:
        reader = tokenizers.get(source)
    except Exception:  # noqa: BLE001  (files of others; the gateway has logged what is wrong with them)
        return None
    prompt = reader.read(content.fields, request.chat, scope=source.salt) if reader is not None else None
    if reader is None or prompt is None or not prompt.token_ids:
        return None
    longest = max(map(len, prompt.token_ids))
    body.check_length(make.model_tokens, longest, request.max_output_tokens, chat=request.chat)
    passport = passport_from_json(source.passport) if source.passport else None
    tokenized = reader.tokenized(
        content.fields, prompt, passport, salt=source.salt, public_salt=source.public_salt
    )
    return (
        replace(tokenized, prompt_json=body.prompt_json(tokenized.prompts)) if tokenized.keys else tokenized
    )


def read_frame(source: BinaryIO) -> bytes | None:
    """One frame; None at the end of the input."""
    head = source.read(8)
    if len(head) < 8:
        return None
    size = int.from_bytes(head, "little")
    if size > FRAME_BYTES_MAX:
        return None
    data = source.read(size)
    return data if len(data) == size else None


def write_frame(out: BinaryIO, message: object) -> None:
    """One frame."""
    data = msgspec.msgpack.encode(message)
    out.write(len(data).to_bytes(8, "little"))
    out.write(data)
    out.flush()


if __name__ == "__main__":
    sys.exit(main())
