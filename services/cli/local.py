"""Commands that need no cluster: version, token, config explain."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from mooncache.cli.common import AsJson
from mooncache.errors import InvalidArgument
from mooncache.reporting.output import EXIT_OK, console, print_json, print_table


def version(*, json: AsJson = False) -> int:
    """Print the version of Mooncache and of what it runs on."""
    import grpc

    from mooncache._version import __version__

    found = {
        "mooncache": __version__,
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if json:
        print_json(found)
    else:
        for name, value in found.items():
            console.print(f"{name:<10} {value}")
    return EXIT_OK


def token(
    *,
    tenant: Annotated[str | None, Parameter(help="Print the token of this tenant.")] = None,
    metrics: Annotated[
        bool, Parameter(negative=(), help="Print the key with which a scraper reads /metrics.")
    ] = False,
    control: Annotated[
        bool, Parameter(negative=(), help="Print the key with which a program of yours calls over gRPC.")
    ] = False,
    picker: Annotated[
        bool, Parameter(negative=(), help="Print the key that Envoy shows to the endpoint picker.")
    ] = False,
    token_file: Annotated[Path | None, Parameter(help="File with the cluster token.")] = None,
    state_dir: Annotated[Path | None, Parameter(help="State folder with the cluster token.")] = None,
    json: AsJson = False,
) -> int:
    """Print the cluster token, or a token or key derived from it. Treat the output as a password.

    Derived tokens need no registration, because every service can derive them from the cluster token.

    For example:

        mooncache token --tenant team-a > team-a.token && chmod 600 team-a.token

        mooncache token --control > control.key && chmod 600 control.key
    """
    from mooncache.auth import control_key, load_cluster_token, metrics_key, picker_key, tenant_token
    from mooncache.config import load

    config = load(overrides={"cluster.state_dir": state_dir, "cluster.token_file": token_file})
    found = load_cluster_token(config.cluster.token_path)
    if metrics or picker:
        name, make = ("metrics", metrics_key) if metrics else ("picker", picker_key)
        if tenant is not None or control or (metrics and picker):
            raise InvalidArgument(
                f"Give --{name} alone: its key belongs to no tenant and opens nothing else."
            )
        key = make(found)
        if json:
            print_json({f"{name}_key": key})
        else:
            console.print(key, soft_wrap=True, markup=False)
        return EXIT_OK
    if tenant is not None:
        found = tenant_token(found, tenant)
    if control:
        key = control_key(found).text
        if json:
            print_json({"tenant": found.tenant, "admin": found.admin, "control_key": key})
        else:
            console.print(key, soft_wrap=True, markup=False)
        return EXIT_OK
    if json:
        print_json({"tenant": found.tenant, "admin": found.admin, "token": found.text})
    else:
        console.print(found.text, soft_wrap=True, markup=False)
    return EXIT_OK


def explain(
    *,
    config: Annotated[Path | None, Parameter(help="TOML file to read; default $MOONCACHE_CONFIG.")] = None,
    set_only: Annotated[
        bool, Parameter(negative=(), help="Only those that differ from the default.")
    ] = False,
    toml: Annotated[bool, Parameter(negative=(), help="Print a commented TOML file instead.")] = False,
    json: AsJson = False,
) -> int:
    """Show every setting: its value, where the value comes from, and what it means. The most common ones come first.

    For example:

        mooncache config explain

        MOONCACHE_MASTER_PORT=7800 mooncache config explain --set-only
    """
    from mooncache.config import Audience, load, to_toml
    from mooncache.config import explain as explain_config

    loaded = load(config)
    if toml:
        print(to_toml(loaded), end="")
        return EXIT_OK
    rows = [row for row in explain_config(loaded) if not set_only or not row.is_default]
    if json:
        print_json({"settings": [row._asdict() for row in rows]})
    else:
        for audience in Audience:
            mine = [row for row in rows if row.audience is audience]
            if mine:
                print_table(
                    f"{len(mine)} settings: {audience}",
                    ("setting", "value", "from", "meaning"),
                    [(row.name, row.value, row.source, row.help) for row in mine],
                )
    return EXIT_OK
