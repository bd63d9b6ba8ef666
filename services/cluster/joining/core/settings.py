"""The settings that a joining machine gets: which ones, and the text of its cluster.toml."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from mooncache.config.small_files import toml_value
from mooncache.errors import ProtocolError

SHARED: Final = (
    "worker.engine",
    "worker.model_name",
    "vllm.dtype",
    "vllm.max_model_len",
    "vllm.block_tokens",
    "hf.dtype",
    "hf.block_tokens",
    "gateway.public_prefix_enabled",
)
"""Settings that decide what blocks mean and how a model is called: engines that share blocks have the same."""

_HEAD: Final = """\
# Written by `{command}`. It holds what this machine was given with its cluster; every command and process
# with this state folder reads it. Your own file ($MOONCACHE_CONFIG) and the environment go first.
"""


def check_shared(settings: Mapping[str, str]) -> None:
    """Raises ProtocolError for a setting that one machine does not take from another."""
    for name in settings:
        if name not in SHARED:
            raise ProtocolError(
                f"The first machine sent the setting {name[:80]!r}, which this one does not take."
            )


def joined_settings(
    host: str, master_targets: tuple[str, ...], conductor_target: str, shared: Mapping[str, str]
) -> dict[str, object]:
    """What a machine that joined has to know, "section.field" to value. `host`: by which others reach it."""
    found: dict[str, object] = {"cluster.master_targets": master_targets}
    if conductor_target:
        found["cluster.conductor_target"] = conductor_target
    for name in (
        "store_node.host",
        "store_node.data_host",
        "worker.host",
        "worker.engine_host",
        "gateway.host",
    ):
        found[name] = host
    # One name of the machine in all processes: namespaces of one kernel count as machines.
    found |= {"store_node.host_id": host, "client.host_id": host}
    return {**found, **shared}


def tls_settings(folder: str) -> dict[str, object]:
    """TLS on, with ca.pem, cert.pem and key.pem of a folder."""
    return {
        "tls.enabled": True,
        "tls.require_client_cert": True,
        "tls.ca_file": f"{folder}/ca.pem",
        "tls.cert_file": f"{folder}/cert.pem",
        "tls.key_file": f"{folder}/key.pem",
    }


def cluster_toml(command: str, settings: Mapping[str, object]) -> str:
    """The text of cluster.toml."""
    sections: dict[str, list[str]] = {}
    for name, value in settings.items():
        section, key = name.split(".", 1)
        sections.setdefault(section, []).append(f"{key} = {toml_value(value)}")
    tables = [f"\n[{section}]\n" + "\n".join(lines) + "\n" for section, lines in sections.items()]
    return _HEAD.format(command=command) + "".join(tables)
