"""What the gateway knows of the engines: a snapshot of the conductor's list, and a way to go on without it.

Models stay known after their last instance has gone, so that "not ready now" (503) differs from "no such model" (404).

An instance that ends is suspect before it is forgotten. So a conductor whose list lacks a model that was ready a moment
ago has been started again and waits for the workers' next reports; until then the instances of before stay in use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from mooncache.errors import InvalidArgument
from mooncache.kvcache.keys import passport_from_json
from mooncache.kvcache.passport import Passport

MODEL_COUNT_MAX = 10_000
KEPT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class EngineInstance:
    """One engine as the conductor lists it."""

    instance_id: str
    url: str = ""
    model: str = ""
    is_ready: bool = True
    is_suspect: bool = False
    can_generate: bool = True
    max_model_tokens: int = 0  # 0 when it does not say
    tokenizer_path: str = ""
    passport_json: str = ""  # "" without one
    engine_token: str = ""  # fingerprint of the cluster token whose key it takes; "" when it does not say
    orders_by_priority: bool = False  # its queue takes the field `priority`


@dataclass(frozen=True, slots=True)
class FleetModel:
    """One model name with its ready instances and what they have in common."""

    name: str
    instances: tuple[EngineInstance, ...] = ()
    max_model_tokens: int = 0  # largest of its instances, 0 when none said
    tokenizer_paths: tuple[str, ...] = ()  # on the machines of its instances, which may differ
    passport: Passport | None = None  # of the first instance that has one
    lost_s: float | None = None  # when the list ceased to name its ready instances; None: it names them

    def candidates(self, exclude: Iterable[str] = ()) -> list[EngineInstance]:
        """Ready instances that can generate, best kind first: decode and both, else prefill ones."""
        left = [instance for instance in self.instances if instance.instance_id not in set(exclude)]
        able = [instance for instance in left if instance.can_generate]
        return able or left


@dataclass(slots=True)
class FleetView:
    """All models. `known` turns true with the first list; `version` is the list's."""

    known: bool = False
    version: int = 0
    models: dict[str, FleetModel] = field(default_factory=dict)
    first_seen_wall_s: dict[str, float] = field(default_factory=dict)
    _turn: int = 0

    def apply(self, version: int, listed: Sequence[EngineInstance], now_s: float, wall_s: float) -> None:
        """Take a new list; models that are not in it keep their name, and what was ready for `KEPT_S`."""
        groups: dict[str, list[EngineInstance]] = {}
        for instance in listed:
            groups.setdefault(instance.model, []).append(instance)
        for name in self.models.keys() - groups.keys():
            model = self.models[name]
            if not model.instances:
                self.models[name] = FleetModel(name)
            elif model.lost_s is None:
                self.models[name] = replace(model, lost_s=now_s)
        for name, instances in groups.items():
            if not name or (name not in self.models and len(self.models) >= MODEL_COUNT_MAX):
                continue
            self.models[name] = _model(name, instances)
            self.first_seen_wall_s.setdefault(name, wall_s)
        self.known, self.version = True, version

    def forget_lost(self, now_s: float) -> bool:
        """Give up instances that no list has named for `KEPT_S`; returns whether some are still waited for.

        now_s: monotonic; a fall-back must not depend on how the wall clock is set.
        """
        lost = [(model, model.lost_s) for model in self.models.values() if model.lost_s is not None]
        late = [model for model, lost_s in lost if now_s - lost_s >= KEPT_S]
        for model in late:
            self.models[model.name] = FleetModel(model.name)
        return len(late) < len(lost)

    def longest_model_tokens(self) -> int:
        """Longest prompt and answer of any model that is served; 0 when one of them does not say."""
        lengths = [model.max_model_tokens for model in self.models.values() if model.instances]
        return max(lengths) if lengths and all(lengths) else 0

    def next_instance(self, model: str, exclude: Iterable[str] = ()) -> EngineInstance | None:
        """Round robin over the instances that can serve a model; None when there is none."""
        found = self.models.get(model)
        candidates = found.candidates(exclude) if found is not None else []
        if not candidates:
            return None
        self._turn += 1
        return candidates[self._turn % len(candidates)]


def _model(name: str, instances: Sequence[EngineInstance]) -> FleetModel:
    ready = tuple(one for one in instances if one.is_ready)
    passport = None
    for instance in ready:
        if instance.passport_json:
            try:
                passport = passport_from_json(instance.passport_json)
                break
            except InvalidArgument:
                continue  # served without keys
    return FleetModel(
        name=name,
        instances=ready,
        max_model_tokens=max((one.max_model_tokens for one in instances), default=0),
        tokenizer_paths=tuple(dict.fromkeys(one.tokenizer_path for one in instances if one.tokenizer_path)),
        passport=passport,
    )
