"""The commands of the conductor's stories: instances of one model, requests, and time that passes.

The scheduler and its policies are the real ones; engines do exactly what is expected of them. An instance computes
10,000 prompt tokens a second and loads 50,000 a second from the pool; a block has 100 tokens.
"""

from __future__ import annotations

import heapq
import json
import random
from collections.abc import Callable
from dataclasses import replace

from mooncache.client.keys import KEY_BYTES
from mooncache.client.results import MapNodeState, NodeView
from mooncache.conductor.core.decisions import (
    Decision,
    PoolAnswer,
    PoolState,
    SchedulingRequest,
)
from mooncache.conductor.core.handover_node import by_host
from mooncache.conductor.core.hot_prefixes import HotPrefixes, Speed
from mooncache.conductor.core.policy.types import Branch, PrefillCost, Rules
from mooncache.conductor.core.prefill_learner import PrefillLearner
from mooncache.conductor.core.progress import Phase, ProgressReport
from mooncache.conductor.core.rebalance import RoleKeeper
from mooncache.conductor.core.registry import InstanceInfo, InstanceState
from mooncache.conductor.core.scheduler import Scheduler
from mooncache.conductor.state import native_index
from mooncache.kvcache.instance_load import InstanceLoad
from tests.conductor.support import chain, scheduler_settings
from tests.stories import table

MODEL, ENGINE, GROUP = "m", "vllm", 7
BLOCK_TOKENS = 100
KV_BYTES_PER_TOKEN = 20_000
COMPUTED_TOKENS_PER_S, LOADED_TOKENS_PER_S = 10_000.0, 50_000.0
TTFT_SLO_S, TBT_SLO_S = 10.0, 0.1
REPORT_S = 0.5
PLAN_S = 15.0
COPY_BYTES_PER_S = 1e9
POOL_NODES = 8
OPTIONS = {Branch.LOCAL: "own cache", Branch.FETCH: "from the pool", Branch.WAIT: "wait for another"}


