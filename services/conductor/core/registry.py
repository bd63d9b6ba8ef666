"""Instances: who exists, in which state, with which load. Soft state that workers tell again.

A worker registers an instance and then reports; silence makes it suspect (no new requests), longer silence
forgets it with all that it held. Another incarnation is another engine start: its cache is empty. It comes from
the same worker, or the former worker has ended or is silent; else two workers have one name, and the second is
refused. What an operator asked for (role, drain) stays with the name as long as the conductor knows it, and the
worker tells it to a conductor that does not. `version` grows with every change other than load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from mooncache import errors
from mooncache.kvcache.engine_size import EngineSize
from mooncache.kvcache.instance_load import InstanceLoad
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.kvcache.keys import passport_from_json


class InstanceState(StrEnum):
    """Where an instance is in its life."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    SUSPECT = "suspect"


REPORTS_PER_S = (
    150.0  # of all instances together: a quarter of a processor, and decisions hardly wait behind them
)
SUSPECT_INTERVALS = 2.0  # silence of so many intervals
LEASE_INTERVALS = 8.0
GONE_MAX = 4096


@dataclass(frozen=True, slots=True)
class InstanceInfo:
    """What a worker says once."""

    instance_id: str
    incarnation: int
    role: InstanceRole
    model: str
    engine: str = "vllm"
    engine_version: str = ""
    url: str = ""
    tokenizer_path: str = ""
    max_model_tokens: int = 0
    kv_capacity_tokens: int = 0
    block_tokens: int = 16
    passport_json: str = ""
    group: int = 0  # passport group, 0 when the passport is not known
    kv_bytes_per_token: int = 0
    host_id: str = ""
    max_sequences: int = 0
    pool: bool = True
    software_version: str = ""
    engine_token: str = ""  # fingerprint of the cluster token whose key its engine takes
    size: EngineSize | None = None  # None: not known
    orders_by_priority: bool = False  # its queue takes requests of a lower `priority` first


@dataclass(frozen=True, slots=True)
class RequestedState:
    """What a worker registers beside its instance. worker_run: random number of its process, 0 when not known. The
    others are what an operator asked of the instance, as an earlier conductor reported."""

    worker_run: int = 0
    drain: bool | None = None
    role_pinned: bool = False


NO_REQUEST = RequestedState()


@dataclass(slots=True)
class Instance:
    """One instance as it is believed to be."""

    info: InstanceInfo
    holder: int  # its number in the cache index
    role: InstanceRole
    state: InstanceState
    reported_s: float
    said: InstanceState = InstanceState.STARTING
    load: InstanceLoad = field(default_factory=InstanceLoad)
    reason: str = ""
    worker_run: int = 0
    drain_wanted: bool | None = None  # None: not asked
    role_pinned: bool = False  # an operator chose it
    version: int = 0  # of its last change
    next_report_s: float = 0.0  # after how long it is to report again
    suspect_at_s: float = 0.0  # when its silence means something
    gone_at_s: float = 0.0  # when it is forgotten
    excused_s: float = 0.0  # of its silence: this process did not run
    sequence: int = 0  # of its last cache changes that were taken in; 0: none were
    want_full: bool = False
    surplus: int = 0  # of the last report
    foreign: int = 0
    """Requests there that this conductor did not send, as two reports in a row agree. One report alone may be older
    than the end of a request."""
    short_since_s: float | None = (
        None  # since when it has fewer requests than were sent there and have not ended
    )
    idle_since_s: float | None = None  # None: busy, or it never reported any load

    @property
    def ready(self) -> bool:
        """Whether it gets new requests."""
        return self.state == InstanceState.READY


def _short(value: str) -> str:
    """A digest cut to what a person compares."""
    return value if len(value) <= 24 else f"{value[:12]}..."


