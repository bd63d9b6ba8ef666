"""The command `mooncache bench transfer`."""

from __future__ import annotations

import secrets
import signal
import threading
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

from cyclopts import Parameter
from rich.console import Console

from mooncache.bench.transfer import TransferOptions, run
from mooncache.bench.transfer.cases import Case, Samples
from mooncache.bench.transfer.node import serve_forever
from mooncache.bench.transfer.options import SIZES_HINT, Direction, Transport, parse_size
from mooncache.bench.worker import WorkerError
from mooncache.errors import MooncacheError, TransportUnavailable
from mooncache.reporting.rows import JsonRows, MarkdownRows, Report, describe_machine

Member = TypeVar("Member", bound=StrEnum)
_EXIT_FAILED = 1
_EXIT_USAGE = 2


def _names(help_text: str) -> Parameter:
    return Parameter(help=help_text, negative=())


def transfer(
    *,
    transport: Annotated[tuple[str, ...], _names(f"Only these: {', '.join(Transport)}.")] = (),
    direction: Annotated[tuple[str, ...], _names("Only read or only write.")] = tuple(Direction),
    block: Annotated[tuple[str, ...], _names(f"Block sizes, such as {SIZES_HINT}.")] = (),
    batch: Annotated[tuple[int, ...], _names("Blocks under way per thread.")] = (8,),
    threads: Annotated[tuple[int, ...], _names("Threads, each with its own link.")] = (1,),
    memory: Annotated[str, Parameter(help="Where the bytes are on this side: host or cuda.")] = "host",
    rounds: Annotated[int, Parameter(help="Rounds over all cases; medians are printed.")] = 3,
    seconds: Annotated[
        float,
        Parameter(help="How long a case is measured in each round; beside perftest as long as that, 2 s."),
    ] = 0.4,
    references: Annotated[
        bool, Parameter(help="Also run memcpy, raw sockets and each wire's own tool.")
    ] = True,
    serve: Annotated[str | None, Parameter(help="Only be the other host: listen on this HOST:PORT.")] = None,
    connect: Annotated[str | None, Parameter(help="HOST:PORT of a --serve on another host.")] = None,
    token_file: Annotated[
        Path | None, Parameter(help="The secret of both hosts; --serve makes it when it is missing.")
    ] = None,
    engines: Annotated[bool, _names("Between two engines instead: ours, NIXL, the original's.")] = False,
    json: JsonRows = None,
    markdown: MarkdownRows = None,
    svg: Annotated[Path | None, Parameter(help="Also draw the throughput to this file.")] = None,
    html: Annotated[Path | None, Parameter(help="Also write a page with plot and table.")] = None,
    quick: Annotated[bool, Parameter(negative=(), help="One short round of one size: seconds.")] = False,
) -> int:
    """Measure what the transports move: two processes here, or this host and another one.

    Each transport reads and writes blocks of a store node that runs in a process of its own; throughput, latency of a
    batch, and processor time of both processes per GB. Beside it memcpy, a raw socket, and, when they are
    installed, iperf3, perftest and the original's transfer_engine_bench. With --memory cuda the copies between a GPU
    and pinned memory instead, contiguous and gathered, beside the driver's own.

    For example:

        mooncache bench transfer --block 64K --block 1M --batch 1 --batch 16 --json transfer.json --svg transfer.svg

        mooncache bench transfer --serve 0.0.0.0:7400 --token-file bench.token

        mooncache bench transfer --connect 10.0.0.2:7400 --token-file bench.token

        mooncache bench transfer --engines --json engines.json
    """
    console = Console()
    try:
        if engines:
            return _engines(console, transport or block or serve or connect, rounds, seconds, json, markdown)
        if memory == "cuda":
            return _device_copies(console, transport or block or serve or connect, rounds, json, markdown)
        options = _options(transport, direction, block, batch, threads, memory, rounds, seconds, references)
        options = options.quick() if quick else options
        if serve is not None:
            return _serve(console, serve, token_file, options)
        peer = None if connect is None else _peer(connect, token_file)
        with console.status("starting") as status:
            report, samples = run(options, status.update, peer)
        if not samples:
            report.print(console)
            return _EXIT_FAILED
        report.deliver(console, json, markdown)
        _draw(report, samples, svg, html)
    except ValueError as error:
        console.print(str(error), style="red", markup=False)
        return _EXIT_USAGE
    except (WorkerError, MooncacheError, OSError) as error:
        console.print(f"The benchmark could not finish: {error}", style="red", markup=False)
        return _EXIT_FAILED
    return 0


