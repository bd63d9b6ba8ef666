"""What is served, model by model: the book of its instances, and what was learnt of their speed and of its answers.

The registry says who exists and in which state; here it becomes rows of a `FleetBook`. Observations teach the cost
models, and what they say now is written into the book's columns, so that a decision asks no model.
"""

from __future__ import annotations

from collections import Counter

from mooncache.conductor.core import learning, placed
from mooncache.conductor.core.decisions import PoolAnswer
from mooncache.conductor.core.fleet_book import STAY_PRIOR_S, FleetBook
from mooncache.conductor.core.fleet_shape import InstanceShape, SourceRates
from mooncache.conductor.core.handover_stats import HandoverStats
from mooncache.conductor.core.holder_rates import BlockHolder, HolderRates
from mooncache.conductor.core.lateness import Lateness
from mooncache.conductor.core.learning import DecodeLearner, FadingMean, Follower, LoadSource, TransferLearner
from mooncache.conductor.core.offered_load import OfferedLoad
from mooncache.conductor.core.output_lengths import OutputLengths
from mooncache.conductor.core.policy.fleet import ROLES
from mooncache.conductor.core.policy.types import NO_ROW, DecodeCost, Ints, PrefixSource, TransferCost
from mooncache.conductor.core.prefill_learner import PrefillLearner
from mooncache.conductor.core.registry import Instance, InstanceInfo, Registry
from mooncache.kvcache.instance_load import InstanceLoad

MODELS_MAX = 1024  # models of which something is remembered
BLOCK_TOKENS_UNKNOWN = 16
_OTHERS_TOKENS = 512  # of a prompt that others sent, as long as nothing is known


