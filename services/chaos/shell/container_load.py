"""The pool's client of a run on containers: in one more container, in the network where names of parts mean something.

It has the image, settings, token and sockets of one part, so it reads through shared memory as engines do. It lives as
long as its standard input: when the run dies, it ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from typing import Final

from mooncache.chaos.core.containers import ContainerPart
from mooncache.chaos.core.records import PoolTally
from mooncache.chaos.shell.docker_command import CALL_S, refusal
from mooncache.chaos.shell.pool_load import HUNG_S, PoolLoad
from mooncache.errors import ProtocolError

_MODULE: Final = "mooncache.chaos.shell.container_load"
_START_S: Final = 90.0
_BEGUN: Final = b"begun"
_HARDENED: Final = (
    "--read-only",
    "--tmpfs=/tmp",
    "--cap-drop",
    "ALL",
    "--security-opt",
    "no-new-privileges",
)
_MEMORY: Final = "512m"


class ContainerLoad:
    """A `PoolWork` beside a part: with that one's image, networks, volumes (read only) and settings."""

    def __init__(self, tally: PoolTally, run: str, beside: ContainerPart) -> None:
        self._tally, self._run, self._beside = tally, run, beside
        self._name = f"mooncache-chaos-{run}"
        # No pipe, because nothing reads it meanwhile, and a full one would stop the client.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - `end` closes it
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin.

        Raises:
            Unsupported, PermissionDenied, ConfigInvalid: the container does not start or does not begin in time, for
                example because its image is of an earlier version.
        """
        settings = {
            name: value for name, value in self._beside.settings.items() if name.startswith("MOONCACHE_")
        }
        self._process = subprocess.Popen(
            self._words(settings),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, **settings},  # values stay out of the command line
            process_group=0,  # Ctrl-C is for the run, which ends this one in its turn
        )
        late = threading.Timer(_START_S, self._give_up)
        late.start()
        try:
            assert self._process.stdout is not None
            begun = self._process.stdout.readline().strip() == _BEGUN
        finally:
            late.cancel()
        if not begun:
            self._give_up()
            self._process.communicate(timeout=CALL_S)
            raise refusal("run", self._words_said())

    def end(self) -> None:
        """Stop; what it saw is in the tally. One that does not end counts as hanging.

        One that ended by itself, for example because it was killed, has read nothing; its last words are an error.
        """
        if self._process is None:
            return
        try:
            printed, _ = self._process.communicate(b"", timeout=HUNG_S + CALL_S)
        except subprocess.TimeoutExpired:
            self._tally.hung += 1
            self._give_up()
            self._process.communicate(timeout=CALL_S)
            return
        finally:
            said = self._words_said()
            self._said.close()
        try:
            read_tally(printed, self._tally)
        except ProtocolError as error:
            self._tally.errors[f"{error.message} {said.decode(errors='replace').strip()[-300:]}"] += 1

    def _words_said(self) -> bytes:
        self._said.seek(0)
        return self._said.read()

    def _words(self, settings: dict[str, str]) -> list[str]:
        words = ["docker", "run", "--rm", "-i", "--pull", "never", "--name", self._name, "--no-healthcheck"]
        words += ["--network", self._beside.networks[0], "--volumes-from", f"{self._beside.container}:ro"]
        words += [*_HARDENED, "--memory", _MEMORY]
        for name in settings:
            words += ["-e", name]
        return [*words, self._beside.image, _MODULE, self._run]

    def _give_up(self) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(
                ["docker", "rm", "-f", self._name],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=CALL_S,
                check=False,
            )
        if self._process is not None:
            self._process.kill()


def tally_text(tally: PoolTally) -> str:
    """A line for `read_tally`."""
    fields = dataclasses.fields(tally)  # not `asdict`, which makes pairs of a Counter's keys
    return json.dumps({field.name: getattr(tally, field.name) for field in fields}) + "\n"


def read_tally(text: bytes, into: PoolTally) -> None:
    """Set all fields. Raises ProtocolError: it is no line of `tally_text`."""
    try:
        found = json.loads(text)
        seen = PoolTally(**{**found, "errors": Counter(found["errors"])})
    except (ValueError, TypeError, KeyError):
        raise ProtocolError("The pool's client ended without its figures.") from None
    for field in dataclasses.fields(seen):
        setattr(into, field.name, getattr(seen, field.name))


def main() -> None:
    """In the container: work until standard input ends, then print the tally as JSON."""
    tally = PoolTally()
    work = PoolLoad(tally, sys.argv[1], {})
    work.start()
    sys.stdout.write(_BEGUN.decode() + "\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    work.end()
    sys.stdout.write(tally_text(tally))


if __name__ == "__main__":
    main()