def _device_copies(
    console: Console, other: object, rounds: int, json: Path | None, markdown: Path | None
) -> int:
    from mooncache.bench.gpu import copies

    if other:
        raise ValueError(
            "--memory cuda measures the copies between a GPU and host memory, which --transport, --block, --serve and "
            "--connect say nothing about. Leave them out."
        )

    if rounds < 1:
        raise ValueError("--rounds must be at least 1.")
    report = Report("mooncache bench transfer --memory cuda", machine=describe_machine())
    try:
        with console.status("starting") as status:
            copies.measure(report, copies.CopyOptions(rounds=rounds), status.update)
    except TransportUnavailable as error:
        report.notes.append(error.message)
        report.deliver(console, json, markdown)
        return _EXIT_FAILED
    report.deliver(console, json, markdown)
    return 0


def _engines(
    console: Console, other: object, rounds: int, seconds: float, json: Path | None, markdown: Path | None
) -> int:
    from mooncache.bench.transfer.engines import run_engines

    if other:
        raise ValueError(
            "--engines has shapes and wires of its own; leave --transport, --block, --serve and --connect out."
        )
    if rounds < 1 or not 0.001 <= seconds <= 3600:
        raise ValueError("--rounds must be at least 1, --seconds 0.001 to 3600.")
    with console.status("starting") as status:
        report = run_engines(rounds, seconds, status.update)
    report.deliver(console, json, markdown)
    return 0


def _draw(report: Report, samples: dict[Case, Samples], svg: Path | None, html: Path | None) -> None:
    if svg is None and html is None:
        return  # plots need numpy, which figures do not
    from mooncache.bench.transfer import plot

    if svg is not None:
        plot.write_svg(samples, svg)
    if html is not None:
        plot.write_html(samples, report.to_markdown(), html)


def _options(
    transport: tuple[str, ...],
    direction: tuple[str, ...],
    block: tuple[str, ...],
    batch: tuple[int, ...],
    threads: tuple[int, ...],
    memory: str,
    rounds: int,
    seconds: float,
    references: bool,
) -> TransferOptions:
    """What was asked for, checked. Raises ValueError with a sentence."""
    transports, directions = _members(Transport, transport), _members(Direction, direction)
    if memory != "host":
        raise ValueError(f"There is no memory kind {memory!r}; choose from: host, cuda.")
    if any(not 1 <= count <= 1024 for count in batch):
        raise ValueError("--batch must be 1 to 1024.")
    if any(not 1 <= count <= 64 for count in threads):
        raise ValueError("--threads must be 1 to 64.")
    if rounds < 1:
        raise ValueError("--rounds must be at least 1.")
    if not 0.001 <= seconds <= 3600:
        raise ValueError("--seconds must be 0.001 to 3600.")
    sizes = tuple(parse_size(text) for text in block) or TransferOptions().block_bytes
    need = 4 * max(sizes) * max(batch) * max(threads)
    return TransferOptions(
        transports,
        directions,
        sizes,
        batch,
        threads,
        rounds,
        round(seconds * 1000),
        references=references,
        arena_bytes=max(1 << 28, need),
    )


def _members(kind: type[Member], names: tuple[str, ...]) -> tuple[Member, ...]:
    for name in names:
        if name not in set(kind):
            raise ValueError(f"There is no {kind.__name__.lower()} {name!r}; choose from: {', '.join(kind)}.")
    return tuple(kind(name) for name in names)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"{text!r} is not HOST:PORT.")
    return host.strip("[]"), int(port)


def _peer(connect: str, token_file: Path | None) -> dict[str, object]:
    host, port = _address(connect)
    if token_file is None:
        raise ValueError("--connect needs --token-file with what --serve wrote.")
    token = token_file.read_text(encoding="utf-8").strip()
    return {"tcp_host": host, "tcp_port": port, "unix_path": "", "token": token}


def _serve(console: Console, address: str, token_file: Path | None, options: TransferOptions) -> int:
    host, port = _address(address)
    if token_file is None:
        raise ValueError("--serve needs --token-file, to be copied to the other host.")
    if not token_file.exists():
        token_file.touch(mode=0o600)
        token_file.write_text(f"mcc1.{secrets.token_bytes(32).hex()}\n", encoding="utf-8")
    token = token_file.read_text(encoding="utf-8").strip()
    if not token.startswith("mcc1.") or len(token) != 5 + 64:
        raise ValueError(
            f"{token_file} does not hold a cluster token; remove it, and --serve makes a new one."
        )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    console.print(f"token in {token_file}; end with Ctrl-C", markup=False)
    return serve_forever(host, port, bytes.fromhex(token.removeprefix("mcc1.")), options.arena_bytes, stop)
