"""The `docker` command, with a deadline: it knows contexts, DOCKER_HOST and credentials, so this code need not."""

from __future__ import annotations

import asyncio
from typing import Final

from mooncache.errors import (
    ConfigInvalid,
    DeadlineExceeded,
    EngineUnavailable,
    MooncacheError,
    PermissionDenied,
    Unsupported,
)

CALL_S: Final = 20.0
_SAID_CHARS_MAX: Final = 300


async def docker(*words: str) -> bytes:
    """What `docker WORDS` prints, within `CALL_S`.

    Raises:
        Unsupported: there is no such command here.
        PermissionDenied: this user may not use the engine.
        ConfigInvalid: no engine answers, or it refuses.
        EngineUnavailable: the container is gone.
        DeadlineExceeded: no answer in time.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            "docker",
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        raise Unsupported(
            f"The `docker` command cannot be started ({error.strerror}); containers are found by it."
        ) from None
    try:
        async with asyncio.timeout(CALL_S):
            printed, said = await process.communicate()
    except TimeoutError:
        raise DeadlineExceeded(f"`docker {words[0]}` did not answer within {CALL_S:g} s.") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise refusal(words[0], said)
    return printed


def refusal(word: str, said: bytes) -> MooncacheError:
    """What `docker WORD` said on its standard error, as an error of ours."""
    text = said.decode(errors="replace").strip()[-_SAID_CHARS_MAX:]
    small = text.lower()
    if "permission denied" in small and "daemon" in small:
        return PermissionDenied(f"This user may not use the Docker engine: {text}")
    if "no such" in small or "is not running" in small:
        return EngineUnavailable(f"docker {word}: {text}")
    return ConfigInvalid(f"docker {word}: {text or 'it failed and said nothing'}")
