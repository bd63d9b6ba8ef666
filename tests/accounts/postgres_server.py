"""A real PostgreSQL server on loopback, in a folder that goes away, run by a user who is not root."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from mooncache.accounts.database import AccountsPlace
from tests.conditions import wait_until
from tests.ports import own_port
from tests.processes import freeze

USER: Final = "moon"
_SETTINGS: Final = {
    "fsync": "off",  # a killed server loses nothing: what it wrote is the kernel's
    "full_page_writes": "off",
    "max_connections": "60",
    "shared_buffers": "16MB",
    "unix_socket_directories": "",
    "log_min_messages": "warning",
}


def programs() -> Path:
    """Where initdb and postgres are; the test is skipped without them."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    beside = shutil.which("initdb")
    if not found and beside is None:
        pytest.skip("no PostgreSQL; install the Debian package postgresql")
    pytest.importorskip("psycopg", reason="psycopg is not installed (extra postgres)")
    return found[-1].parent if found else Path(str(beside)).resolve().parent


class PostgresServer:
    """One server. `pause` and `resume` stop and continue all of its processes."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.password = folder, own_port(), secrets.token_hex(12)
        self._programs = programs()
        self._user = "postgres" if os.geteuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        secret = folder / "password"
        secret.write_text(self.password)
        if self._user is not None:  # PostgreSQL refuses to run as root
            for path in (folder, secret):
                shutil.chown(path, self._user, pwd.getpwnam(self._user).pw_gid)
        command = [str(self._programs / "initdb"), "-D", str(folder / "data"), "-U", USER, "-E", "UTF8"]
        command += ["--locale=C.UTF-8", "--auth=scram-sha-256", f"--pwfile={secret}", "--no-sync"]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False, **self._as_user()
        )
        assert done.returncode == 0, done.stderr

    def url(self, name: str = "postgres", options: str = "") -> str:
        """With the password; settings behind `?`."""
        return f"postgresql://{USER}:{self.password}@127.0.0.1:{self.port}/{name}{options}"

    def start(self) -> None:
        settings = [word for name, value in _SETTINGS.items() for word in ("-c", f"{name}={value}")]
        command = [str(self._programs / "postgres"), "-D", str(self.folder / "data"), "-p", str(self.port)]
        command += ["-h", "127.0.0.1", *settings]
        log = (self.folder / "log").open("ab")
        with log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, process_group=0, **self._as_user()
            )
        wait_until(self._answers, (self.folder / "log").read_text)

    def use_tls(self, certificate: Path) -> None:
        """From the next start on: a folder with cert.pem and key.pem."""
        for name, ours in (("server.crt", "cert.pem"), ("server.key", "key.pem")):
            path = self.folder / "data" / name
            shutil.copyfile(certificate / ours, path)
            path.chmod(0o600)
            if self._user is not None:
                shutil.chown(path, self._user, pwd.getpwnam(self._user).pw_gid)
        with (self.folder / "data" / "postgresql.conf").open("a") as settings:
            settings.write("ssl = on\n")

    def kill(self) -> None:
        """At once, with all of its processes: as if the host lost its power."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)
        self._process = None
        (self.folder / "data" / "postmaster.pid").unlink(missing_ok=True)

    def pause(self) -> None:
        """Stop all processes; connections stay open and nothing answers."""
        for pid in self._pids():
            freeze(pid)

    def resume(self) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def ask(self, statement: str, name: str = "postgres") -> list[tuple[Any, ...]]:
        """As the operator of the server."""
        import psycopg

        with psycopg.connect(self.url(name), autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description is not None else []

    def new_database(self) -> str:
        """The URL of one that is empty."""
        name = f"accounts_{secrets.token_hex(4)}"
        self.ask(f"CREATE DATABASE {name}")
        return self.url(name)

    def _pids(self) -> list[int]:
        """The server's, and those of its processes, which have process groups of their own."""
        if self._process is None:
            return []
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        return [self._process.pid, *map(int, children)]

    def _answers(self) -> bool:
        import psycopg

        assert self._process is not None and self._process.poll() is None, (self.folder / "log").read_text()
        with contextlib.suppress(psycopg.OperationalError):
            return bool(self.ask("SELECT 1"))
        return False

    def _as_user(self) -> dict[str, Any]:
        environment = {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"}
        if self._user is None:
            return {"env": environment}
        return {"env": environment, "user": self._user, "group": self._user, "extra_groups": [], "cwd": "/"}


def secret_text(place: AccountsPlace) -> str:
    """A place as another process is given it: with the password."""
    return str(place) if isinstance(place, Path) else place._url.secret_text


@contextlib.contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A server for the time of a `with`."""
    programs()
    with tempfile.TemporaryDirectory(prefix="postgres-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        server = PostgresServer(Path(folder))
        server.start()
        try:
            yield server
        finally:
            server.resume()
            server.kill()
