"""What the duties and the control call of one worker share. All of it is used from one event loop."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from mooncache._version import __version__
from mooncache.client.conductor_link import ConductorLink
from mooncache.config import Config
from mooncache.kvcache.instance_load import InstanceLoad
from mooncache.kvcache.instance_messages import INSTANCE_ROLE_NUMBERS
from mooncache.kvcache.instance_role import InstanceRole
from mooncache.kvcache.keys import passport_to_json
from mooncache.kvcache.leg_reports import EndedLeg
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.clock import Clock
from mooncache.runtime.supervision import RunState, Supervision
from mooncache.worker.adapters.base import EngineAdapter
from mooncache.worker.core.event_stream import EventStream
from mooncache.worker.core.facts import EngineFacts
from mooncache.worker.core.load import LoadMeter
from mooncache.worker.core.own_cache import OwnCache
from mooncache.worker.engine_http import EngineHttp
from mooncache.worker.process import EngineProcess


class WorkerCounter(StrEnum):
    """What a worker counts, beside what its parts count themselves; metrics.py describes each."""

    REPORTS = "reports"
    REGISTRATIONS = "registrations"
    CONDUCTOR_CALL_FAILURES = "conductor_call_failures"
    SCRAPE_FAILURES = "scrape_failures"
    REPLAY_TIMEOUTS = "replay_timeouts"
    ENDED_LEGS = "ended_legs"
    ENDED_LEGS_LOST = "ended_legs_lost"
    LEG_REPORTS_INVALID = "leg_reports_invalid"


@dataclass(slots=True)
class WorkerState:
    """The state of one worker, shared by its duties and its control call."""

    config: Config
    clock: Clock
    rng: random.Random
    adapter: EngineAdapter
    link: ConductorLink
    http: EngineHttp
    supervision: Supervision
    meter: LoadMeter
    run_dir: Path
    state_dir: Path
    instance_id: str
    file_name: str  # the instance's name as part of file names
    role: InstanceRole
    host_id: str
    engine_key: str = field(repr=False)  # that the engine was started with
    engine_token: str  # fingerprint of the cluster token that it comes from
    next_engine_key: str = field(default="", repr=False)  # for its next start; "": the same
    next_engine_token: str = ""
    model: str = ""
    model_name: str = ""
    tokenizer_path: str = ""
    url: str = ""
    engine_port: int = 0  # of an engine that this worker starts
    incarnation: int = 0  # number of the engine's present run
    process: EngineProcess | None = None
    facts: EngineFacts | None = None  # None until the engine is ready and they are known
    facts_wait_s: float = 0.0
    passport_mark: tuple[int, int, int] = (0, 0, 0)
    load: InstanceLoad = field(default_factory=InstanceLoad)
    load_s: float = 0.0
    page: dict[str, float] = field(default_factory=dict)  # numbers of the last reading
    events: tuple[str, str] = ("", "")  # endpoints of the engine's cache events and of their replay
    cache: OwnCache | None = None
    stream: EventStream = field(default_factory=EventStream)
    invalid_events: int = 0
    ended_legs: deque[EndedLeg] = field(default_factory=deque)  # that the conductor has not heard of
    worker_run: int = 0  # number of this process's run
    drain_asked: bool | None = None  # what an operator wishes, None: not asked
    role_pinned: bool = False  # an operator chose the role
    stopping: bool = False  # the worker itself ends
    preparing: str = ""
    registered: bool = False
    heard_s: float = 0.0  # when the conductor last answered
    lease_s: float = 0.0  # silence after which it forgets the instance
    version: int = 0  # grows when the instance has to be registered anew
    failure: str = ""
    wake_report: asyncio.Event = field(default_factory=asyncio.Event)
    wake_events: asyncio.Event = field(default_factory=asyncio.Event)
    counters: Counter[WorkerCounter] = field(default_factory=Counter)

    def count(self, counter: WorkerCounter) -> None:
        """Count one more."""
        self.counters[counter] += 1

    def changed(self) -> None:
        """Something that the conductor should know at once has changed: register again."""
        self.version += 1
        self.wake_report.set()

    @property
    def attached(self) -> bool:
        """Whether the engine was started elsewhere."""
        return bool(self.config.worker.attach_url)

    @property
    def ready(self) -> bool:
        """Whether the engine is healthy and known."""
        return self.supervision.state == RunState.READY and self.facts is not None

    @property
    def draining(self) -> bool:
        return bool(self.drain_asked) or self.stopping

    @property
    def doing(self) -> str:
        """What the engine is doing, for people."""
        if self.preparing:
            return self.preparing
        if self.supervision.reason:
            return self.supervision.reason
        if not self.ready:
            return "waiting for its passport"
        if not self.draining:
            return "ready"
        return "drained" if self.load.idle else "draining"

    @property
    def instance_state(self) -> pb.InstanceState:
        """The instance's state as it is reported."""
        if not self.ready:
            return pb.INSTANCE_STATE_STARTING
        if self.supervision.reason:
            return pb.INSTANCE_STATE_SUSPECT
        return pb.INSTANCE_STATE_DRAINING if self.draining else pb.INSTANCE_STATE_READY

    def instance(self) -> pb.Instance:
        """The instance as it is registered."""
        facts = self.facts or EngineFacts()
        return pb.Instance(
            instance_id=self.instance_id,
            incarnation=self.incarnation,
            role=INSTANCE_ROLE_NUMBERS[self.role],
            state=self.instance_state,
            engine=self.adapter.name,
            engine_version=facts.engine_version,
            url=self.url,
            model=self.model_name,
            tokenizer_path=self.tokenizer_path,
            max_model_tokens=min(facts.max_model_tokens, 0xFFFFFFFF),
            kv_capacity_tokens=facts.kv_capacity_tokens,
            block_tokens=min(facts.block_tokens, 0xFFFFFFFF),
            passport_json=passport_to_json(facts.passport) if facts.passport else "",
            kv_bytes_per_token=facts.kv_bytes_per_token,
            host_id=self.host_id,
            max_sequences=min(facts.max_sequences or self.adapter.max_sequences, 0xFFFFFFFF),
            pool=facts.pool,
            software_version=__version__,
            engine_token=self.engine_token,
            orders_by_priority=self.adapter.orders_by_priority,
            stages=min(facts.stages, 0xFFFFFFFF),
            ranks=min(facts.ranks, 0xFFFFFFFF),
            replicas=min(facts.replicas, 0xFFFFFFFF),
        )
