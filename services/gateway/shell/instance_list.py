"""The conductor's list of instances, kept whole although most answers tell only what has changed."""

from __future__ import annotations

from dataclasses import dataclass, field

from mooncache.gateway.core.fleet import EngineInstance
from mooncache.proto.v1 import conductor_pb2 as pb


@dataclass(slots=True)
class InstanceList:
    """The list of instances."""

    run: int = 0  # of the conductor that gave the last answer, 0 before the first one
    version: int = 0
    views: list[pb.InstanceView] = field(default_factory=list)
    gateway_count: int = 0  # as the last answer said

    def question(
        self, known_version: int, wait_s: float, me: pb.Gateway | None = None
    ) -> pb.ListInstancesRequest:
        """The request for changes since this list's version, or for the whole list."""
        return pb.ListInstancesRequest(
            known_version=known_version,
            wait_ms=int(wait_s * 1e3),
            known_run=self.run if known_version == self.version else 0,
            passports_apart=True,
            gateway=me,
            known_gateways=None if me is None else self.gateway_count,
        )

    def take(self, answer: pb.ListInstancesResponse) -> None:
        """Take an answer in."""
        for view in answer.instances:
            if 0 < view.passport <= len(answer.passports):
                view.instance.passport_json = answer.passports[view.passport - 1]
        known = {view.instance.instance_id: view for view in self.views} if answer.delta else {}
        for name in answer.gone:
            known.pop(name, None)
        known.update((view.instance.instance_id, view) for view in answer.instances)
        self.views = [known[name] for name in sorted(known)]
        self.run, self.version = answer.run, answer.version
        self.gateway_count = answer.gateway_count


def engine_instance_of(view: pb.InstanceView) -> EngineInstance:
    """An instance as the conductor lists it."""
    instance = view.instance
    return EngineInstance(
        instance_id=instance.instance_id,
        url=instance.url,
        model=instance.model,
        is_ready=instance.state in (pb.INSTANCE_STATE_READY, pb.INSTANCE_STATE_UNSPECIFIED),
        is_suspect=instance.state == pb.INSTANCE_STATE_SUSPECT,
        can_generate=instance.role != pb.INSTANCE_ROLE_PREFILL,
        max_model_tokens=instance.max_model_tokens,
        tokenizer_path=instance.tokenizer_path,
        passport_json=instance.passport_json,
        engine_token=instance.engine_token,
        orders_by_priority=instance.orders_by_priority,
    )