class ServedModel:
    """One model; see the module's text. row_of_holder: row of each number in the index of caches."""

    def __init__(self, name: str, handover_margin_s: float) -> None:
        self.name = name
        self.book = FleetBook()
        self.row_of_holder: dict[int, int] = {}
        self.prefills: dict[str, PrefillLearner] = {}  # by type of instance
        # By instance, "" for all of them: what is fetched may lie at any node, what is handed over mostly on its host.
        self.transfers: dict[str, TransferLearner] = {}
        self.handovers: dict[str, TransferLearner] = {}
        self.from_host: dict[str, TransferLearner] = {}  # from the memory of the instance's own host
        self.from_ssd: dict[str, TransferLearner] = {}  # of what lay on disks
        self.holder_rates = HolderRates()
        self.rows_of_host: dict[str, set[int]] = {}
        self._kv_bytes_per_token = (
            learning.KV_BYTES_PER_TOKEN_UNKNOWN
        )  # of the instance that was heard of last
        self.decodes: dict[str, DecodeLearner] = {}  # by instance
        self.lengths = OutputLengths()
        self.stay = FadingMean(STAY_PRIOR_S)
        self.lateness = Lateness()
        self.offered_load = OfferedLoad()
        self.handover_stats = HandoverStats(handover_margin_s)
        self.waited = Follower(
            1.0
        )  # how long decode legs wait, over how long their prompts are expected to take
        self.prefill_counts: Counter[str] = Counter()  # ends of prefill legs that were heard of, by type
        self._kinds: dict[str, int] = {}
        self._groups: tuple[int, dict[int, tuple[int, int]]] = (-1, {})

    def update(self, instance: Instance) -> None:
        """Write into the book what the instance is now."""
        info = instance.info
        kind = kind_of(info)
        row = self.book.add(
            info.instance_id,
            InstanceShape(
                role=ROLES[instance.role],
                prefill=self.prefill(info).cost,
                transfer=self._transfer(info),
                decode=self._decode(info.instance_id),
                group=info.group,
                pool=info.pool,
                sequences_max=info.max_sequences,
                kv_capacity_tokens=info.kv_capacity_tokens,
                source_rates=self._source_rates(info),
                handover=self._handover(info),
                tail=True,
                ready=instance.ready,
                kind=self._kinds.setdefault(kind, len(self._kinds)),
                max_model_tokens=info.max_model_tokens,
            ),
        )
        self.row_of_holder[instance.holder] = row
        self._kv_bytes_per_token = info.kv_bytes_per_token or self._kv_bytes_per_token
        self._place(row, info.host_id)
        self.book.set(info.instance_id, stay_s=self.stay.value)

    def leave(self, instance: Instance) -> None:
        """The instance is gone, or serves another model now."""
        name = instance.info.instance_id
        self._place(self.book.row(name), "")
        self.book.remove(name)
        self.row_of_holder = {h: row for h, row in self.row_of_holder.items() if h != instance.holder}
        self.decodes.pop(name, None)
        for learners in (self.transfers, self.handovers, self.from_host, self.from_ssd):
            learners.pop(name, None)
        self.handover_stats.forget(name)

    def reported(self, instance: Instance, load: InstanceLoad, now_s: float) -> None:
        """Take in an engine's load: how fast it decodes, and what others have sent there."""
        name, info = instance.info.instance_id, instance.info
        if load.tbt_ms > 0 and load.running > 0:
            learner = self.decodes.setdefault(name, DecodeLearner())
            learner.observe(load.running, load.kv_usage * info.kv_capacity_tokens, load.tbt_ms / 1e3)
            self.book.set(name, decode=learner.cost)
        foreign_s = 0.0
        if instance.foreign and load.waiting:  # like what was sent from here, or short prompts
            each_s = self.book.mean_prompt_s(name) or self.prefill(info).cost.seconds(_OTHERS_TOKENS, 0)
            foreign_s = min(instance.foreign, load.waiting) * each_s
        self.book.report(
            name,
            foreign_sequences=instance.foreign,
            foreign_queue_s=foreign_s,
            kv_tokens=load.kv_usage * info.kv_capacity_tokens,
        )

    # --- what was observed

    def prefill(self, info: InstanceInfo) -> PrefillLearner:
        """The prefill model of an instance's type."""
        found = self.prefills.get(kind_of(info))
        if found is None:
            found = self.prefills[kind_of(info)] = PrefillLearner(
                learning.prefill_prior(info.engine, info.size.stages if info.size else 1)
            )
        return found

    def observed_prefill(self, info: InstanceInfo, n: int, p: int, seconds: float) -> None:
        """An instance computed a prompt of n tokens, p of them cached."""
        learner = self.prefill(info)
        if learner.observe(n, p, seconds):
            self.book.learnt(self._kinds[kind_of(info)], learner.cost)

    def wait_s(self, info: InstanceInfo, expected_s: float) -> float:
        """The time limit of a leg that waits for blocks of the instance."""
        kind = kind_of(info)
        learner = self.prefills.get(kind)
        heard = max(learner.count if learner is not None else 0, self.prefill_counts[kind])
        return self.handover_stats.wait_s(expected_s, heard)

    def prefilled(self, info: InstanceInfo) -> None:
        """A prefill leg there has ended well."""
        self.prefill_counts[kind_of(info)] += 1

    def observed_load(
        self, name: str, loaded_bytes: float, seconds: float, registry: Registry, source: LoadSource
    ) -> None:
        """An instance loaded KV from the pool."""
        learners = {
            LoadSource.HANDOVER: self.handovers,
            LoadSource.HOST: self.from_host,
            LoadSource.SSD: self.from_ssd,
            LoadSource.REMOTE: self.transfers,
        }[source]
        for known in ("", name) if self.book.row(name) != NO_ROW else ("",):
            learners.setdefault(known, TransferLearner()).observe(loaded_bytes, seconds)
        # Instances that loaded nothing yet are believed to be like the others.
        for instance in registry.of_model(self.name):
            other, info = instance.info.instance_id, instance.info
            if other == name or other not in learners:
                self.book.set(
                    other,
                    transfer=self._transfer(info),
                    handover=self._handover(info),
                    source_rates=self._source_rates(info),
                )

    def observed_holder(self, holder: BlockHolder, loaded_bytes: float, seconds: float, now_s: float) -> None:
        """An instance of another host loaded KV from one holder."""
        self.holder_rates.observe(holder, loaded_bytes, seconds, now_s)

    def observed_handover(self, lag_s: float, priced_s: float, registry: Registry) -> None:
        """A first token came `lag_s` after the end of its prefill; without what is learnt here that was `priced_s`."""
        self.handover_stats.observe(lag_s)
        if priced_s > 0 and self.handover_stats.observe_beside(lag_s - priced_s):
            for instance in registry.of_model(self.name):
                self.book.set(instance.info.instance_id, handover=self._handover(instance.info))

    def observed_answer(self, lengths_class: str, tokens: float, stayed_s: float) -> None:
        """A sequence was generated."""
        self.lengths.observe(lengths_class, tokens)
        if self.stay.observe(stayed_s):
            self.book.stays(self.stay.value)

    # --- what decisions ask

    def sources(
        self, pool: PoolAnswer, local: Ints, block_tokens: int, tokens: int, now_s: float
    ) -> tuple[PrefixSource, ...]:
        """The pool as a source of the first `tokens` tokens, priced by who holds them."""

        def tokens_per_s(holder: BlockHolder) -> float | None:
            rate = self.holder_rates.bytes_per_s(holder, now_s)
            return rate / self._kv_bytes_per_token if rate is not None else None

        found = placed.sources(pool.runs, local, block_tokens, tokens, self.rows_of_host)
        where = local, block_tokens, self.rows_of_host
        return tuple(placed.at_holders(each, pool.runs, pool.holders, *where, tokens_per_s) for each in found)

    def group(self, asked: int, registry: Registry) -> tuple[int, int]:
        """The passport group of a request's keys and the tokens of a block in it."""
        version, groups = self._groups
        if version != registry.version:
            groups = {}
            for instance in registry.of_model(self.name):
                count, block_tokens = groups.get(instance.info.group, (0, 0))
                count += 2 if instance.ready else 1
                groups[instance.info.group] = count, block_tokens or instance.info.block_tokens
            self._groups = registry.version, groups
        group = asked or max(groups, key=lambda name: (groups[name][0], name))
        return group, groups.get(group, (0, 0))[1] or BLOCK_TOKENS_UNKNOWN

    def longest(self) -> int:
        """The exclusive limit on the length of this model's prompts."""
        return self.book.longest()

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        self.book.check()
        self.holder_rates.check()
        for row in self.row_of_holder.values():
            assert self.book.names[row], "a number in the index of caches points at an instance that is gone"
        for rows in self.rows_of_host.values():
            assert all(self.book.names[row] for row in rows), "an instance that is gone is on a host"

    def restarted(self, name: str) -> None:
        """Another engine of that name: what was learnt of its decoding is void, and no other engine uses it yet."""
        self.decodes.pop(name, None)
        self.handover_stats.forget(name)
        self.book.report(name, foreign_sequences=0.0, foreign_queue_s=0.0, kv_tokens=0.0)
        self.book.set(name, decode=self._decode(name))

    def _decode(self, name: str) -> DecodeCost:
        learner = self.decodes.get(name)
        return learner.cost if learner is not None else learning.DECODE_PRIOR

    def _transfer(self, info: InstanceInfo) -> TransferCost:
        return self._loading(info, self.transfers, self.from_host, self.handovers)

    def _handover(self, info: InstanceInfo) -> TransferCost:
        latency_s, tokens_per_s = self._loading(info, self.handovers, self.transfers, self.from_host)
        return TransferCost(latency_s + self.handover_stats.beside_s, tokens_per_s)

    def _source_rates(self, info: InstanceInfo) -> SourceRates:
        host = self._loading(info, self.from_host, self.transfers, self.handovers)
        ssd = self._loading(info, self.from_ssd, prior=_NO_SSD_LOADS)
        return SourceRates(host.tokens_per_s, ssd.tokens_per_s)

    def _place(self, row: int, host_id: str) -> None:
        """The row is on this host, "": on none."""
        for host, rows in list(self.rows_of_host.items()):
            rows.discard(row)
            if not rows:
                del self.rows_of_host[host]
        if host_id:
            self.rows_of_host.setdefault(host_id, set()).add(row)

    @staticmethod
    def _loading(
        info: InstanceInfo, *by_kind: dict[str, TransferLearner], prior: TransferLearner | None = None
    ) -> TransferCost:
        """The cost of loading of the first kind that was observed, rather of the instance itself than of others."""
        for learners in by_kind:
            learner = learners.get(info.instance_id) or learners.get("")
            if learner is not None:
                return learner.cost(info.kv_bytes_per_token)
        return (prior or _NO_TRANSFERS).cost(info.kv_bytes_per_token)


