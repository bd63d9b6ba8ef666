"""What operators do is kept: each command that changes a cluster leaves an entry in the audit log."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Final

from cyclopts import CycloptsError

from mooncache.errors import MooncacheError
from mooncache.reporting.output import EXIT_OK, error_console

ACTS: Final = frozenset(
    {
        ("accounts", "copy"),
        ("batch", "cancel"),
        ("key", "create"),
        ("key", "limit"),
        ("key", "revoke"),
        ("tenant", "set"),
        ("tenant", "purge"),
        ("tenant", "new-key"),
        ("instance", "drain"),
        ("instance", "undrain"),
        ("instance", "role"),
        ("node", "restart"),
        ("chaos", "run"),
        ("config", "reload"),
        ("quarantine", "add"),
        ("quarantine", "release"),
        ("invite", "revoke"),
        ("tls", "init"),
        ("token", "rotate"),
        ("token", "withdraw"),
        ("recall",),
        ("drain",),
        ("down",),
        ("invite",),
        ("join",),
        ("pin",),
        ("rm",),
        ("unpin",),
        ("upgrade",),
    }
)
_READS: Final = frozenset({("invite", "list")})
_SECRET_OPTIONS: Final = frozenset({"--code"})
"""Their values are shown to no reader of the log: a code that was refused here may be good elsewhere."""
_HIDDEN: Final = "[redacted]"
_FAILED: Final = "FAILED"
_noted: ContextVar[dict[str, str] | None] = ContextVar("noted", default=None)


def note(**details: str) -> None:
    """Something that an act's entry should say beyond its arguments."""
    found = _noted.get()
    if found is not None:
        found |= details


def act_of(tokens: Sequence[str]) -> tuple[str, ...]:
    """The words of the act that a command line is; () for what changes nothing."""
    two = tuple(tokens[:2])
    if two in _READS or "--help" in tokens or "-h" in tokens:
        return ()
    return two if two in ACTS else tuple(tokens[:1]) if tuple(tokens[:1]) in ACTS else ()


def audited(tokens: Sequence[str], work: Callable[[], object]) -> object:
    """Run a command, and keep what it was and what came of it. An act that is done is not undone by a full disk.

    Raises what `work` raises.
    """
    act = act_of(tokens)
    if not act:
        return work()
    details: dict[str, str] = {}
    mark = _noted.set(details)
    result = _FAILED
    try:
        found = work()
        result = "OK" if found in (None, EXIT_OK) else f"EXIT_{found}"
        return found
    except MooncacheError as error:
        result = error.name
        raise
    except CycloptsError:  # it was no command: nothing was done
        act = ()
        raise
    except KeyboardInterrupt:
        result = "INTERRUPTED"
        raise
    finally:
        _noted.reset(mark)
        if act:
            _keep(tokens, act, result, details)


def _keep(tokens: Sequence[str], act: tuple[str, ...], result: str, details: dict[str, str]) -> None:
    from mooncache.accounts.audit_log import append
    from mooncache.accounts.core.audit import AuditEntry
    from mooncache.cli.accounts import Accounts, operator
    from mooncache.runtime.logs import redact_text

    try:
        state_dir = _option(tokens, "--state-dir")
        accounts = Accounts(_option(tokens, "--accounts-dir"), Path(state_dir) if state_dir else None)
        arguments = [redact_text(each) for each in without_secrets(tokens[len(act) :])]
        entry = AuditEntry(
            unix_ms=round(time.time() * 1e3),
            who=operator(),
            what=" ".join(act),
            arguments=arguments,
            result=result,
            details=details,
        )
        with accounts.opened() as place:
            append(place, entry)
    except MooncacheError as error:
        error_console.print(
            f"not in the audit log: {error.message}", markup=False, style="red", soft_wrap=True
        )


def without_secrets(arguments: Sequence[str]) -> list[str]:
    """The arguments of an act, with the values of options that are secrets hidden, however they are spelt."""
    kept = list(arguments)
    for number, each in enumerate(arguments):
        name, equals, _ = each.partition("=")
        if name not in _SECRET_OPTIONS:
            continue
        if equals:
            kept[number] = f"{name}={_HIDDEN}"
        elif number + 1 < len(kept):
            kept[number + 1] = _HIDDEN
    return kept


def _option(tokens: Sequence[str], option: str) -> str | None:
    """The value of an option, however it is spelt."""
    for number, token in enumerate(tokens):
        if token.startswith(f"{option}="):
            return token.partition("=")[2]
        if token == option and number + 1 < len(tokens):
            return tokens[number + 1]
    return None