class Registry:
    """The known instances with their state and load. Times are seconds of one monotonic clock."""

    def __init__(
        self,
        *,
        suspect_after_s: float,
        lease_s: float,
        count_max: int,
        report_interval_s: float = 0.0,
        first_version: int = 1,
        changed: Callable[[Instance], None] | None = None,
    ) -> None:
        """changed: called with an instance after its state, role or description has changed."""
        self._suspect_after_s = suspect_after_s
        self._lease_s = lease_s
        self._report_interval_s = report_interval_s
        self._count_max = count_max
        self._changed = changed or (lambda instance: None)
        self._instances: dict[str, Instance] = {}
        self._of_model: dict[str, dict[str, Instance]] = {}
        self._roles: dict[str, InstanceRole] = {}  # set by an operator; kept while the instance is known
        self._free: list[int] = []
        self._next_holder = 0
        self._by_change: OrderedDict[str, None] = OrderedDict()  # names, the last changed at the end
        self._gone: OrderedDict[str, int] = (
            OrderedDict()
        )  # names that were forgotten, with the version since when
        self._oldest = first_version  # changes after this version are known
        self.version = first_version

    def __len__(self) -> int:
        return len(self._instances)

    def __iter__(self) -> Iterator[Instance]:
        return iter(self._instances.values())

    def get(self, instance_id: str) -> Instance | None:
        """The instance of that name."""
        return self._instances.get(instance_id)

    def of_model(self, model: str) -> list[Instance]:
        """All instances of a model."""
        return list(self._of_model.get(model, {}).values())

    def apart(self, instance: Instance) -> str:
        """The reason why the instance cannot share blocks with others of its model, "" when it can.

        The oldest instance of another passport group is compared; equal passports make equal groups.
        """
        mine = instance.info
        for other in self.of_model(mine.model):
            theirs = other.info
            if mine.group and theirs.group and mine.group != theirs.group:
                fields = passport_from_json(mine.passport_json).diff(passport_from_json(theirs.passport_json))
                texts = [f"{name} is {_short(own)}, there {_short(far)}" for name, own, far in fields]
                return f"cannot share blocks with {theirs.instance_id}: {'; '.join(texts)}"
        return ""

    def divided_models(self) -> set[str]:
        """Models whose instances are in several passport groups; `apart` is "" for all others."""
        first: dict[str, int] = {}
        return {
            info.model
            for info in (instance.info for instance in self._instances.values())
            if info.group and first.setdefault(info.model, info.group) != info.group
        }

    def require(self, instance_id: str, incarnation: int) -> Instance:
        """The instance. Raises InstanceUnknown for other names and other incarnations."""
        found = self._instances.get(instance_id)
        if found is None or found.info.incarnation != incarnation:
            what = "is not registered" if found is None else "is registered with another incarnation"
            raise errors.InstanceUnknown(f"instance {instance_id[:128]!r} {what}; register it again")
        return found

    def register(
        self, info: InstanceInfo, state: InstanceState, now_s: float, requested: RequestedState = NO_REQUEST
    ) -> tuple[Instance, int | None]:
        """Take an instance in; return it and the holder number whose contents are gone, if any.

        Raises LimitExceeded when there are too many, StaleIncarnation when another worker serves the name.
        """
        known = self._instances.get(info.instance_id)
        if known is not None:
            self._refuse_twin(known, info, requested.worker_run, now_s)
        if known is None:
            if len(self._instances) >= self._count_max:
                raise errors.LimitExceeded(f"{self._count_max} instances are registered already")
            holder = self._free.pop() if self._free else self._take_holder()
            known = Instance(info, holder, info.role, InstanceState.STARTING, now_s)
            known.drain_wanted = requested.drain
            if requested.role_pinned:
                known.role_pinned, self._roles[info.instance_id] = True, info.role
            self._instances[info.instance_id] = known
            self._gone.pop(info.instance_id, None)
            lost = None
        else:
            lost = known.holder if known.info.incarnation != info.incarnation else None
            self._leave_model(known)
            known.info = info
        self._of_model.setdefault(info.model, {})[info.instance_id] = known
        if lost is not None:
            known.load, known.sequence, known.want_full = InstanceLoad(), 0, False
            known.idle_since_s, known.short_since_s, known.surplus, known.foreign = None, None, 0, 0
        known.role = self._roles.get(info.instance_id, info.role)
        known.reason, known.said, known.worker_run = "", state, requested.worker_run
        self._heard(known, now_s)
        self._update_state(known, now_s)
        self._touch(known)
        self._changed(known)
        return known, lost

    def _refuse_twin(self, known: Instance, info: InstanceInfo, worker_run: int, now_s: float) -> None:
        """Raise StaleIncarnation when another worker that is alive serves the name.

        A worker that was started again is taken as soon as the former one has said that it ends, or is silent.
        """
        same = known.info.incarnation == info.incarnation or (worker_run and worker_run == known.worker_run)
        ended = known.said == InstanceState.DRAINING and not known.drain_wanted
        silent_s = now_s - known.reported_s
        if same or not (worker_run and known.worker_run) or ended or now_s > known.suspect_at_s:
            return
        raise errors.StaleIncarnation(
            f"instance {info.instance_id[:128]!r} is served by another worker on {known.info.host_id or 'a host'} at "
            f"{known.info.url or 'a URL not known yet'}, which reported {silent_s:.1f} s ago; "
            "give this one a different name (worker.instance_id) or stop the other"
        )

    def report(
        self, instance: Instance, state: InstanceState, load: InstanceLoad, reason: str, now_s: float
    ) -> None:
        """Take a report in."""
        if load.running or load.waiting:
            instance.idle_since_s = None
        elif instance.load.running or instance.load.waiting:
            instance.idle_since_s = now_s
        instance.load, instance.said = load, state
        self._heard(instance, now_s)
        if reason != instance.reason:
            instance.reason = reason
            self._touch(instance)
        self._update_state(instance, now_s)

    def set(
        self,
        instance_id: str,
        role: InstanceRole | None,
        drain: bool | None,
        now_s: float,
        *,
        pinned: bool = False,
    ) -> Instance:
        """Carry out a wish; None leaves things. pinned: an operator's. Raises InstanceUnknown."""
        instance = self._instances.get(instance_id)
        if instance is None:
            raise errors.InstanceUnknown(f"instance {instance_id[:128]!r} is not registered")
        if role is not None and role != instance.role:
            self._roles[instance_id] = instance.role = role
            self._touch(instance)
            self._changed(instance)
        if role is not None and pinned:
            self._roles[instance_id], instance.role_pinned = role, True
        if drain is not None and drain != instance.drain_wanted:
            instance.drain_wanted = drain
            self._touch(instance)
        self._update_state(instance, now_s)
        return instance

    def renew(self, now_s: float) -> None:
        """All instances count as heard just now: who listened to them is gone, and they have to find another."""
        for instance in self._instances.values():
            self._heard(instance, now_s)
            self._update_state(instance, now_s)

    def unheard(self, seconds: float, now_s: float) -> None:
        """This process did not run for so long until now: what was not heard meanwhile is no silence of theirs.

        Only the longest such time of a silence counts. A process that runs late again and again reads reports in
        between, so who is still not heard is silent.
        """
        for instance in self._instances.values():
            more_s = max(0.0, min(seconds, now_s - instance.reported_s) - instance.excused_s)
            instance.excused_s += more_s
            instance.suspect_at_s += more_s
            instance.gone_at_s += more_s

    def expire(self, now_s: float) -> list[Instance]:
        """Make silent instances suspect and forget those whose lease is over; return the forgotten."""
        for instance in self._instances.values():
            self._update_state(instance, now_s)
        gone = [instance for instance in self._instances.values() if now_s > instance.gone_at_s]
        for instance in gone:
            del self._instances[instance.info.instance_id]
            self._leave_model(instance)
            self._roles.pop(instance.info.instance_id, None)
            self._free.append(instance.holder)
            self.version += 1
            self._forget(instance.info.instance_id)
        return gone

    def changes(self, since: int) -> tuple[list[Instance], list[str]] | None:
        """The instances changed and gone since that version; None when the version is too old."""
        if not self._oldest <= since <= self.version:
            return None
        changed = []
        for name in reversed(self._by_change):
            instance = self._instances[name]
            if instance.version <= since:
                break
            changed.append(instance)
        return changed, [name for name, version in self._gone.items() if version > since]

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        holders = [instance.holder for instance in self._instances.values()]
        assert len(set(holders)) == len(holders), "two instances share a holder number"
        assert not set(holders) & set(self._free), "a holder number is free and in use"
        listed = sorted(name for there in self._of_model.values() for name in there)
        assert listed == sorted(self._instances), "the models and the instances disagree"
        assert set(self._by_change) == set(self._instances), "changes are kept of instances that are gone"
        assert not set(self._gone) & set(self._instances), "an instance is known and gone"
        assert set(self._roles) <= set(self._instances), "a role is kept for an instance that is gone"

    @property
    def interval_s(self) -> float:
        """How often each instance is to report: all of them together no more often than a conductor can handle."""
        return max(self._report_interval_s, len(self._instances) / REPORTS_PER_S)

    def _pause_s(self, instance: Instance, now_s: float) -> float:
        """The interval after which the instance should report again.

        Of many, each has its own moment of the interval, by its holder number. Those that register together, with a
        conductor that was started again, would otherwise always report together, and decisions wait behind them.
        """
        interval_s = self.interval_s
        if interval_s <= self._report_interval_s:
            return interval_s
        moment_s = interval_s * instance.holder / len(self._instances)
        return interval_s / 2 + (moment_s - now_s - interval_s / 2) % interval_s

    def _heard(self, instance: Instance, now_s: float) -> None:
        """Note that the instance lives; one that reports more seldom may be silent for longer.

        What a standby hears late of a report makes no later one void.
        """
        now_s = max(now_s, instance.reported_s)
        instance.reported_s, instance.next_report_s = now_s, self._pause_s(instance, now_s)
        instance.excused_s = 0.0
        spaced_s = max(instance.next_report_s, self.interval_s)
        if spaced_s <= self._report_interval_s:
            spaced_s = 0.0
        instance.suspect_at_s = now_s + max(self._suspect_after_s, SUSPECT_INTERVALS * spaced_s)
        instance.gone_at_s = now_s + max(self._lease_s, LEASE_INTERVALS * spaced_s)

    def _touch(self, instance: Instance) -> None:
        self.version += 1
        instance.version = self.version
        self._by_change[instance.info.instance_id] = None
        self._by_change.move_to_end(instance.info.instance_id)

    def _forget(self, name: str) -> None:
        """Note that the instance is gone; of long ago only the version is kept from which on everything is known."""
        self._by_change.pop(name, None)
        self._gone[name] = self.version
        while len(self._gone) > GONE_MAX:
            _, self._oldest = self._gone.popitem(last=False)

    def _leave_model(self, instance: Instance) -> None:
        there = self._of_model[instance.info.model]
        del there[instance.info.instance_id]
        if not there:
            del self._of_model[instance.info.model]

    def _take_holder(self) -> int:
        self._next_holder += 1
        return self._next_holder - 1

    def _update_state(self, instance: Instance, now_s: float) -> None:
        state = instance.said
        if instance.drain_wanted and state == InstanceState.READY:
            state = InstanceState.DRAINING
        if now_s > instance.suspect_at_s:
            state = InstanceState.SUSPECT
        if state != instance.state:
            instance.state = state
            self._touch(instance)
            self._changed(instance)
