"""What the first machine needs before others can join: an authority, TLS on, ports that other machines reach."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mooncache.auth import load_token_set
from mooncache.client.state_dir import read_cluster_file
from mooncache.cluster.joining.core.settings import SHARED, cluster_toml, tls_settings
from mooncache.cluster.joining.inviting import InvitingMachine
from mooncache.config import CLUSTER_SETTINGS, Config, explain, is_set, load
from mooncache.errors import ConfigInvalid
from mooncache.runtime.bind import is_loopback
from mooncache.runtime.certificates import make_certificates
from mooncache.whole_file import write_whole

AUTHORITY_FOLDER: Final = "authority"
_EVERYWHERE: Final = ("0.0.0.0", "::")  # noqa: S104 - compared, not bound
_RESTART: Final = (
    "Stop it (`mooncache down`) and start it with `mooncache up --tls --host ADDRESS`, where ADDRESS is this machine's "
    "address for the others; TLS is on from then on."
)


def turn_tls_on(state_dir: Path, host: str) -> None:
    """Make what is missing of an authority and this machine's certificate, and turn TLS on in cluster.toml.

    Where TLS is on already, by the configuration, nothing is changed.

    Raises:
        InvalidArgument, Unsupported, ConfigInvalid: no certificate for this host can be made, or no file be written;
            or this machine joined another one, which has the authority.
    """
    config = load(overrides={"cluster.state_dir": str(state_dir)})
    made = state_dir / AUTHORITY_FOLDER / host.replace(":", "_")
    ours = config.tls.cert_file is not None and config.tls.cert_file.is_relative_to(
        state_dir / AUTHORITY_FOLDER
    )
    if config.tls.enabled and not (ours and config.tls.cert_file != made / "cert.pem"):
        return
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    make_certificates(state_dir / AUTHORITY_FOLDER, [host])
    write_cluster_settings(state_dir, cluster_toml("mooncache up --tls", tls_settings(str(made.absolute()))))


def write_cluster_settings(state_dir: Path, text: str) -> None:
    """Write cluster.toml whole or not at all, mode 0600. Raises ConfigInvalid."""
    try:
        write_whole(state_dir / CLUSTER_SETTINGS, text)
    except OSError as error:
        raise ConfigInvalid(f"{state_dir} cannot be written: {error.strerror}.") from None


def inviting_machine(
    state_dir: Path, authority: Path | None, models: Mapping[str, str]
) -> tuple[InvitingMachine, str]:
    """What this machine hands over, and the host at which it invites.

    Args:
        authority: folder with ca.key and ca.pem; None: that of `mooncache up --tls`.
        models: settings that the running engines show, "worker.engine" for one.

    Raises:
        ConfigInvalid: no cluster runs here, or not in a way that another machine can join; the text says what to do.
    """
    config = load(overrides={"cluster.state_dir": str(state_dir)})
    running = read_cluster_file(state_dir)
    if running is None and not is_set(config, "cluster.master_targets"):
        raise ConfigInvalid(
            f"No cluster runs in {state_dir}. Start one: mooncache up --tls --host ADDRESS, where ADDRESS is this "
            "machine's address for the others."
        )
    targets = running.master_targets if running is not None else config.cluster.master_targets
    conductor = running.conductor_target if running is not None else config.cluster.conductor_target
    host = targets[0].rpartition(":")[0].strip("[]")
    if not config.tls.enabled or (running is not None and running.tls_ca is None):
        raise ConfigInvalid(f"The cluster runs without TLS, so no other machine can join it. {_RESTART}")
    if is_loopback(host) or host in _EVERYWHERE:
        raise ConfigInvalid(
            f"The cluster's address is {host}, by which no other machine reaches it. {_RESTART}"
        )
    folder = authority or state_dir / AUTHORITY_FOLDER
    if not (folder / "ca.key").is_file() or config.tls.cert_file is None or config.tls.key_file is None:
        raise ConfigInvalid(
            f"There is no authority's key {folder / 'ca.key'}, so no certificate can be made here. Invite on the "
            "machine that has it, or name its folder with --authority."
        )
    machine = InvitingMachine(
        folder,
        config.tls.cert_file,
        config.tls.key_file,
        load_token_set(config.cluster.token_path).text().strip(),
        tuple(targets),
        conductor,
        (host,),
        {**shared_settings(config), **models},
    )
    return machine, host


def shared_settings(config: Config) -> dict[str, str]:
    """Of the settings that engines of a cluster share, those that were chosen here."""
    rows = {row.name: row for row in explain(config) if not row.is_default}
    return {
        name: str(rows[name].value).lower() if isinstance(rows[name].value, bool) else str(rows[name].value)
        for name in SHARED
        if name in rows
    }
