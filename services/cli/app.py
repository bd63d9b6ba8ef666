"""The command tree, and the one place where errors become sentences and exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial

from cyclopts import App, CycloptsError, Group

from mooncache.cli import (
    accounts_copy,
    batch,
    chaos,
    cluster,
    cost,
    data,
    instances,
    invite,
    key,
    local,
    node,
    quarantine,
    reload,
    repair,
    services,
    tenant,
    tenant_key,
    tls,
    token_rotation,
    top,
    topology,
    trace,
)
from mooncache.cli import up as up_and_down
from mooncache.cli.acts import audited
from mooncache.cli.audit import audit
from mooncache.cli.conformance import conformance
from mooncache.cli.doctor.command import doctor
from mooncache.cli.join import join
from mooncache.cli.plan import plan
from mooncache.cli.recall import recall
from mooncache.cli.reproduce import reproduce
from mooncache.cli.simulate import simulate
from mooncache.cli.upgrade import upgrade
from mooncache.cli.usage import usage
from mooncache.cli.why import why
from mooncache.cli.writers import writers
from mooncache.errors import MooncacheError
from mooncache.reporting.output import (
    EXIT_DEFECT,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_USAGE,
    error_console,
    print_json,
    report_error,
)

Commands = dict[str, Callable[..., int]]
RUN = Group("Run", sort_key=1)
BLOCKS = Group("Blocks", sort_key=2)
CLUSTER = Group("Cluster", sort_key=3)
TOOLS = Group("Tools", sort_key=4)

_HELP = """LLM serving around a verified, shared KV cache.

