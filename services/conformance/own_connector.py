"""Our connector as the kit drives it: on a pool that is started for the run, and may be broken."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from mooncache.client.state_dir import read_cluster_file
from mooncache.conformance.connector_settings import ConnectorConfig
from mooncache.conformance.stores.target import PoolTarget
from mooncache.worker.adapters.vllm import CONNECTOR, CONNECTOR_MODULE

OWN_CONNECTOR: Final = "mooncache"


class OwnConnector(PoolTarget):
    """A pool of one node, and what an engine has to know of it."""

    connector = f"{CONNECTOR_MODULE}:{CONNECTOR}"

    def __init__(self) -> None:
        super().__init__({"nodes": 1, "capacity": "256MiB"})

    def completed(self, config: ConnectorConfig) -> ConnectorConfig:
        """The configuration with this pool in it, and with commands that stop its node and let it go on."""
        cluster = read_cluster_file(self.state_dir)
        assert cluster is not None, "the pool writes it when it starts"
        node = next(part.pid for part in cluster.parts if part.name == "node-1")
        questions = config.questions
        if not questions.break_command:
            questions = replace(
                questions, break_command=f"kill -STOP {node}", mend_command=f"kill -CONT {node}"
            )
        # Prompts of a run are short, so that computing them is often faster than loading; here they are to be loaded.
        env = {"MOONCACHE_CONNECTOR_BREAK_EVEN": "false", **config.env}
        extra = {"mooncache.state_dir": str(self.state_dir), **config.extra}
        return replace(config, questions=questions, extra=extra, env=env)
