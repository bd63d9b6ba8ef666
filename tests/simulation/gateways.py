"""Gateways of a simulated cluster: the real drive of requests, from the body to the report of the end.

Real are the ASGI endpoint, the intake, plans, legs, accounts, the line to the conductor and the duties. Modelled are
the HTTP clients, HTTP to the engines (engines.py) and the tokenizer: a prompt is a name, and its blocks are known.
"""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from functools import partial
from typing import TYPE_CHECKING, Any

from mooncache.auth import FixedTokens
from mooncache.client.conductor_link import ConductorLink
from mooncache.client.members import Announcer
from mooncache.gateway.app import Endpoint
from mooncache.gateway.background import close_lost_plans, lease_limits, watch_instances
from mooncache.gateway.core.bodies import Budget
from mooncache.gateway.core.body import TokenizedPrompt, prompt_json
from mooncache.gateway.core.fleet import FleetView
from mooncache.gateway.core.rate_limit import RateLimits, default_limits
from mooncache.gateway.endpoints import completions
from mooncache.gateway.metrics import GatewayMetrics
from mooncache.gateway.shell.conductor import Conductor
from mooncache.gateway.shell.keyring import Caller
from mooncache.gateway.shell.open_requests import ENDS
from mooncache.gateway.shell.report_lanes import LANES
from mooncache.gateway.state import GatewayState
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime.duties import Duty, DutyRunner
from mooncache.runtime.metrics import Metrics
from tests.simulation.engines import BLOCK_TOKENS, MODEL, EngineLine, expected_text
from tests.simulation.network import CLUSTER

if TYPE_CHECKING:
    from tests.simulation.world import World

END_GRACE_S = 12.0
"""Beyond the limit of a request, for the gateway's last words to a client that takes nothing."""


class _Tokenizers:
    """In the place of tokenizers: a prompt's text names it."""

    public_salt = ""

    def __init__(self, world: World) -> None:
        self._world = world

    async def tokenize(self, request: object, content: Any, model: object, salt: str) -> TokenizedPrompt:
        name = content.fields["prompt"]
        keys, number = self._world.prompt_keys(name), self._world.prompts.index(name)
        tokens = [array("i", [number])]
        return TokenizedPrompt(
            lengths=(len(keys) * BLOCK_TOKENS + 1,),
            prompts=[],
            prompt_json=prompt_json(tokens),
            keys=b"".join(keys),
            block_tokens=BLOCK_TOKENS,
        )

    async def prepare(self, model: object) -> None:
        """There is nothing to load."""

    def compare(self, *_: object) -> None:
        """Lengths agree."""


class _Keyring:
    """In the place of keys: a key's text names its tenant."""

    def __init__(self, limits: RateLimits) -> None:
        self._limits = limits
        self.budgets: dict[str, float] = {}

    def identify(self, authorization: str) -> Caller:
        return Caller(authorization, False, self._limits)

    def running_limit(self, _holder: str) -> int:
        return self._limits.requests_under_way


