"""When a token may sign, and when the old one may go: decided by what the processes say."""

from __future__ import annotations

from mooncache import auth
from mooncache.cli.core import token_steps as steps
from mooncache.cli.core.token_steps import ProcessTokens, TokenUse

OLD, NEW, OTHER = (auth.Token("default", admin=True, key=bytes([number]) * 32) for number in (1, 2, 3))
ONE = auth.TokenSet.of(OLD)


def row(*tokens: auth.Token, name: str = "node-1", **more: object) -> ProcessTokens:
    uses = tuple(TokenUse(token.fingerprint) for token in tokens)
    return ProcessTokens("store node", name, "host-a", uses, **more)  # type: ignore[arg-type]


def test_the_way_of_a_token() -> None:
    incoming = steps.added(ONE, NEW)
    assert (incoming.tokens, incoming.incoming) == ((OLD, NEW), True)
    outgoing = steps.promoted(incoming)
    assert (outgoing.tokens, outgoing.incoming) == ((NEW, OLD), False)
    assert steps.withdrawn(outgoing, new_salts=False) == auth.TokenSet((NEW,), OLD)
    assert steps.withdrawn(outgoing, new_salts=True) == auth.TokenSet.of(NEW)
    again = steps.added(steps.withdrawn(outgoing, new_salts=False), OTHER)
    assert steps.promoted(again).salts == OLD, "the second time, too"


def test_it_signs_once_all_accept_it() -> None:
    tokens = steps.added(ONE, NEW)
    assert steps.may_promote(tokens, [row(OLD, NEW), row(NEW, OLD, name="node-2")]).is_free
    lacking = steps.may_promote(tokens, [row(OLD, NEW), row(OLD, name="node-2", problem="no file")])
    assert lacking.reasons == (f"store node node-2 on host-a does not accept {NEW.fingerprint}: no file",)
    silent = steps.may_promote(tokens, [row(error="no answer")])
    assert silent.reasons == ("store node node-1 on host-a does not say what it accepts: no answer",)


def test_two_hosts_do_not_begin_at_once() -> None:
    assert steps.strangers(ONE, [row(OLD)]).is_free
    (reason,) = steps.strangers(ONE, [row(OLD, OTHER)]).reasons
    assert OTHER.fingerprint in reason


def test_the_old_one_goes_when_nobody_needs_it() -> None:
    tokens = steps.promoted(steps.added(ONE, NEW))
    new, old = NEW.fingerprint, OLD.fingerprint

    def reasons(*uses: TokenUse, **more: object) -> tuple[str, ...]:
        found = ProcessTokens("worker", "w", "", uses, **more)  # type: ignore[arg-type]
        return steps.may_withdraw(tokens, [row(NEW, OLD), found]).reasons

    assert reasons(TokenUse(new, 0.1), TokenUse(old, steps.USED_LATELY_S + 1), engine_token=new) == ()
    assert reasons(TokenUse(old), TokenUse(new)) == (f"worker w signs with {old}",)
    assert reasons(TokenUse(new), engine_token=old) == (
        f"worker w: its engine was started with {old}. Start the worker again",
    )
    assert reasons(TokenUse(new), TokenUse(old, 3.0)) == (f"worker w was called with {old} 3 s ago",)
    assert reasons(TokenUse(new), TokenUse(old, None, 2)) == (
        f"worker w has 2 open connections of clients that proved {old}",
    )
    assert reasons(error="its version knows one token alone") != ()


def test_who_still_accepts_it() -> None:
    assert steps.still_accepting([OLD.fingerprint], [row(NEW)]).is_free
    found = steps.still_accepting([OLD.fingerprint], [row(NEW, OLD), row(error="gone", name="node-2")])
    assert len(found.reasons) == 2
