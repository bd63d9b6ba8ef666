"""Who may come in: tokens, certificates, files with secrets, ports that others reach, and clocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from mooncache.cli.doctor.core.facts import ClockOffset, Facts, MemberFacts, NodeFacts
from mooncache.cli.doctor.core.result import CheckResult, failed, passed, skipped, warned
from mooncache.conductor.core.members import Presence
from mooncache.topology.core.host_facts import HostFacts

CERTIFICATE_WARN_S = 14 * 86_400.0
DAY_S = 86_400.0
# Session tokens last 15 to 30 minutes: a node whose clock is further ahead refuses them all.
SKEW_FAIL_S = 900.0
SKEW_WARN_S = 5.0


def token(facts: Facts) -> CheckResult:
    """Whether our token and settings can be used, and whether the master takes the token."""
    if facts.token_error:
        return failed(
            "token", "here", facts.token_error, "`mooncache config explain --set-only` shows what is set"
        )
    if facts.pool is None:
        return skipped("token", "here", "no cluster is known here")
    if facts.pool.refused:
        fix = "copy cluster.token from a host of this cluster (mode 0600), or name it with --token-file"
        return failed("token", "here", f"the master refuses it: {facts.pool.error}", fix)
    if facts.pool.error:
        return skipped("token", "here", "no master answers")
    return passed("token", "here", "the master takes it")


def files(subject: str, host: HostFacts) -> Iterator[CheckResult]:
    """Files with secrets are readable by their owner alone."""
    for file in host.private_files:
        what = f"{subject}, {file.setting}"
        if file.error:
            # Without a cluster none is needed: the first start of `mooncache up` makes the token.
            if file.error != "does not exist":
                yield failed("files", what, f"{file.path} {file.error}", f"`ls -l {file.path}`")
        elif file.mode & 0o077:
            text = f"{file.path} has mode {file.mode:04o}, so others may read it"
            yield failed("files", what, text, f"`chmod 600 {file.path}`")
        else:
            yield passed("files", what, f"{file.path} has mode {file.mode:04o}")


def certificates(subject: str, host: HostFacts, now_s: float) -> Iterator[CheckResult]:
    """Validity of the certificates that a process was configured with."""
    if not host.tls:
        yield skipped("certificates", subject, "TLS is off")
    fix = "`mooncache tls init HOST` makes a new one once the old file is moved away; the process reads it at its start"
    for found in host.certificates:
        what = f"{subject}, {found.setting}"
        if found.error:
            yield failed("certificates", what, f"{found.path} {found.error}", "name a certificate in PEM")
        elif found.ends_s <= now_s:
            text = f"{found.path} expired {(now_s - found.ends_s) / DAY_S:.1f} days ago: no connection is trusted"
            yield failed("certificates", what, text, fix)
        elif found.begins_s > now_s:
            text = f"{found.path} is valid only in {(found.begins_s - now_s) / DAY_S:.1f} days"
            yield failed("certificates", what, text, "set the clock, or make the certificate again")
        elif found.ends_s - now_s < CERTIFICATE_WARN_S:
            yield warned(
                "certificates",
                what,
                f"{found.path} expires in {(found.ends_s - now_s) / DAY_S:.1f} days",
                fix,
            )
        else:
            yield passed("certificates", what, f"valid for {(found.ends_s - now_s) / DAY_S:.0f} days")


def ports_beyond_loopback(subject: str, host: HostFacts) -> CheckResult:
    """Whoever can read along on the network sees what passes without TLS."""
    if host.open_binds and not host.tls:
        text = f"other hosts reach {', '.join(host.open_binds)} without TLS"
        return warned(
            "TLS", subject, text, "`mooncache tls init HOST...`, then tls.enabled (docs/operations.md)"
        )
    return passed("TLS", subject, "TLS is on" if host.tls else "ports are on loopback")


def clock(node: NodeFacts) -> CheckResult:
    """A node's clock against ours, as tokens and certificates need it."""
    return _clock(node.node_id, node.clock, "session tokens fail at it")


def clocks_of_members(members: Iterable[MemberFacts], seen: Collection[str]) -> Iterator[CheckResult]:
    """Clocks of the other processes, one result for a host; `seen`: names of nodes, which were asked themselves."""
    by_host: dict[str, ClockOffset] = {}
    for member in members:
        if member.clock is None or member.name in seen or member.state in (Presence.GONE, Presence.STOPPED):
            continue
        known = by_host.get(member.host)
        if known is None or member.clock.bound_s < known.bound_s:
            by_host[member.host] = member.clock
    for host, offset in sorted(by_host.items()):
        yield _clock(host, offset, "tokens that are made there are taken as old, or as of the future")


def _clock(subject: str, clock: ClockOffset | None, failure: str) -> CheckResult:
    if clock is None:
        return skipped("clock", subject, "the node did not say what time it has")
    offset, bound = clock.offset_s, clock.bound_s
    least = max(0.0, abs(offset) - bound)
    way = "ahead of" if offset > 0 else "behind"
    text = f"its clock is {abs(offset):.3g} s {way} ours (known to {bound:.2g} s)"
    fix = "`timedatectl set-ntp true` on that host (or chrony), then `timedatectl status`"
    if least > SKEW_FAIL_S:
        return failed("clock", subject, f"{text}: {failure}", fix)
    if least > SKEW_WARN_S:
        return warned("clock", subject, f"{text}: logs and traces do not line up", fix)
    return passed("clock", subject, f"within {abs(offset) + bound:.2g} s of ours")
