"""The command `mooncache bench replay`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console

from mooncache.errors import InvalidArgument, MooncacheError, TraceInvalid, TraceTooLarge
from mooncache.reporting.output import EXIT_USAGE, check_writable, report_error
from mooncache.reporting.rows import JsonRows, MarkdownRows
from mooncache.reporting.workload import PUBLIC_FORMAT, TraceFormat, need_packages

if TYPE_CHECKING:
    from mooncache.bench.replay.client import ReplayTarget
    from mooncache.bench.replay.run import ReplayOptions
    from mooncache.reporting.rows import Report
    from mooncache.traces import Trace

_MODEL_NAME = "replay"
_START_TIMEOUT_S = 600.0
_BYTES_PER_TOKEN_MOST = 32 << 10


def replay(
    *,
    trace: Annotated[
        Path | None, Parameter(help="A trace; without one an hour of conversations is generated.")
    ] = None,
    form: TraceFormat = PUBLIC_FORMAT,
    endpoint: Annotated[
        str,
        Parameter(help="Base URL of a running gateway or engine; empty starts a cluster on hf engines here."),
    ] = "",
    key: Annotated[str, Parameter(help="API key of the endpoint.", env_var="MOONCACHE_API_KEY")] = "",
    model: Annotated[str, Parameter(help="Model of the endpoint (empty: its first), or a folder.")] = "",
    requests: Annotated[int, Parameter(help="Requests, in whole conversations drawn at random.")] = 150,
    load: Annotated[float, Parameter(help="Share of the time that the engines should be busy.")] = 0.3,
    speed: Annotated[
        float, Parameter(help="Factor on the speed of the trace; 0 chooses the one that gives --load.")
    ] = 0.0,
    tokens_per_block: Annotated[int, Parameter(help="Tokens for each block of the trace.")] = 16,
    context: Annotated[int, Parameter(help="Limit of prompt and answer together, in tokens.")] = 2048,
    vocab: Annotated[int, Parameter(help="Token ids of prompts are drawn below this.")] = 4096,
    prefill: Annotated[int, Parameter(help="Prefill instances; 0: decode instances compute prompts.")] = 0,
    decode: Annotated[int, Parameter(help="Decode instances.")] = 1,
    batch: Annotated[int, Parameter(help="Sequences that an engine decodes together (hf.batch_max).")] = 16,
    chunk_tokens: Annotated[
        int, Parameter(help="Prompt tokens of one step of the engine (hf.prefill_chunk_tokens).")
    ] = 512,
    seed: Annotated[int, Parameter(help="Seed for the choice of conversations and tokens.")] = 1,
    json: JsonRows = None,
    markdown: MarkdownRows = None,
) -> int:
    """Send a trace to a live cluster, measure it, and print what the simulator predicts beside it.

    The trace is made to fit: blocks and answers become shorter, time runs faster. The simulator's model of the engine
    is calibrated by a few requests before and after the replay; --prefill, --decode, --batch and --chunk-tokens say
    what stands behind an --endpoint.

    For example:

        mooncache bench replay --trace conversation_trace.jsonl --requests 200

        mooncache bench replay --trace mine.jsonl --endpoint http://10.0.0.1:8000 --key mct1... --tokens-per-block 512
    """
    need_packages("numpy")
    from mooncache.bench.replay.predict import Serving
    from mooncache.bench.replay.run import ReplayOptions
    from mooncache.bench.replay.workload import ReplayShape

    console = Console()
    try:
        check_writable(json, "--json")
        check_writable(markdown, "--markdown")
        options = ReplayOptions(
            requests=requests,
            shape=ReplayShape(tokens_per_block, context, vocab),
            speed=speed,
            load=load,
            serving=Serving(prefill, decode, batch, chunk_tokens),
            seed=seed,
        )
        with console.status("reading the trace") as status:
            report = _report(trace, form, endpoint, key, model, options, status.update)
    except MooncacheError as error:
        code = report_error(error, as_json=False)
        return EXIT_USAGE if isinstance(error, TraceInvalid | TraceTooLarge) else code
    report.deliver(console, json, markdown)
    return 0


def _report(
    trace: Path | None,
    form: TraceFormat,
    endpoint: str,
    key: str,
    model: str,
    options: ReplayOptions,
    progress: Callable[[str], None],
) -> Report:
    """The replay, against the endpoint or a cluster of its own. Raises MooncacheError."""
    from mooncache.bench.replay.run import run, workload

    small = workload(_trace(trace, form, options.seed), options)
    if endpoint:
        where = asyncio.run(_endpoint(endpoint.rstrip("/").removesuffix("/v1"), key, model))
        return asyncio.run(run(small, where, options, progress))
    with _cluster(options, model, len(set(small.hash_ids.tolist())), progress) as where:
        return asyncio.run(run(small, where, options, progress))


def _trace(path: Path | None, form: TraceFormat, seed: int) -> Trace:
    """The trace of the command line, or one that is made up."""
    import random

    from mooncache.traces import generate
    from mooncache.traces.generator import conversation

    return form.read(path) if path is not None else generate(conversation(), random.Random(seed))


async def _endpoint(url: str, key: str, model: str) -> ReplayTarget:
    """The endpoint with the name of a model that it serves. Raises InvalidArgument when it cannot be asked."""
    import aiohttp

    from mooncache.bench.replay.client import ReplayTarget

    if model:
        return ReplayTarget(url, key, model)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        timeout = aiohttp.ClientTimeout(total=10)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{url}/v1/models", headers=headers) as response,
        ):
            found = await response.json()
        return ReplayTarget(url, key, found["data"][0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise InvalidArgument(
            f"{url}/v1/models lists no model ({type(error).__name__}: {error!s:.120}); is a gateway there? "
            "Give its --key, or the --model."
        ) from None


@contextmanager
def _cluster(
    options: ReplayOptions, model: str, blocks: int, progress: Callable[[str], None]
) -> Iterator[ReplayTarget]:
    """A cluster on hf engines, with caches that hold the whole replay; gone afterwards."""
    import tempfile

    from mooncache.auth import load_cluster_token, tenant_token
    from mooncache.bench.replay.client import ReplayTarget
    from mooncache.cluster.embedded import ClusterSettings, EmbeddedCluster
    from mooncache.cluster.settings import EngineKind
    from mooncache.tiny_model import build

    serving, shape = options.serving, options.shape
    kv_bytes = min(4 << 30, max(512 << 20, 2 * blocks * shape.tokens_per_block * _BYTES_PER_TOKEN_MOST // 2))
    with tempfile.TemporaryDirectory(prefix="mooncache-bench-replay-") as folder:
        if not model:
            # Large enough for its computing, not the machinery around it, to be what is measured.
            progress("making a model")
            made = build(Path(folder) / "model", layers=4, hidden=384, heads=6, kv_heads=2, vocab=8192)
            model = str(made)
        env = {
            "MOONCACHE_CONDUCTOR_ADMISSION_ENABLED": "false",
            "MOONCACHE_HF_KV_CACHE_BYTES": str(kv_bytes),
            "MOONCACHE_HF_BATCH_MAX": str(serving.batch_max),
            "MOONCACHE_HF_PREFILL_CHUNK_TOKENS": str(serving.chunk_tokens),
            "MOONCACHE_HF_BLOCK_TOKENS": str(min(32, shape.tokens_per_block)),
        }
        settings = ClusterSettings(
            state_dir=Path(folder),
            engine=EngineKind.HF,
            model=model,
            model_name=_MODEL_NAME,
            prefill=serving.prefill,
            decode=serving.decode,
            port=0,
            conductor_port=0,
            gateway_port=0,
            extra_env=tuple(env.items()),
        )
        cluster = EmbeddedCluster(settings)
        progress("starting a cluster")
        cluster.start(_START_TIMEOUT_S)
        try:
            key = tenant_token(load_cluster_token(cluster.token_path), "bench").text
            yield ReplayTarget(cluster.layout.gateway_url, key, _MODEL_NAME)
        finally:
            cluster.stop()