class Serving:
    """Each `do_` is a command."""

    def __init__(self) -> None:
        settings = scheduler_settings(
            rules=Rules(holds=False, inline_tokens_max=512), ttft_slo_s=TTFT_SLO_S, tbt_slo_s=TBT_SLO_S
        )
        self.core = Scheduler(settings, random.Random(1), native_index)
        self.core.models.of(MODEL).prefills[ENGINE] = PrefillLearner(
            PrefillCost(0.0, 1 / COMPUTED_TOKENS_PER_S, 0.0, 0.0)
        )
        self.roles = RoleKeeper(TBT_SLO_S)
        self.hot = HotPrefixes(COPY_BYTES_PER_S)
        self.now_s = 1000.0
        self.prompts: dict[str, tuple[str, int]] = {}  # name -> (whose beginning it shares, blocks of that)
        self.pool: set[bytes] = set()  # keys of the blocks that the store nodes hold
        self.shared: dict[str, int] = {}  # tokens of prompts that others begin with
        self.decisions: dict[str, Decision] = {}
        self.names: dict[str, str] = {}  # decision id -> the request's name here
        self.rebalances = False
        self.hosts: dict[str, str] = {}  # instance -> its host
        self.nodes: list[NodeView] = []  # the pool's
        self.failed: set[str] = set()  # decisions whose engines do no longer what was expected
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._number = 0
        self._report()
        self._plan_roles()

    def end(self) -> None:
        self.core.check()
        self.hot.check()

    # --- what there is

    def do_instances(self, role: str, *names: str) -> None:
        """Instances that are ready."""
        for name in names:
            info = InstanceInfo(
                name,
                1,
                role,
                MODEL,
                engine=ENGINE,
                group=GROUP,
                block_tokens=BLOCK_TOKENS,
                kv_bytes_per_token=KV_BYTES_PER_TOKEN,
                kv_capacity_tokens=1_000_000,
                max_model_tokens=200_000,
                max_sequences=256,
                host_id=self.hosts.get(name, ""),
            )
            self.core.register(info, InstanceState.READY, self.now_s)

    def do_host(self, host: str, _runs: str, *names: str) -> None:
        """host h1 runs d1 node1: instances that come later, and nodes of the pool (their names begin with "node")."""
        for name in names:
            if name.startswith("node"):
                self.nodes.append(
                    NodeView(len(self.nodes), name, host, 1, MapNodeState.ACTIVE, "127.0.0.1", 1, "")
                )
            self.hosts[name] = host

    def do_drain(self, name: str) -> None:
        """A node of the pool takes no new blocks from now on."""
        self.nodes = [
            replace(node, state=MapNodeState.DRAINING) if node.node_id == name else node
            for node in self.nodes
        ]

    def do_prompt(self, name: str, _begins: str, _like: str, other: str, _for: str, tokens: str) -> None:
        """prompt B begins like A for 8000: they share so many leading tokens."""
        self.prompts[name] = (other, count(tokens) // BLOCK_TOKENS)

    def do_cached(self, name: str, prompt: str, tokens: str) -> None:
        """An engine has computed the leading tokens of a prompt a while ago: it has them, and so has the pool."""
        self._hold(name, self._keys(prompt, count(tokens)))

    def do_pool(self, prompt: str, tokens: str) -> None:
        """Only the store nodes hold the leading tokens of a prompt."""
        self.shared[prompt] = count(tokens)
        keys = self._keys(prompt, count(tokens))
        self.pool |= {keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)}

    # --- requests and time

    def do_request(self, name: str, prompt: str, tokens: str, **more: str) -> str:
        """request R PROMPT 10000 [ttft=S] [tbt=S] [answer=S] [avoid=P] [tenant=T] [priority=N]: a request arrives."""
        text = f"{name}: {self._said(self._request(name, prompt, count(tokens), **more))}"
        return "\n".join(filter(None, (text, self._given_up())))

    def do_load(self, prompts: str, tokens: str, duration: str, **more: str) -> str:
        """load 2/s 20000 60s [begins=PROMPT]: so many prompts a second, new but for the beginning."""
        every_s = 1.0 / float(prompts.removesuffix("/s"))
        sent = round(in_seconds(duration) / every_s)
        refused = 0
        begins = more.pop("begins", "")
        for _ in range(sent):
            name = f"load-{len(self.decisions)}"
            if begins:
                self.do_prompt(name, "begins", "like", begins, "for", str(self.shared[begins]))
            refused += not self._request(name, name, count(tokens), **more).choice.admitted
            self._pass(every_s)
        return f"{sent} sent, {refused} refused"

    def do_fail(self, name: str, **more: str) -> str:
        """fail R [again=yes]: the prefill leg of a request fails; its gateway may ask for another plan."""
        self.failed.add(self.decisions[name].decision_id)
        report = ProgressReport(Phase.PREFILL_FAILED, prefill_may_follow=more.get("again") == "yes")
        self.core.report_progress(self.decisions[name].decision_id, report, self.now_s)
        return self._given_up() or "nothing is given up"

    def do_disconnect(self, name: str) -> str:
        """The client of a request goes away."""
        self.failed.add(self.decisions[name].decision_id)
        report = ProgressReport(Phase.ABORTED)
        self.core.report_progress(self.decisions[name].decision_id, report, self.now_s)
        return self._given_up() or "nothing is given up"

    def do_wait(self, duration: str) -> None:
        """Time passes; engines do what was expected of them and report."""
        self._pass(in_seconds(duration))

    def do_prices(self, name: str) -> str:
        """What each prefill instance would have taken for a request, option by option; the chosen one is marked."""
        decision = self.decisions[name]
        self.core.keep_candidates(decision.record)
        document = json.loads(decision.record.to_json(self.core.settings.rules))
        rows: list[tuple[object, ...]] = [("instance", "way", "queue", "blocks there", "compute", "all")]
        for one in document["prefill_candidates"]:
            for option in one["branches"]:
                parts = one["queue_ms"], option["ready_ms"], option["compute_ms"], option["total_ms"]
                chosen = (one["instance_id"], option["kind"]) == (decision.prefill, decision.choice.branch)
                times = [f"{part / 1e3:.2f} s" for part in parts]
                rows.append((one["instance_id"], OPTIONS[option["kind"]], *times, "<-" if chosen else ""))
        return table(rows)

    # --- duties

    def do_rebalance(self) -> None:
        """From now on instances may change between prefill and decode; looked at every 15 s."""
        self.rebalances = True

    def do_roles(self) -> str:
        names: dict[str, list[str]] = {"prefill": [], "decode": []}
        for instance in self.core.registry:
            names[instance.role].append(instance.info.instance_id)
        return table([(role, " ".join(sorted(found))) for role, found in names.items()])

    def do_copies(self) -> str:
        """Which prefixes should have more copies in the pool now, and which may lose some."""
        speeds = {MODEL: Speed(LOADED_TOKENS_PER_S, KV_BYTES_PER_TOKEN, BLOCK_TOKENS)}
        orders = [
            *self.hot.plan(speeds, POOL_NODES, self.now_s),
            *self.hot.plan_removals(speeds, self.now_s),
        ]
        rows = [(self._place(order.keys), f"{order.before} -> {order.copies} copies") for order in orders]
        return table(sorted(rows)) or "no change"

    # --- helpers

    def _given_up(self) -> str:
        """Return what the store nodes are asked to give up now."""
        rows = []
        for each in self.core.take_give_ups(self.now_s):
            tokens = f"tokens {each.begin * BLOCK_TOKENS} to {each.end * BLOCK_TOKENS}"
            where = each.store_node or "any node"
            rows.append((self.names[each.decision_id], tokens, f"will not come to {where}: {each.reason}"))
        return table(rows)

    def _request(self, name: str, prompt: str, tokens: int, **more: str) -> Decision:
        answer_s = in_seconds(more.pop("answer", "1s"))
        keys = self._keys(prompt, tokens)
        request = SchedulingRequest(
            name,
            MODEL,
            tokens,
            more.pop("tenant", "tenant"),
            keys=keys,
            priority=int(more.pop("priority", "0")),
            ttft_slo_s=in_seconds(more.pop("ttft", "0s")),
            tbt_slo_s=in_seconds(more.pop("tbt", "0s")),
            exclude=frozenset(filter(None, more.pop("avoid", "").split(","))),
            attempt=int(more.pop("attempt", "1")),
        )
        if more:
            raise TypeError(f"a request has no {', '.join(more)}")
        blocks = self._in_pool(keys)
        decision = self.decisions[name] = self.core.schedule(
            request,
            PoolAnswer(PoolState.OK, blocks, nodes=by_host(self.nodes)),
            self.now_s,
            self.now_s,
        )
        self.names[decision.decision_id] = name
        if decision.choice.admitted:
            if blocks:
                self.hot.use(MODEL, keys, blocks, BLOCK_TOKENS, self.now_s)
            self._follow(decision, keys, answer_s)
        return decision

    def _follow(self, decision: Decision, keys: bytes, answer_s: float) -> None:
        """What the engines will do."""
        choice = decision.choice
        computed_s, first_s = self.now_s + choice.total_s, self.now_s + choice.ttft_s

        def unless_failed(event: Callable[[], object]) -> Callable[[], object]:
            return lambda: None if decision.decision_id in self.failed else event()

        def tell(phase: Phase) -> Callable[[], object]:
            report = ProgressReport(phase, output_tokens=20)
            return unless_failed(lambda: self.core.report_progress(decision.decision_id, report, self.now_s))

        self._at(computed_s, unless_failed(lambda: self._hold(decision.prefiller, keys)))
        if decision.prefill:
            self._at(computed_s, tell(Phase.PREFILLED))
        self._at(first_s, tell(Phase.FIRST_TOKEN))
        self._at(first_s + answer_s, tell(Phase.FINISHED))

    def _hold(self, name: str, keys: bytes) -> None:
        """An engine has computed or loaded these blocks: they are in its own cache and in the pool."""
        self.pool |= {keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)}
        instance = self.core.registry.get(name)
        assert instance is not None
        sequence = instance.sequence + 1
        self.core.cache.apply(
            instance, full=False, stored=keys, removed=b"", sequence=sequence, keys_max=len(keys)
        )

    def _at(self, at_s: float, event: Callable[[], object]) -> None:
        self._number += 1
        heapq.heappush(self._events, (at_s, self._number, event))

    def _pass(self, duration_s: float) -> None:
        until_s = self.now_s + duration_s
        while self._events and self._events[0][0] <= until_s:
            at_s, _, event = heapq.heappop(self._events)
            self.now_s = max(self.now_s, at_s)
            event()
        self.now_s = max(self.now_s, until_s)

    def _report(self) -> None:
        for instance in self.core.registry:
            load = InstanceLoad(running=self.core.assigned(instance))
            self.core.report(instance, InstanceState.READY, load, "", self.now_s)
        self._at(self.now_s + REPORT_S, self._report)

    def _plan_roles(self) -> None:
        model = self.core.models.of(MODEL)
        for name, role in (
            self.roles.plan(model, self.core.registry, set(), self.now_s) if self.rebalances else ()
        ):
            self.core.registry.set(name, role, None, self.now_s)
        self._at(self.now_s + PLAN_S, self._plan_roles)

    def _keys(self, prompt: str, tokens: int) -> bytes:
        other, shared = self.prompts.get(prompt, ("", 0))
        return chain(prompt, tokens // BLOCK_TOKENS, parent=other, shared=min(shared, tokens // BLOCK_TOKENS))

    def _in_pool(self, keys: bytes) -> int:
        """Return how many leading blocks the pool holds."""
        held = 0
        while keys[held * KEY_BYTES : (held + 1) * KEY_BYTES] in self.pool:
            held += 1
        return held

    def _place(self, keys: bytes) -> str:
        """Return which tokens of which prompt these blocks are."""
        for prompt in self.shared:
            at = self._keys(prompt, 100_000).find(keys)
            if at >= 0:
                begin = at // KEY_BYTES * BLOCK_TOKENS
                return f"{prompt}, tokens {begin} to {begin + len(keys) // KEY_BYTES * BLOCK_TOKENS}"
        raise AssertionError("blocks of no prompt")

    def _said(self, decision: Decision) -> str:
        choice, request = decision.choice, decision.policy_request
        if not choice.admitted:
            doubt = f" ({request.lateness:.0%} more if late)" if choice.waiting_s > 0 else ""
            why = {
                "ttft": f"first token in {choice.ttft_s:.1f} s{doubt}, promised in {request.ttft_slo_s:g} s",
                "tbt": f"a token in {choice.tbt_s * 1e3:.0f} ms, promised in {request.tbt_slo_s * 1e3:g} ms",
            }.get(choice.reason, choice.reason)
            return f"refused; {why}; come back in {choice.retry_after_s:.1f} s"
        there = []
        if choice.branch == Branch.WAIT:
            name = self.names[choice.awaited.decision_id] if choice.awaited is not None else "nobody"
            there.append(f"waits {choice.ready_s:.2f} s for {choice.prefix_tokens} that {name} computes")
        else:
            local = min(decision.local_tokens, choice.prefix_tokens)
            there += [f"{local} cached there"] if local else []
            there += [f"{choice.fetch_tokens} from the pool"] if choice.fetch_tokens else []
        there.append(f"{decision.computed_tokens} computed")
        who = (
            f"prefill {decision.prefill}, decode {decision.decode}"
            if decision.prefill
            else f"{decision.decode} alone"
        )
        through = f"; through {decision.store_node}" if decision.store_node else ""
        return f"{who}; {', '.join(there)}; first token in {choice.ttft_s:.2f} s{through}"


def count(tokens: str) -> int:
    """10000 or 10,000"""
    return int(tokens.replace(",", ""))


def in_seconds(duration: str) -> float:
    return float(duration.removesuffix("s"))