Begin with `mooncache up`: it starts everything on this machine and prints a request to try. Every command takes
`--json`. Exit codes: 0 done, 1 a miss or a failed part, 2 wrong arguments, 3 unreachable, 4 not allowed, 5 no space.
"""
_PIPE_COLUMNS = "200"  # a file or a pipe has no width: whole lines can be searched, folded ones cannot
_BENCHMARKS = {  # not imported before one of them runs; the lists say this of them
    "store": "This machine's pool: bytes, small blocks, chains of keys, the index, a rebuild, memory.",
    "conductor": "How long a decision takes, alone and as a whole call.",
    "serving": "A whole cluster on this machine: gateway, conductor, engines, pool.",
    "gateway": "What a gateway adds: time to the first token, tokenising, requests and events per second.",
    "handover": "How KV gets from the engine that computes it to the engine that needs it.",
    "operate": "What parts for operators cost: endpoint picker, gateway, batches, metering, console.",
    "replay": "A trace against a live cluster, and what the simulator predicts beside it.",
    "sound": "What one slow, stopped or overloaded part costs the others.",
    "survival": "What the loss of a part costs, and how soon all is as it should be again.",
    "tiers": "The SSD tier: bytes over fio, memory beside a busy or stalled disk, wear, a start.",
    "transfer": "Measure what the transports move between two processes or hosts, beside each wire's own tool.",
}


def build(chosen: str = "") -> App:
    """The command tree. Commands import what is heavy when they run.

    chosen: the benchmark that is about to run; its own text is its help then, instead of its line in the list.
    """
    from mooncache._version import __version__

    app = App(
        name="mooncache",
        help=_HELP,
        version=__version__,
        help_format="markdown",
        suppress_keyboard_interrupt=False,
    )
    groups: dict[Group, Commands] = {
        RUN: {
            "up": up_and_down.up,
            "down": up_and_down.down,
            "gateway": services.gateway,
            "endpoint-picker": services.endpoint_picker,
            "conductor": services.conductor,
            "worker": services.worker,
            "master": services.master,
            "store-node": services.store_node,
            "store-holder": services.store_holder,
        },
        BLOCKS: {
            "put": data.put,
            "get": data.get,
            "ls": data.ls,
            "stat": data.stat,
            "rm": data.rm,
            "pin": data.pin,
            "unpin": data.unpin,
            "writers": writers,
            "recall": recall,
        },
        CLUSTER: {"status": cluster.status, "top": top.top, "drain": cluster.drain},
    }
    for group, commands in groups.items():
        for name, command in commands.items():
            app.command(command, name=name, group=group)
    engine_verbs: Commands = {"drain": instances.drain, "undrain": instances.undrain, "role": instances.role}
    app.command(_folder("instance", "Drain an engine, or give it another role.", CLUSTER, **engine_verbs))
    app.command(_folder("node", "Start a store node again.", CLUSTER, restart=node.restart))
    app.command(_folder("repair", "Whether blocks have their copies.", CLUSTER, status=repair.status))
    for folder in (_quarantine(), _batch(), _tenant(), _key()):
        app.command(folder)
    app.command(_folder("accounts", "What is kept of tenants.", CLUSTER, copy=accounts_copy.copy))
    app.command(audit, group=CLUSTER)
    app.command(usage, group=CLUSTER)
    app.command(upgrade, group=CLUSTER)
    app.command(_invite())
    app.command(join, group=CLUSTER)
    app.command(why, group=CLUSTER)
    app.command(_cost())
    app.command(_doctor())
    app.command(topology.topology, group=CLUSTER)
    chaos_verbs: Commands = {"run": chaos.run, "list": chaos.list_faults}
    app.command(_folder("chaos", "Break this machine's cluster, check every answer.", CLUSTER, **chaos_verbs))
    config_verbs: Commands = {"explain": local.explain, "reload": reload.reload}
    app.command(_folder("config", "Show the configuration, or have it read again.", TOOLS, **config_verbs))
    app.command(_trace())
    app.command(_folder("tls", "Make certificates for a small cluster.", TOOLS, init=tls.init))
    app.command(_token())
    app.command(local.version, group=TOOLS)
    app.command(_bench(chosen))
    for tool in (simulate, plan, reproduce, conformance):
        app.command(tool, group=TOOLS)
    return app


def _bench(chosen: str) -> App:
    bench = _folder("bench", "Run a benchmark. It prints ratios that were measured within one run.", TOOLS)
    for name, what in _BENCHMARKS.items():
        listed = {} if name == chosen else {"help": what}
        bench.command(f"mooncache.bench.{name}.command:{name}", name=name, **listed)
    return bench


def _key() -> App:
    verbs: Commands = {"create": key.create, "ls": key.ls, "limit": key.limit, "revoke": key.revoke}
    return _folder("key", "API keys of tenants.", CLUSTER, **verbs)


def _token() -> App:
    verbs: Commands = {
        "status": token_rotation.status,
        "rotate": token_rotation.rotate,
        "withdraw": token_rotation.withdraw,
    }
    app = _folder("token", "Print the cluster token or what is derived from it; replace it.", TOOLS, **verbs)
    app.default(local.token)
    return app


def _trace() -> App:
    verbs: Commands = {"check": trace.check, "stats": trace.stats, "generate": trace.generate}
    return _folder("trace", "Check, describe or generate traces of requests.", TOOLS, **verbs)


def _batch() -> App:
    verbs: Commands = {
        "submit": batch.submit,
        "ls": batch.ls,
        "status": batch.status,
        "cancel": batch.cancel,
        "fetch": batch.fetch,
    }
    return _folder("batch", "Work that may wait until something is idle.", CLUSTER, **verbs)


def _quarantine() -> App:
    return _folder(
        "quarantine",
        "Writers whose blocks are refused.",
        CLUSTER,
        ls=quarantine.ls,
        add=quarantine.add,
        release=quarantine.release,
    )


def _tenant() -> App:
    verbs: Commands = {
        "ls": tenant.ls,
        "set": tenant.set_limits,
        "purge": tenant.purge,
        "check": tenant.check,
    }
    text = "What tenants hold in the pool, what they may have, and their end."
    return _folder("tenant", text, CLUSTER, **verbs, **{"new-key": tenant_key.new_key})


def _doctor() -> App:
    app = _folder("doctor", "Say what is wrong and how to fix it.", CLUSTER, rdma=topology.doctor_rdma)
    app.default(doctor)
    return app


def _cost() -> App:
    verbs: Commands = {"prices": cost.print_prices, "what-if": cost.what_if}
    app = _folder("cost", "What requests cost, and what caches saved.", CLUSTER, **verbs)
    app.default(cost.cost)
    return app


def _invite() -> App:
    verbs: Commands = {"list": invite.list_invitations, "revoke": invite.revoke}
    app = _folder("invite", "Let another machine join this cluster.", CLUSTER, **verbs)
    app.default(invite.invite)
    return app


def _folder(name: str, text: str, group: Group, **commands: Callable[..., int]) -> App:
    """A command that has commands of its own."""
    app = App(name=name, help=text, group=group)
    for verb, command in commands.items():
        app.command(command, name=verb)
    return app


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code. A person's mistake never shows a traceback."""
    tokens = list(sys.argv[1:] if arguments is None else arguments)
    as_json = "--json" in tokens
    if tokens[:1] == ["bench"]:
        tokens = _with_json_target(tokens)
    if not sys.stdout.isatty():
        os.environ.setdefault("COLUMNS", _PIPE_COLUMNS)
    try:
        app = build(tokens[1] if tokens[:1] == ["bench"] and len(tokens) > 1 else "")
        call = partial(
            app,
            tokens,
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
            help_on_error=False,
        )
        result: object = audited(tokens, call)
    except CycloptsError as error:
        return _usage(error, as_json=as_json)
    except MooncacheError as error:
        return report_error(error, as_json=as_json)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has left (head, less): not an error. Keep Python from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except SystemExit as leaving:
        return (
            leaving.code
            if isinstance(leaving.code, int)
            else EXIT_OK
            if leaving.code is None
            else EXIT_DEFECT
        )
    return result if isinstance(result, int) else EXIT_OK


def _with_json_target(tokens: list[str]) -> list[str]:
    """`--json` prints the document, as in every command; a benchmark also takes a file behind it."""
    at = tokens.index("--json") if "--json" in tokens else len(tokens)
    alone = at == len(tokens) - 1 or (at < len(tokens) and tokens[at + 1].startswith("--"))
    return [*tokens[: at + 1], "-", *tokens[at + 1 :]] if alone else tokens


def _usage(error: CycloptsError, *, as_json: bool) -> int:
    chain = " ".join(error.command_chain or ())
    message = " ".join(str(error).split())
    hint = f"mooncache {chain} --help".replace("  ", " ")
    if as_json:
        print_json(
            {
                "error": {
                    "code": 100,
                    "name": "INVALID_ARGUMENT",
                    "message": message,
                    "retryable": False,
                    "hint": f"See: {hint}",
                }
            }
        )
    else:
        error_console.print(message, markup=False, style="red")
        error_console.print(f"See: {hint}", markup=False, style="dim")
    return EXIT_USAGE
