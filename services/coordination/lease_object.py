"""A Lease of Kubernetes (coordination.k8s.io/v1) as a value: read from an answer, and changed for the next request.

    spec.holderIdentity         the leader's process; missing when there is no leader
    spec.leaseDurationSeconds   for how long others wait after a renewal that they saw
    spec.renewTime              the holder's clock at its renewal: only compared, whether it changed
    spec.leaseTransitions       how often the holder changed, as kubectl shows it
    annotation .../term         the fencing term: leaseTransitions has 32 bits and starts again with a new Lease
    annotation .../leader       the leader's record
    annotation .../member-<n>   the record of each candidate, with a count that it raises while it lives

A changed object keeps all that this code does not know, and the resourceVersion that it was read with: the API server
refuses it when another process wrote meanwhile.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import json
from dataclasses import dataclass, field
from typing import Any, Final

from mooncache.coordination.base import MasterRecord
from mooncache.coordination.records import RECORD_BYTES_MAX, record_of
from mooncache.errors import MasterUnavailable

API_VERSION: Final = "coordination.k8s.io/v1"
TERM: Final = "mooncache.io/term"
LEADER: Final = "mooncache.io/leader"
_MEMBER: Final = "mooncache.io/member-"
_DURATION_MAX_S: Final = 600  # a holder that writes more is damage; settings end at 120
_TRANSITIONS_MAX: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Lease:
    """What a Lease says. `raw` is the object as it was answered."""

    raw: dict[str, Any]
    version: str
    holder: str = ""
    duration_s: int = 0
    renewed: str = ""
    transitions: int = 0
    annotations: dict[str, str] = field(default_factory=dict)

    @property
    def term(self) -> int:
        """The term of the last election that was won; 0 when none wrote one."""
        text = self.annotations.get(TERM, "")
        return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else 0

    @property
    def leader(self) -> MasterRecord | None:
        """The record of the holder."""
        return record_of(self.annotations.get(LEADER, "").encode()) if self.holder else None

    @property
    def members(self) -> dict[str, str]:
        """Records of candidates by the name of their annotation; not all need to live."""
        return {name: text for name, text in self.annotations.items() if name.startswith(_MEMBER)}

    @property
    def sign(self) -> tuple[str, str, int, str]:
        """What changes with every renewal and every win, and with nothing else."""
        return self.holder, self.renewed, self.transitions, self.annotations.get(TERM, "")


def member_name(master_id: str) -> str:
    """The annotation of one candidate."""
    return _MEMBER + hashlib.sha256(master_id.encode()).hexdigest()[:16]


def lease_of(body: bytes, name: str) -> Lease:
    """The Lease `name` in an answer. Raises MasterUnavailable for anything else."""
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError):
        raise _unlike(name, "it is not JSON") from None
    if not isinstance(raw, dict) or raw.get("kind") != "Lease":
        raise _unlike(name, "it is of another kind")
    metadata, spec = raw.get("metadata"), raw.get("spec") or {}
    if not isinstance(metadata, dict) or not isinstance(spec, dict) or metadata.get("name") != name:
        raise _unlike(name, "it is another object")
    version, annotations = metadata.get("resourceVersion"), metadata.get("annotations") or {}
    if not isinstance(version, str) or not version or not isinstance(annotations, dict):
        raise _unlike(name, "it has no resourceVersion")
    return Lease(
        raw,
        version,
        _text(spec.get("holderIdentity")),
        _number(spec.get("leaseDurationSeconds"), _DURATION_MAX_S),
        _text(spec.get("renewTime")),
        _number(spec.get("leaseTransitions"), _TRANSITIONS_MAX),
        {key: value for key, value in annotations.items() if isinstance(value, str)},
    )


def new_lease(name: str, namespace: str) -> Lease:
    """A Lease that is not there yet: what is made of it is created."""
    metadata = {"name": name, "namespace": namespace}
    return Lease({"apiVersion": API_VERSION, "kind": "Lease", "metadata": metadata, "spec": {}}, "")


def changed(
    lease: Lease, spec: dict[str, object] | None = None, annotations: dict[str, str | None] | None = None
) -> dict[str, Any]:
    """The object with these fields and annotations; None takes one away."""
    made = copy.deepcopy(lease.raw)
    target = made["spec"] = made.get("spec") or {}
    notes = made["metadata"]["annotations"] = made["metadata"].get("annotations") or {}
    for into, values in ((target, spec or {}), (notes, annotations or {})):
        for key, value in values.items():
            if value is None:
                into.pop(key, None)
            else:
                into[key] = value
    return made


def won_spec(lease: Lease, identity: str, duration_s: int, at_us: int) -> dict[str, object]:
    """The fields of a Lease that a candidate takes."""
    return {
        "holderIdentity": identity,
        "leaseDurationSeconds": duration_s,
        "acquireTime": micro_time(at_us),
        "renewTime": micro_time(at_us),
        "leaseTransitions": min(_TRANSITIONS_MAX, lease.transitions + 1),
    }


def released_spec(at_us: int) -> dict[str, object]:
    """The fields of a Lease that its holder gives back: any other may take it at once."""
    return {"holderIdentity": None, "leaseDurationSeconds": 1, "renewTime": micro_time(at_us)}


def micro_time(at_us: int) -> str:
    """Microseconds since the Unix epoch as Kubernetes writes a MicroTime."""
    moment = datetime.datetime.fromtimestamp(at_us // 1_000_000, datetime.UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{at_us % 1_000_000:06d}Z"


def _unlike(name: str, why: str) -> MasterUnavailable:
    return MasterUnavailable(f"The Kubernetes API answered no usable Lease {name}: {why}.")


def _text(found: object) -> str:
    return found if isinstance(found, str) and len(found) <= RECORD_BYTES_MAX else ""


def _number(found: object, at_most: int) -> int:
    return min(found, at_most) if type(found) is int and found > 0 else 0
