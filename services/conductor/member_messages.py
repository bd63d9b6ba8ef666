"""Between messages about the cluster's processes and plain values: checks what comes in, fills what goes out."""

from __future__ import annotations

from typing import Final

from mooncache.conductor.config import NAME_CHARS_MAX, TEXT_CHARS_MAX
from mooncache.conductor.core.members import ListedMember, MemberInfo, MemberKind, Presence
from mooncache.conductor.messages import named
from mooncache.errors import InvalidArgument
from mooncache.proto.v1 import conductor_pb2 as pb

KINDS: Final = {
    pb.MEMBER_KIND_GATEWAY: MemberKind.GATEWAY,
    pb.MEMBER_KIND_ENDPOINT_PICKER: MemberKind.ENDPOINT_PICKER,
    pb.MEMBER_KIND_CONDUCTOR: MemberKind.CONDUCTOR,
    pb.MEMBER_KIND_WORKER: MemberKind.WORKER,
    pb.MEMBER_KIND_MASTER: MemberKind.MASTER,
    pb.MEMBER_KIND_STORE_NODE: MemberKind.STORE_NODE,
}
PRESENCES: Final = {
    pb.MEMBER_PRESENCE_PRESENT: Presence.PRESENT,
    pb.MEMBER_PRESENCE_SILENT: Presence.SILENT,
    pb.MEMBER_PRESENCE_GONE: Presence.GONE,
    pb.MEMBER_PRESENCE_STOPPED: Presence.STOPPED,
}
_KIND_NUMBERS: Final = {kind: number for number, kind in KINDS.items()}
_PRESENCE_NUMBERS: Final = {presence: number for number, presence in PRESENCES.items()}
_MS_MAX: Final = 1 << 53
_WORD_CHARS_MAX: Final = 32
_TEXTS: Final = ("host_id", "host_name", "software_version")


def member_of(member: pb.Member) -> MemberInfo:
    """A process' description of itself. Raises InvalidArgument."""
    if member.kind not in KINDS:
        raise InvalidArgument("the kind of a member is not known here")
    texts = {name: getattr(member, name) for name in _TEXTS}
    for name, text in texts.items():
        if len(text) > NAME_CHARS_MAX or not text.isprintable():
            raise InvalidArgument(f"{name} must be at most {NAME_CHARS_MAX} printable characters")
    if len(member.state) > _WORD_CHARS_MAX or not member.state.isprintable():
        raise InvalidArgument(f"the state must be at most {_WORD_CHARS_MAX} printable characters")
    reason = "".join(sign if sign.isprintable() else " " for sign in member.reason[:TEXT_CHARS_MAX])
    compared = member.HasField("clock_bound_ms")
    return MemberInfo(
        kind=KINDS[member.kind],
        name=named(member.name, "name"),
        address=named(member.address, "address"),
        started_ms=min(member.started_ms, _MS_MAX),
        state=member.state,
        reason=reason,
        pid=member.pid,
        clock_offset_ms=max(-_MS_MAX, min(member.clock_offset_ms, _MS_MAX)),
        clock_bound_ms=min(member.clock_bound_ms, _MS_MAX) if compared else None,
        **texts,
    )


def member_message(info: MemberInfo) -> pb.Member:
    """The same as a message."""
    return pb.Member(
        kind=_KIND_NUMBERS[info.kind],
        name=info.name,
        host_id=info.host_id,
        host_name=info.host_name,
        address=info.address,
        software_version=info.software_version,
        started_ms=info.started_ms,
        state=info.state,
        reason=info.reason,
        pid=info.pid,
        clock_offset_ms=info.clock_offset_ms,
        clock_bound_ms=info.clock_bound_ms,
    )


def announcement_of(listed: ListedMember) -> pb.JournalEntry:
    """The last word of a member, as a new standby hears it."""
    request = pb.AnnounceMemberRequest(
        member=member_message(listed.info), leaving=listed.presence is Presence.STOPPED
    )
    return pb.JournalEntry(member=request, age_ms=round(listed.heard_age_s * 1e3))


def view_of_member(listed: ListedMember) -> pb.MemberView:
    """A member as ListMembers has it."""
    return pb.MemberView(
        member=member_message(listed.info),
        presence=_PRESENCE_NUMBERS[listed.presence],
        heard_age_ms=round(listed.heard_age_s * 1e3),
    )
