"""What `mooncache up` does on a machine that joined a cluster, and on the first one with `--tls`."""

from __future__ import annotations

from dataclasses import dataclass

from mooncache.cluster.joining.first_machine import turn_tls_on
from mooncache.cluster.settings import ClusterRole, EngineKind, choose_engine
from mooncache.config import Config, is_set
from mooncache.errors import ConfigInvalid, InvalidArgument
from mooncache.tiny_model import FOLDER_NAME


@dataclass(frozen=True, slots=True)
class RoleChoice:
    """The options of `up` that depend on whose cluster this machine belongs to. `why`: a sentence about the engine."""

    roles: tuple[ClusterRole, ...]
    engine: EngineKind
    why: str
    prefill: int
    host: str
    model_name: str


def choose(
    config: Config,
    texts: tuple[str, ...],
    engine: str,
    prefill: int | None,
    host: str | None,
    model: str,
    model_name: str,
    *,
    tls: bool,
) -> RoleChoice:
    """Fill in what was not given; with `tls`, also make the authority and turn TLS on.

    Raises:
        InvalidArgument: there is no such role or engine.
        ConfigInvalid: the machine has no cluster to do it for, or has one and was not asked for a role; or it is not
            known which model it shall serve.
    """
    roles = _roles(texts, config)
    kind, why = choose_engine(_engine_of(engine, roles, config))
    if roles:
        prefill = prefill or 0
        host = host or config.store_node.host
        model_name = model_name or config.worker.model_name
        if ClusterRole.ENGINE in roles and not model and model_name not in {"", FOLDER_NAME}:
            raise ConfigInvalid(
                f"The cluster serves {model_name}; without --model this machine would answer for it with the small "
                "model of random weights. Give --model, the folder of the same model here."
            )
    host = host or "127.0.0.1"
    if tls:
        turn_tls_on(config.cluster.state_dir, host)
    return RoleChoice(roles, kind, why, 1 if prefill is None else prefill, host, model_name)


def _roles(texts: tuple[str, ...], config: Config) -> tuple[ClusterRole, ...]:
    """The roles that were asked for, each once."""
    for text in texts:
        if text not in set(ClusterRole):
            raise InvalidArgument(f"--role must be store, engine or gateway; got {text!r}.")
    roles = tuple(one for one in ClusterRole if one in texts)
    if roles and not is_set(config, "cluster.master_targets"):
        raise ConfigInvalid(
            "This machine has joined no cluster. Run `mooncache invite` on the first machine and `mooncache join` "
            "here, or set cluster.master_targets."
        )
    if config.joined and not roles:
        raise ConfigInvalid(
            f"This machine belongs to the cluster of {config.cluster.master_targets[0]}. Say what it shall do: --role "
            "store, --role engine or --role gateway, also several of them. For a cluster of its own choose another "
            "--state-dir."
        )
    return roles


def _engine_of(asked: str, roles: tuple[ClusterRole, ...], config: Config) -> str:
    """The engine for this machine: none without the role, else that of the cluster where it is known."""
    if not roles:
        return asked
    if ClusterRole.ENGINE not in roles:
        return EngineKind.NONE
    return config.worker.engine if asked == "auto" and is_set(config, "worker.engine") else asked