class ModelBooks:
    """All models that are served, or were and may be again."""

    def __init__(self, handover_margin_s: float) -> None:
        self._handover_margin_s = handover_margin_s
        self._models: dict[str, ServedModel] = {}
        self._served: dict[str, str] = {}  # instance -> model

    def of(self, name: str) -> ServedModel:
        """A model, a new one when it is not known."""
        found = self._models.get(name)
        if found is None:
            found = self._models[name] = ServedModel(name, self._handover_margin_s)
            self._forget()
        return found

    def known(self, name: str) -> ServedModel | None:
        """A model that has instances, None when no instance serves it."""
        found = self._models.get(name)
        return found if found is not None and found.row_of_holder else None

    def changed(self, instance: Instance) -> None:
        """An instance is new, or its state, role or description has changed."""
        info = instance.info
        before = self._served.get(info.instance_id, info.model)
        if before != info.model:
            self._models[before].leave(instance)
        self._served[info.instance_id] = info.model
        self.of(info.model).update(instance)

    def restarted(self, instance: Instance) -> None:
        """The engine was started again."""
        self.of(instance.info.model).restarted(instance.info.instance_id)

    def gone(self, instance: Instance) -> None:
        """The instance is no longer known."""
        self.of(instance.info.model).leave(instance)
        del self._served[instance.info.instance_id]

    def check(self) -> None:
        """Raise AssertionError when an invariant is broken."""
        for model in self._models.values():
            model.check()
        rows = sum(len(model.row_of_holder) for model in self._models.values())
        assert rows == len(self._served), "instances and rows disagree"

    def _forget(self) -> None:
        """Clients of a test bench may name models without end: those that no instance serves go first."""
        for name in [name for name, model in self._models.items() if not model.row_of_holder][:-1]:
            if len(self._models) <= MODELS_MAX:
                break
            del self._models[name]


def kind_of(info: InstanceInfo) -> str:
    """The type of an instance: engines of one kind, version and number of processes compute equally fast."""
    return f"{info.engine} {info.engine_version} {info.size or ''}".strip()


_NO_TRANSFERS = TransferLearner()
_NO_SSD_LOADS = TransferLearner(learning.DISK_PRIOR_BYTES_PER_S)
