"""An engine behind an OpenAI-compatible URL: one question a call, bounded in time and size, from any thread."""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from mooncache.errors import InvalidArgument

_ANSWER_BYTES_MAX: Final = 16 << 20
_MESSAGE_CHARS_MAX: Final = 200
_CONTENT: Final = "application/json"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What `--set` may name for `--engine`.

    Attributes:
        model: name of the model; the first one that the engine lists by default.
        api_key, api_key_file: the key that questions carry, or a file with it.
        other_key_file: a key of another tenant, for promises about tenants.
        reference: URL of an engine with the same model, whose answers are the truth. Without one each truth is
            computed by the engine itself under a `cache_salt` of its own.
        ca_file: certificates that an https URL is checked against; the system's by default.
        call_limit_s: seconds that one question may take on a machine that is not broken.
        max_tokens: tokens of each answer.
        many: prompts of the try that fills caches.
        break_command, mend_command: commands that break and mend what lies below the engine, such as
            `kill -STOP 123`; without a shell.
    """

    model: str = ""
    api_key: str = ""
    api_key_file: str = ""
    other_key_file: str = ""
    reference: str = ""
    ca_file: str = ""
    call_limit_s: float = 60.0
    max_tokens: int = 12
    many: int = 48
    break_command: str = ""
    mend_command: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> EngineSettings:
        """Settings from name=value pairs. Raises InvalidArgument: an unknown name or a value of the wrong kind."""
        return checked_settings(cls, config, "An engine")


Settings = TypeVar("Settings")


def checked_settings(cls: type[Settings], config: Mapping[str, Any], whose: str) -> Settings:
    """A dataclass of settings, each with a default, from name=value pairs. Raises InvalidArgument."""
    kinds = {field.name: type(field.default) for field in fields(cls)}  # type: ignore[arg-type]
    for name, value in config.items():
        if name not in kinds:
            raise InvalidArgument(f"{whose} has no setting {name}. Settings: {', '.join(kinds)}.")
        takes = (int, float) if kinds[name] is float else kinds[name]
        if not isinstance(value, takes) or isinstance(value, bool):
            raise InvalidArgument(f"--set {name}: {value!r} is no {kinds[name].__name__}.")
        if isinstance(value, int | float) and value <= 0:
            raise InvalidArgument(f"--set {name}: {value!r} must be above 0.")
    return cls(**config)


@dataclass(frozen=True, slots=True)
class CompletionAnswer:
    """An answer as far as it is judged. `cached_tokens` is None when the engine does not say."""

    text: str
    finish: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


class EngineRefusedError(Exception):
    """The engine answered a question with a status other than 200, or with something else than an answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message[:_MESSAGE_CHARS_MAX]}")
        self.status = status


