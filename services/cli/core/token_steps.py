"""How a cluster goes over to a new token without a restart, as pure functions of what its processes say.

one token     -> `rotate` adds a new one, which all processes shall accept before one of them signs with it
incoming      -> all accept it: it signs, and the old one is still accepted
outgoing      -> no process signs with the old one: `withdraw` takes it away
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from mooncache.auth import Token, TokenSet

USED_LATELY_S: Final = 30.0
"""Who proved a token within this time is taken to go on with it."""


@dataclass(frozen=True, slots=True)
class TokenUse:
    """One accepted token of a process. `used_age_s`: since a caller last proved it there; None: not since its start."""

    fingerprint: str
    used_age_s: float | None = None
    connections: int = 0


@dataclass(frozen=True, slots=True)
class ProcessTokens:
    """What one process says: the tokens that it accepts, the one that it proves first. `error`: why it says nothing."""

    kind: str
    name: str
    host: str = ""
    uses: tuple[TokenUse, ...] = ()
    engine_token: str = ""
    problem: str = ""
    error: str = ""

    @property
    def title(self) -> str:
        """What to call it."""
        return f"{self.kind} {self.name}" + (f" on {self.host}" if self.host else "")

    @property
    def signs(self) -> str:
        """Fingerprint of what it proves; "" when it says nothing."""
        return self.uses[0].fingerprint if self.uses else ""

    def accepts(self, fingerprint: str) -> bool:
        """Whether callers may prove this one to it."""
        return any(use.fingerprint == fingerprint for use in self.uses)


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """Whether a step may be taken; why not, a sentence each."""

    reasons: tuple[str, ...] = field(default=())

    @property
    def is_free(self) -> bool:
        """Nothing speaks against it."""
        return not self.reasons


def added(tokens: TokenSet, new: Token) -> TokenSet:
    """The new token beside the one that signs."""
    return TokenSet((tokens.signing, new), tokens.salts, incoming=True)


def promoted(tokens: TokenSet) -> TokenSet:
    """The incoming token signs; the one before is still accepted."""
    old, new = tokens.tokens
    return replace(tokens, tokens=(new, old), incoming=False)


def withdrawn(tokens: TokenSet, *, new_salts: bool) -> TokenSet:
    """The token that signs alone. `new_salts`: the cache of requests begins empty."""
    return TokenSet.of(tokens.signing) if new_salts else TokenSet((tokens.signing,), tokens.salts)


def strangers(tokens: TokenSet, rows: Sequence[ProcessTokens]) -> StepVerdict:
    """Against adding a token: another one than the file's is in use already."""
    known = {token.fingerprint for token in tokens.tokens}
    return StepVerdict(
        tuple(
            f"{row.title} accepts token {use.fingerprint}, which the file here does not have: the token is being "
            "replaced from another host. Go on there, or copy its token file to this host"
            for row in rows
            for use in row.uses
            if use.fingerprint not in known
        )
    )


def may_promote(tokens: TokenSet, rows: Sequence[ProcessTokens]) -> StepVerdict:
    """Against signing with the incoming token: who would refuse it."""
    new = tokens.tokens[-1].fingerprint
    silent = [f"{row.title} does not say what it accepts: {row.error}" for row in rows if row.error]
    lacking = [
        f"{row.title} does not accept {new}" + (f": {row.problem}" if row.problem else " yet")
        for row in rows
        if not row.error and not row.accepts(new)
    ]
    return StepVerdict((*lacking, *silent))


def not_signing(tokens: TokenSet, rows: Sequence[ProcessTokens]) -> StepVerdict:
    """Who does not prove the token that this host signs with."""
    signing = tokens.signing.fingerprint
    return StepVerdict(
        tuple(
            f"{row.title} does not say what it signs with: {row.error}"
            if row.error
            else f"{row.title} signs with {row.signs}" + (f": {row.problem}" if row.problem else "")
            for row in rows
            if row.error or row.signs != signing
        )
    )


def may_withdraw(tokens: TokenSet, rows: Sequence[ProcessTokens]) -> StepVerdict:
    """Against taking the old token away: who still needs it."""
    signing, old = tokens.signing.fingerprint, tokens.tokens[-1].fingerprint
    reasons = list(not_signing(tokens, rows).reasons)
    for row in rows:
        if row.engine_token and row.engine_token != signing:
            reasons.append(
                f"{row.title}: its engine was started with {row.engine_token}. Start the worker again"
            )
        for use in row.uses:
            if use.fingerprint != old:
                continue
            if use.connections:
                reasons.append(
                    f"{row.title} has {use.connections} open connections of clients that proved {old}"
                )
            elif use.used_age_s is not None and use.used_age_s < USED_LATELY_S:
                reasons.append(f"{row.title} was called with {old} {use.used_age_s:.0f} s ago")
    return StepVerdict(tuple(reasons))


def still_accepting(fingerprints: Sequence[str], rows: Sequence[ProcessTokens]) -> StepVerdict:
    """Who accepts one of these, or does not say."""
    return StepVerdict(
        tuple(
            f"{row.title} does not say what it accepts: {row.error}"
            if row.error
            else f"{row.title} still accepts it"
            for row in rows
            if row.error or any(row.accepts(each) for each in fingerprints)
        )
    )
