"""What becomes of an invitation: open until it is used, ends by itself, is revoked, or too many wrong codes came."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

WRONG_CODES_MAX: Final = 5
"""So many wrong codes end an invitation."""
LIFETIME_S_MAX: Final = 86_400.0
LIFETIME_S_MIN: Final = 1.0
KEPT_S: Final = 86_400.0
"""A record is kept for so long after the invitation's end, so that a late caller hears what happened."""


class InvitationState(StrEnum):
    """Open, or why it is not."""

    OPEN = "open"
    USED = "used"
    EXPIRED = "expired"
    REVOKED = "revoked"
    BLOCKED = "blocked"  # too many wrong codes
    ENDED = "ended"  # its `mooncache invite` was ended


class RefusalReason(StrEnum):
    """Why a machine may not join; travels as its value."""

    WRONG = "wrong"
    USED = "used"
    EXPIRED = "expired"
    REVOKED = "revoked"
    BLOCKED = "blocked"
    ENDED = "ended"
    NAMES = "names"
    VERSION = "version"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Invitation:
    """One invitation. Times are seconds of Unix time; `joined` is the machine that used it."""

    name: str
    target: str
    created_unix_s: float
    expires_unix_s: float
    state: InvitationState = InvitationState.OPEN
    wrong_count: int = 0
    joined: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class Judgement:
    """What an attempt makes of an invitation. `refusal` None: the machine may join, and the code is used."""

    invitation: Invitation
    refusal: RefusalReason | None


def judge(
    invitation: Invitation, *, right: bool, joins: str, now_unix_s: float, has_ended: bool = False
) -> Judgement:
    """One attempt with a code of this name. Of two attempts only the first can use it.

    Args:
        right: whether its proof shows that the code is known.
        joins: name of the machine that tries.
        has_ended: whether the time is over by a clock that cannot be set, too.

    Who has not proven the code hears "wrong" whatever the state, and counts while the invitation is open.
    """
    current = aged(invitation, now_unix_s, has_ended=has_ended)
    if current.state is not InvitationState.OPEN:
        return Judgement(current, RefusalReason(current.state) if right else RefusalReason.WRONG)
    if right:
        return Judgement(replace(current, state=InvitationState.USED, joined=joins), None)
    count = current.wrong_count + 1
    state = InvitationState.BLOCKED if count >= WRONG_CODES_MAX else InvitationState.OPEN
    return Judgement(replace(current, wrong_count=count, state=state), RefusalReason.WRONG)


def aged(invitation: Invitation, now_unix_s: float, *, has_ended: bool = False) -> Invitation:
    """The invitation as it is now: an open one whose time is over has expired."""
    over = has_ended or now_unix_s >= invitation.expires_unix_s
    if invitation.state is InvitationState.OPEN and over:
        return replace(invitation, state=InvitationState.EXPIRED)
    return invitation


def refusal_sentence(reason: RefusalReason) -> str:
    """What the joining machine says."""
    return _SENTENCES[reason]


_AGAIN: Final = "Run `mooncache invite` on the first machine for a new one."
_SENTENCES: Final[dict[RefusalReason, str]] = {
    RefusalReason.WRONG: (
        "The first machine does not know this code. Compare it with what `mooncache invite` printed there; after "
        f"{WRONG_CODES_MAX} wrong codes an invitation is blocked."
    ),
    RefusalReason.USED: f"This code has been used: it works once. {_AGAIN}",
    RefusalReason.EXPIRED: f"This code has expired. {_AGAIN}",
    RefusalReason.REVOKED: f"This code has been revoked. {_AGAIN}",
    RefusalReason.BLOCKED: f"This code is blocked, because too many wrong ones came. {_AGAIN}",
    RefusalReason.ENDED: f"This code's `mooncache invite` was ended. {_AGAIN}",
    RefusalReason.NAMES: (
        "The first machine refuses the names that this one gave. They must be addresses or names of hosts, "
        "and none of the first machine's own; give others with --host and --name."
    ),
    RefusalReason.VERSION: "The two machines run versions of Mooncache that cannot join. Install the same one on both.",
    RefusalReason.INTERNAL: "The first machine could not make the certificate; what it printed says why.",
}