class SimGateway:
    """One life of a gateway's process, and the clients that are connected to it."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.process = world.begin(name)
        self.rng = random.Random(world.rng.random())
        self.clock = world.clock_of(self.process)
        self.state: GatewayState
        self.open: dict[str, float] = {}  # request -> when it began
        self.ended_decisions: list[str] = []  # whose end this process has reported
        self.process.run(self._build)
        self.process.spawn(self._run())

    def _build(self) -> None:
        world, config = self.world, self.world.config
        metrics = Metrics("gateway")
        stats, fleet = GatewayMetrics(metrics), FleetView()
        link = ConductorLink(config.cluster.conductor_target, CLUSTER.text, config)
        unused: Any = None
        parts: Any = {
            "keyring": _Keyring(default_limits(config.gateway)),
            "engines": EngineLine(world, self.name),
            "tokenizers": _Tokenizers(world),
        }
        self.state = GatewayState(
            config=config,
            clock=self.clock,
            tokens=FixedTokens(CLUSTER),
            metrics=metrics,
            stats=stats,
            fleet=fleet,
            conductor=Conductor(
                link, self.clock, stats, fleet, random.Random(f"reports {world.seed} {self.name}")
            ),
            preparing=unused,
            usage=unused,
            bodies=Budget(config.gateway.open_body_bytes_max, config.gateway.tenant_body_bytes_max),
            gateway_id=self.name,
            url=f"http://{self.name}",
            **parts,
        )
        self.state.conductor.gateway_id = self.name
        self._note_ends(self.state.conductor)
        self.announcer = Announcer(link, self.clock, self._member)
        self.state.idle.set()
        self._endpoint = Endpoint(
            self.state, "completions", completions.handle_text, methods=("POST",), limited=True
        )

    def _note_ends(self, conductor: Any) -> None:
        """Know of each end that the gateway hands over to be reported."""
        report = conductor.report

        def noted(request_id: str, said: pb.ReportProgressRequest, *, at_once: bool = False) -> None:
            if said.decision_id and said.phase in ENDS:
                self.ended_decisions.append(said.decision_id)
            report(request_id, said, at_once=at_once)

        conductor.report = noted

    def _member(self) -> pb.Member:
        return pb.Member(kind=pb.MEMBER_KIND_GATEWAY, name=self.name, address=self.state.url)

    async def _run(self) -> None:
        state = self.state
        lanes = [
            Duty(f"send_reports_{lane}", partial(state.conductor.send_reports, lane)) for lane in range(LANES)
        ]
        DutyRunner(self.clock, self.world.duty_failed(self.name)).start(
            [
                Duty("watch_instances", lambda: watch_instances.run(state)),
                Duty("lease_limits", lambda: lease_limits.run(state)),
                Duty("follow_leader", lambda: state.conductor.follow_leader(state.gateway)),
                Duty("close_lost_plans", lambda: close_lost_plans.run(state)),
                Duty("announce", self.announcer.run),
                *lanes,
            ]
        )
        while not self.world.no_requests:
            await self.clock.sleep(self.rng.expovariate(1 / (0.1 + 2 * self.world.shape.think_s)))
            number = next(self.world.lines)
            self.process.spawn(self.request(f"r{number}"))

    async def request(self, request_id: str) -> None:
        """One client's request, and what is checked of its answer."""
        world, began_s, stopped_s = self.world, self.clock.now_s(), self.process.stopped_s
        self.open[request_id] = began_s
        calm = world.whole_since_s is not None and began_s - world.whole_since_s > 4.0
        exchange = HttpClient(self, request_id)
        await self._endpoint(exchange.scope, exchange.receive, exchange.send)
        del self.open[request_id]
        took_s = self.clock.now_s() - began_s - (self.process.stopped_s - stopped_s)
        if took_s > world.config.gateway.request_timeout_s + END_GRACE_S:
            world.ledger.ended_late(self.name, request_id, took_s)
        world.ledger.counts[f"request {exchange.status}"] += 1
        exchange.check()
        if calm:
            world.calm_requests.append((exchange.tenant, request_id))
            if not exchange.leaves and exchange.status not in (200, 429, 503):
                world.ledger.fail("served when whole", f"{request_id} was answered with {exchange.status}")

    def check(self) -> None:
        """Raise AssertionError when a book of the gateway is wrong."""
        state = self.state
        assert state.active_count >= 0 and state.bodies.bytes >= 0, "a count of the gateway is negative"
        state.limiter.check()
        if not self.open:
            assert not state.active_count and not state.bodies.bytes and not state.tenant_counts, (
                f"{self.name} counts requests that have ended"
            )


class HttpClient:
    """A client of one request; some leave before the end."""

    def __init__(self, gateway: SimGateway, request_id: str) -> None:
        rng, world = gateway.rng, gateway.world
        self._gateway, self.request_id = gateway, request_id
        self.tenant = rng.choice(["t1", "t2"])
        self.prompt = rng.choice(world.prompts)
        self.count = rng.randrange(1, 12)
        self.stream = rng.random() < 0.6
        self.leaves = rng.random() < 0.15
        body = {"model": MODEL, "prompt": self.prompt, "max_tokens": self.count, "stream": self.stream}
        self._body: bytes | None = json.dumps(body).encode()
        self._left = asyncio.Event()
        self.status, self.ended, self.data = 0, 0, b""
        headers = {"x-request-id": request_id, "authorization": self.tenant}
        self.scope: Any = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
        }

    async def receive(self) -> Any:
        """The body, then nothing until the client leaves."""
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if self.leaves:
            await self._gateway.clock.sleep(
                self._gateway.rng.uniform(0.0, self._gateway.rng.choice([0.004, 1.0]))
            )
        else:
            await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        """A part of the answer."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        self.data += message["body"]
        self.ended += not message["more_body"]

    def check(self) -> None:
        """The answer is whole, and is that of the question."""
        fail = self._gateway.world.ledger.fail
        if self.leaves:
            return
        if self.ended != 1:
            fail("every request ends", f"the answer of {self.request_id} ended {self.ended} times")
        if self.status != 200:
            return
        if not self.stream:
            texts = json.loads(self.data)["choices"][0]["text"].split(" ")
        else:
            events = [line[6:] for line in self.data.split(b"\n") if line.startswith(b"data: ")]
            if events[-1:] != [b"[DONE]"]:
                fail("every request ends", f"the stream of {self.request_id} ended without its end")
            found = [json.loads(event) for event in events[:-1]]
            if any("error" in each for each in found):
                return
            texts = [each["choices"][0]["text"] for each in found if each.get("choices")]
        if texts != [expected_text(self.prompt, n) for n in range(self.count)]:
            fail(
                "no foreign bytes", f"{self.request_id} asked for {self.prompt} x{self.count} and got {texts}"
            )
