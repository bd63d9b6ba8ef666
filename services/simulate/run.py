"""`simulate`: a trace, a cluster and a policy in; what would have happened out.

The loop takes arrivals from the trace and events from the queue, whichever comes first. Everything that happens
is in the parts: scheduling (decisions), prefilling, decoding, failures.
"""

from __future__ import annotations

import gc
import heapq
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mooncache.errors import SimulationInvalid
from mooncache.simulate.cluster import ClusterSpec, FirstToken
from mooncache.simulate.decoding import Decoding
from mooncache.simulate.duties import Duties
from mooncache.simulate.failures import FailureInjector
from mooncache.simulate.options import SimOptions, SimProgress
from mooncache.simulate.prefilling import Prefilling
from mooncache.simulate.result import Result
from mooncache.simulate.scheduling import SimScheduler
from mooncache.simulate.sim_request import SimOutcome, SimRequest
from mooncache.simulate.world import World

if TYPE_CHECKING:
    from mooncache.simulate.node import SimNode
    from mooncache.traces import Trace

_PROGRESS_CALLS = 100
_SAMPLES_MAX = 50_000  # of a trace; a stamp of another decade makes samples rare, not the run endless


def simulate(
    trace: Trace, cluster: ClusterSpec, options: SimOptions | None = None, progress: SimProgress | None = None
) -> Result:
    """Run the trace on the cluster.

    progress: called some hundred times with (requests that arrived, all requests, simulated seconds).
    Raises CLUSTER_INVALID, PROFILE_INVALID, MODEL_TOO_LARGE or SIMULATION_INVALID before anything runs.
    """
    options = (options or SimOptions()).check()
    cluster.check().reachable(
        options.ttft_slo_s or cluster.slo.ttft_s, options.tbt_slo_s or cluster.slo.tbt_s
    )
    if len(trace) and trace.block_tokens != cluster.block_tokens:
        raise SimulationInvalid(
            f"the trace has blocks of {trace.block_tokens} tokens, the cluster of {cluster.block_tokens}: set the "
            "cluster's block_tokens to the trace's"
        )
    if options.spread_tick_s:
        trace = trace.spread(options.spread_tick_s)
    began_s = time.perf_counter()
    with _rare_collections():
        result = Simulation(trace, cluster, options).run(progress)
    result.totals.wall_s = time.perf_counter() - began_s
    return result


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Run Python's garbage collector rarely: a run makes few cycles, and its caches have millions of entries."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Simulation:
    """One run. Use `simulate`."""

    def __init__(self, trace: Trace, cluster: ClusterSpec, options: SimOptions) -> None:
        self.world = World(trace, cluster, options)
        self.scheduler = SimScheduler(self.world)
        decoding = Decoding(self.world, self.scheduler, self._begin_inline, self._finish_inline)
        self.prefilling = Prefilling(self.world, self.scheduler, decoding)
        failures = FailureInjector(self.world, self.scheduler, self.prefilling, self.place)
        self.duties = Duties(self.world, failures)
        self._steps_less = 1 if cluster.first_token == FirstToken.PREFILL else 0
        self._decisions = 0

    def run(self, progress: SimProgress | None) -> Result:
        """Play the whole trace and let what is under way end."""
        world, queue = self.world, self.world.queue
        arrivals = world.trace.arrival_s.tolist()
        count = len(arrivals)
        inputs, outputs = world.trace.input_tokens.tolist(), world.trace.output_tokens.tolist()
        every = max(1, count // _PROGRESS_CALLS)
        sample_s = max(world.options.sample_s, world.trace.span_s / _SAMPLES_MAX)
        next_sample_s = arrivals[0] if count else 0.0
        at = 0
        while at < count or queue:
            arrival_s = arrivals[at] if at < count else float("inf")
            event_s = queue[0][0] if queue else float("inf")
            now_s = arrival_s if arrival_s <= event_s else event_s
            while now_s >= next_sample_s:
                world.record.sample(next_sample_s, world.index)
                next_sample_s += sample_s
            world.now_s = now_s
            if arrival_s <= event_s:
                self.arrive(at, arrival_s, inputs[at], max(1, outputs[at]))
                at += 1
                if progress is not None and (at % every == 0 or at == count):
                    progress(at, count, now_s)
            else:
                _, _, handler, arguments = heapq.heappop(queue)
                world.events += 1
                handler(*arguments)
        world.record.sample(world.now_s, world.index)
        world.record.totals.events = world.events
        world.record.totals.decode_s = sum(node.batch.busy_s for node in world.nodes)
        return world.record.result(world.cluster.name)

    def arrive(self, at: int, now_s: float, input_tokens: int, output_tokens: int) -> None:
        """A request comes in."""
        world = self.world
        request = SimRequest(
            at, now_s, input_tokens, output_tokens - self._steps_less, world.trace.blocks(at)
        )
        world.requests[at] = request
        world.record.arrived += 1
        self.place(request)

    def place(self, request: SimRequest, exclude: frozenset[int] = frozenset()) -> None:
        """Decide where the request goes, or refuse it."""
        self._decisions += 1
        request.decision = self._decisions
        choice = self.scheduler.decide(request, exclude)
        if not choice.admitted:
            del self.world.requests[request.index]
            self.world.record.over(request, SimOutcome.REJECTED, self.world.now_s, choice.reason)
            return
        request.choice = choice
        self.duties.used(request)
        self.prefilling.enqueue(request)
        self.world.record.decided(request)

    def _begin_inline(self, request: SimRequest, node: SimNode) -> None:
        """A decode batch computes a prompt itself."""
        self.prefilling.begin(request, [node])

    def _finish_inline(self, request: SimRequest) -> None:
        """It has computed the prompt."""
        self.prefilling.finish(request)