class EngineTarget:
    """The engine at a URL."""

    def __init__(self, url: str, settings: EngineSettings, key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidArgument(f"{url} is no URL of an engine: write http://HOST:PORT.")
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._tls: ssl.SSLContext | None = None
        if parts.scheme == "https":
            try:
                self._tls = ssl.create_default_context(cafile=settings.ca_file or None)
            except OSError as error:
                raise InvalidArgument(f"--set ca_file: {settings.ca_file} cannot be read: {error}.") from None
        self.url, self.settings = url, settings
        self._key = key if key is not None else key_of(settings.api_key_file) or settings.api_key
        self.model = settings.model or self._first_model(url)

    def body(self, prompt: str, /, **changes: Any) -> dict[str, Any]:
        """The body of a greedy completion."""
        base = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": self.settings.max_tokens,
            "temperature": 0,
        }
        return {**base, **changes}

    def ask(self, prompt: str, **changes: Any) -> CompletionAnswer:
        """The whole answer. Raises OSError, EngineRefusedError."""
        with self._post(self.body(prompt, **changes)) as reply:
            document = _document(reply.whole())
        choice = document["choices"][0]
        return _answer(str(choice["text"]), choice.get("finish_reason"), document.get("usage"))

    def stream(self, prompt: str, cut_after: int | None = None, **changes: Any) -> CompletionAnswer | None:
        """The answer of a stream, or None when it was cut off after so many events.

        Raises:
            OSError, EngineRefusedError
        """
        asked = self.body(prompt, stream=True, stream_options={"include_usage": True}, **changes)
        text, finish, usage, events = "", None, None, 0
        with self._post(asked, waits=cut_after != 0) as reply:
            if cut_after == 0:
                return None
            for document in reply.events():
                events += 1
                if cut_after is not None and events >= cut_after:
                    return None
                for choice in document.get("choices") or ():
                    text += str(choice.get("text") or "")
                    finish = choice.get("finish_reason") or finish
                usage = document.get("usage") or usage
        return _answer(text, finish, usage)

    def status_of(self, body: bytes) -> int:
        """The status that a body gets. Raises OSError."""
        try:
            with self._post(body) as reply:
                reply.whole()
                return 200
        except EngineRefusedError as refused:
            return refused.status

    def _first_model(self, url: str) -> str:
        try:
            with self._call("GET", "/models", b"") as reply:
                return str(_document(reply.whole())["data"][0]["id"])
        except (OSError, http.client.HTTPException, EngineRefusedError, LookupError) as error:
            raise InvalidArgument(
                f"{url} names no model: {error}. Start the engine, or --set model=NAME."
            ) from None

    def _post(self, body: dict[str, Any] | bytes, *, waits: bool = True) -> _Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self._call("POST", "/completions", data, waits=waits)

    def _call(self, method: str, path: str, data: bytes, *, waits: bool = True) -> _Reply:
        limit_s = self.settings.call_limit_s
        link: http.client.HTTPConnection
        if self._tls is not None:
            link = http.client.HTTPSConnection(self._host, self._port, timeout=limit_s, context=self._tls)
        else:
            link = http.client.HTTPConnection(self._host, self._port, timeout=limit_s)
        headers = {"Content-Type": _CONTENT}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            link.request(method, self._path + path, data or None, headers)
            return _Reply(link, time.monotonic() + limit_s, waits=waits)
        except BaseException:
            link.close()
            raise


class _Reply:
    """An answer while it comes; the connection ends with it."""

    def __init__(self, link: http.client.HTTPConnection, deadline_s: float, *, waits: bool) -> None:
        self._link, self._deadline_s = link, deadline_s
        self._came = 0
        if not waits:
            return
        self._response = link.getresponse()
        if self._response.status != 200:
            raise EngineRefusedError(
                self._response.status, self._response.read(4096).decode(errors="replace")
            )

    def __enter__(self) -> _Reply:
        return self

    def __exit__(self, *_: object) -> None:
        self._link.close()

    def whole(self) -> bytes:
        """The body. Raises OSError."""
        found = b""
        while part := self._response.read1(65_536):
            self._count(part)
            found += part
        return found

    def events(self) -> Iterator[dict[str, Any]]:
        """Documents of a stream of server-sent events, until its end. Raises OSError, EngineRefusedError."""
        while line := self._response.readline(_ANSWER_BYTES_MAX):
            self._count(line)
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            document = _document(data)
            if "error" in document:
                raise EngineRefusedError(200, f"an error in the stream: {document['error']}")
            yield document
        raise EngineRefusedError(200, "the stream ended without [DONE]")

    def _count(self, part: bytes) -> None:
        self._came += len(part)
        if self._came > _ANSWER_BYTES_MAX:
            raise EngineRefusedError(200, f"the answer has more than {_ANSWER_BYTES_MAX} bytes")
        if time.monotonic() > self._deadline_s:
            raise TimeoutError("the answer came too slowly")


def key_of(path: str) -> str:
    """The API key in a file; "" without a path. Raises InvalidArgument."""
    if not path:
        return ""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"The key in {path} cannot be read: {error}.") from None


def _document(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise EngineRefusedError(200, f"no JSON: {data[:80]!r}") from None
    if not isinstance(found, dict):
        raise EngineRefusedError(200, f"no object: {data[:80]!r}")
    return found


def _answer(text: str, finish: object, usage: object) -> CompletionAnswer:
    if not isinstance(usage, dict):
        raise EngineRefusedError(200, "the answer has no usage")
    details = usage.get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return CompletionAnswer(
        text,
        str(finish or ""),
        int(usage.get("prompt_tokens") or 0),
        int(usage.get("completion_tokens") or 0),
        int(cached) if cached is not None else None,
    )
