"""Sections of serving: conductor, gateway, worker, engines, the engines' side of the pool, tracing."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mooncache.config.base import OptionalPath, PortNumber, Section, Words
from mooncache.config.units import DurationS, SizeBytes

PolicyName = Literal[
    "mooncache",
    "algorithm1",
    "local",
    "random",
    "round_robin",
    "least_load",
    "longest_prefix",
    "dynamo",
    "lmetric",
    "dualmap",
    "preble",
]


class ConductorSection(Section):
    """The global scheduler."""

    host: str = "127.0.0.1"
    """Address to listen on; anything beyond loopback has to be chosen here."""
    port: PortNumber = 7800
    """Port of the control service; 0 means any free port."""
    advertise_host: str = ""
    """Host that others reach the conductor by; empty means `host`."""
    metrics_port: PortNumber = 0
    """Port for /metrics, /health and /ready; 0 means any free port."""
    report_interval_s: DurationS = Field(default=0.25, gt=0, le=60)
    """How often workers report load and cache changes; less often with more than 50 instances."""
    suspect_after_s: DurationS = Field(default=2.0, gt=0, le=300)
    """Silence after which an instance gets no new requests."""
    lease_s: DurationS = Field(default=10.0, gt=0, le=600)
    """Silence after which an instance and its cached blocks are forgotten."""
    takeover_s: DurationS = Field(default=1.0, ge=0.1, le=60)
    """Silence of the leading conductor after which a standby leads; one that has ended is noticed at once."""
    election: Literal["peers", "etcd", "lease"] = "peers"
    """Who says which conductor leads: they themselves, or etcd or a Lease with the settings of coordination."""
    ttft_slo_s: DurationS = Field(default=30.0, gt=0, le=3600)
    """TTFT limit of requests that name none."""
    tbt_slo_s: DurationS = Field(default=1.0, gt=0, le=60)
    """TBT limit of requests that name none."""
    policy: PolicyName = "mooncache"
    """Scheduling policy, see docs/scheduling.md. All but mooncache exist for comparison."""
    admission_enabled: bool = True
    """Refuse requests whose predicted TTFT or TBT is beyond the SLO."""
    offline_share: float = Field(default=0.8, ge=0, le=1)
    """How full of an instance, and of the TBT promise, offline requests may make it; 0 takes none of them."""
    inline_tokens_max: int = Field(default=4096, ge=0)
    """The most prompt tokens that a decode instance computes itself, where that costs less than a hand-over."""
    handover_margin_s: DurationS = Field(default=0.25, gt=0, le=300)
    """Minimum time for blocks to reach the pool after their prefill; it grows with the times observed."""
    request_timeout_s: DurationS = Field(default=900.0, gt=0, le=86400)
    """A request whose end is never reported is dropped after this time."""
    rebalance_roles: bool = True
    """Let instances change between prefill and decode with the load; roles that an operator set are left alone."""
    replicate_bytes_per_s: SizeBytes = Field(default=256 << 20, ge=0)
    """Limit on copying hot prefixes to further store nodes, in bytes per second; 0 copies none."""
    scaler_enabled: bool = False
    """Open a port for KEDA's external scaler. It asks for no key, and tells how many instances a model needs."""
    scaler_port: PortNumber = 7801
    """Port of KEDA's external scaler; 0 means any free port."""
    scaler_hold_s: DurationS = Field(default=60.0, ge=0, le=3600)
    """KEDA gets the largest need within this time, so that instances do not come and go."""


class GatewaySection(Section):
    """The OpenAI-compatible HTTP service."""

    host: str = "127.0.0.1"
    """Address to listen on; anything beyond loopback has to be chosen here."""
    port: PortNumber = 8000
    """HTTP port; 0 means any free port."""
    advertise_host: str = ""
    """Host that others reach the gateway by; empty means `host`, or the host's name when that is every address."""
    metrics_port: PortNumber = 0
    """Port for /metrics, /health and /ready for operators; 0 means any free port."""
    keys_file: OptionalPath = None
    """TOML file with API keys of your own (mode 0600); tenant tokens are API keys without it."""
    requests_per_minute: float = Field(default=0, ge=0)
    """Requests of one tenant in a minute over all gateways, unless its key sets another limit; 0: no limit."""
    tokens_per_minute: float = Field(default=0, ge=0)
    """Tokens of one tenant in a minute over all gateways, unless its key sets another limit; 0: no limit."""
    request_count_max: int = Field(default=4096, ge=1, le=1_000_000)
    """Requests under way; more are refused with 429."""
    tenant_request_count_max: int = Field(default=1024, ge=1, le=1_000_000)
    """Requests of one tenant under way over all gateways; more get 429. The cluster token has no such limit."""
    tenant_token_count_max: int = Field(default=0, ge=0, le=10**12)
    """Tokens of one tenant's requests under way over all gateways: prompts, and what they may generate; 0: no limit."""
    body_bytes_max: SizeBytes = Field(default=64 << 20, ge=1024, le=1 << 30)
    """Size of the largest request body, for every model."""
    open_body_bytes_max: SizeBytes = Field(default=256 << 20, ge=1024, le=1 << 40)
    """Limit on the bytes of all bodies held, each until its answer begins; more are refused with 429."""
    tenant_body_bytes_max: SizeBytes = Field(default=64 << 20, ge=1024, le=1 << 40)
    """Limit on the bytes of one tenant's bodies held; more are refused with 429."""
    first_token_timeout_s: DurationS = Field(default=300.0, gt=0, le=86400)
    """Time until an engine has to begin its answer."""
    stall_timeout_s: DurationS = Field(default=120.0, gt=0, le=86400)
    """Silence of an engine in the middle of its answer after which the request fails."""
    request_timeout_s: DurationS = Field(default=600.0, gt=0, le=86400)
    """Time for one whole request."""
    prefill_attempts: int = Field(default=2, ge=1, le=8)
    """Prefill instances that are tried before the decode instance computes the prompt itself."""
    cors_origins: Words = ()
    """Origins that browsers may call from; "*" for all, empty for none."""
    console: bool = True
    """Serve the console, a page for operators, at /console; it asks for the cluster token or a key that opens it."""
    console_acts: bool = True
    """Whether who signs in to the console with the cluster token may also drain, set roles, and make tenants' keys."""
    price_file: OptionalPath = None
    """Price book (TOML, `mooncache cost prices` prints one) for money and budgets; empty: budgets limit nothing."""
    model_folders: Words = ()
    """Folders of models on this machine, for their tokenizers; found by content where engines have other paths."""
    public_prefix_enabled: bool = False
    """Let requests share the cache of leading messages that they declare public across tenants."""
    tenant_sessions_enabled: bool = True
    """Have engines keep each tenant's blocks under that tenant at the store nodes. A shared public prefix is not."""
    usage_enabled: bool = True
    """Count what tenants use, and keep it in usage.sqlite in `cluster.accounts_dir`, or in the database there."""
    accounts_stale_max_s: DurationS = Field(default=86400.0, ge=0, le=31 * 86400)
    """While a database of accounts is away, keys that are known open something for this long; 0: without an end."""
    usage_otlp_endpoint: str = ""
    """OTLP endpoint for sums of usage (extra otel), as tracing.endpoint; empty: OTEL_EXPORTER_OTLP_ENDPOINT or none."""
    capture_file: OptionalPath = None
    """Write a trace of all requests here (lengths, times, anonymous block ids; no text); empty captures nothing."""
    capture_block_tokens: int = Field(default=512, ge=1, le=1 << 20)
    """Tokens of a block in the captured trace; best a multiple of the engines' block size."""
    capture_file_bytes_max: SizeBytes = Field(default=256 << 20, ge=1024)
    """Size at which a captured file is closed, renamed to FILE.1, and a new one begun."""
    capture_file_count: int = Field(default=4, ge=1, le=1000)
    """Captured files that are kept, the one being written included."""
    capture_salt_file: OptionalPath = None
    """File (mode 0600, made when absent) with a salt that makes ids equal in all captured files; empty: in one only."""
    capture_names: bool = False
    """Also capture anonymous numbers of tenants and sessions."""
    batch_dir: OptionalPath = None
    """Folder (mode 0700) of this gateway alone, for /v1/files and /v1/batches; empty: it has neither."""
    batch_file_bytes_max: SizeBytes = Field(default=100 << 20, ge=1024, le=1 << 32)
    """Size of the largest file of /v1/files."""
    batch_request_count_max: int = Field(default=50_000, ge=1, le=1_000_000)
    """Requests of one batch."""
    tenant_batch_bytes_max: SizeBytes = Field(default=1 << 30, ge=1024, le=1 << 44)
    """Bytes of all files of one tenant, answers of its batches included."""
    tenant_batch_file_count_max: int = Field(default=1000, ge=1, le=1_000_000)
    """Files of one tenant, and batches."""
    batch_age_max_s: DurationS = Field(default=30 * 86400.0, ge=60, le=366 * 86400)
    """Age at which files, and batches that have ended, are deleted."""
    offline_request_count_max: int = Field(default=64, ge=1, le=4096)
    """Offline requests under way, each of them admitted by the conductor."""
    drain_timeout_s: DurationS = Field(default=30.0, ge=0, le=3600)
    """Time for running streams to finish when the process is asked to stop."""


class EndpointPickerSection(Section):
    """The endpoint picker for Envoy; keys, limits and times are those of `gateway`."""

    host: str = "127.0.0.1"
    """Address to listen on; anything beyond loopback has to be chosen here."""
    port: PortNumber = 9002
    """Port that Envoy asks (ext_proc); 0 means any free port."""
    advertise_host: str = ""
    """Host that others reach the picker by; empty means `host`, or the host's name when that is every address."""
    metrics_port: PortNumber = 0
    """Port for /metrics, /health and /ready for operators; 0 means any free port."""
    key_required: bool = True
    """Ask Envoy for the picker's key. If false, whoever reaches the port and has an API key learns the engines' key."""
    fallback_count: int = Field(default=0, ge=0, le=8)
    """Further endpoints named to Envoy, to be tried in order. Load balancers of the type ORIGINAL_DST take none."""


class WorkerSection(Section):
    """The supervisor beside one engine."""

    instance_id: str = Field(default="", max_length=128)
    """Name of the instance, stable over restarts; empty makes one from host name and port."""
    role: Literal["prefill", "decode", "both"] = "both"
    """Role of the instance at the start; the conductor may switch it."""
    engine: str = Field(
        default="vllm", pattern=r"^(vllm|sglang|hf|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$", max_length=256
    )
    """Which engine: vllm, sglang, hf, or package.module:Class for an adapter of your own."""
    model: str = ""
    """Folder of the model, or its id on a hub; empty builds a small one with random weights."""
    model_name: str = Field(default="", max_length=256)
    """Name that clients use for the model; empty means the folder's name."""
    attach_url: str = ""
    """URL (http://host:port) of a running engine to attach to instead of starting one."""
    attach_passport: OptionalPath = None
    """File with the passport that the engine at `attach_url` wrote; empty: its blocks are not used."""
    engine_host: str = "127.0.0.1"
    """Address that the engine's HTTP server listens on."""
    engine_port: PortNumber = 0
    """Port of the engine's HTTP server; 0 means any free port."""
    advertise_host: str = ""
    """Host that gateways reach the engine by; empty means `engine_host`."""
    host: str = "127.0.0.1"
    """Address of the worker's control service."""
    port: PortNumber = 0
    """Port of the worker's control service; 0 means any free port."""
    metrics_port: PortNumber = 0
    """Port for /metrics, /health and /ready; 0 means any free port."""
    start_timeout_s: DurationS = Field(default=600.0, gt=0, le=86400)
    """Time for the engine to become healthy."""
    hang_timeout_s: DurationS = Field(default=30.0, gt=0, le=3600)
    """Silence on health checks after which an engine is restarted."""
    drain_timeout_s: DurationS = Field(default=30.0, ge=0, le=3600)
    """Time for running requests to finish when the instance drains."""


class VllmSection(Section):
    """How a worker starts vLLM."""

    dtype: str = "auto"
    """Type of weights and KV; float32 where tokens have to be equal bit for bit on a CPU."""
    max_model_len: int = Field(default=0, ge=0)
    """Longest prompt and answer together, in tokens; 0 means the model's."""
    block_tokens: int = Field(default=0, ge=0)
    """Tokens of a block; 0 means vLLM's default."""
    max_num_seqs: int = Field(default=0, ge=0)
    """Sequences that run at once; 0 means vLLM's default."""
    enforce_eager: bool = False
    """Do not compile and do not capture graphs: starts faster, runs slower."""
    kv_cache_bytes: SizeBytes = 0
    """Memory for KV on a machine without a GPU; 0 means 1 GiB there."""
    kv_events: bool = True
    """Let vLLM publish the events of its own prefix cache."""
    tool_parser: str = ""
    """vLLM's parser for tool calls of this model, for example hermes; empty turns automatic tool choice off."""
    media_domains: Words = ()
    """Hosts from which vLLM may fetch images, audio and video that requests name by URL; empty allows none."""
    extra_args: Words = ()
    """Further arguments of `vllm serve`, separated by commas."""


class SglangSection(Section):
    """How a worker starts SGLang."""

    dtype: str = "auto"
    """Type of weights."""
    max_model_len: int = Field(default=0, ge=0)
    """Longest prompt and answer together, in tokens; 0 means the model's."""
    page_tokens: int = Field(default=64, ge=1, le=4096)
    """Tokens of a page."""
    max_num_seqs: int = Field(default=0, ge=0)
    """Sequences that run at once; 0 means SGLang's default."""
    kv_events: bool = True
    """Let SGLang publish the events of its own prefix cache."""
    hicache: bool = False
    """Keep pages in the host's memory and in the pool (HiCache); needs a GPU."""
    extra_args: Words = ()
    """Further arguments of `sglang.launch_server`, separated by commas."""


class HfSection(Section):
    """The small engine on Hugging Face transformers."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of weights and KV."""
    device: str = "auto"
    """cpu, cuda, cuda:0 ...; auto means a GPU when there is one."""
    block_tokens: int = Field(default=32, ge=1, le=4096)
    """Tokens of a block."""
    kv_cache_bytes: SizeBytes = Field(default=512 << 20, ge=1 << 20)
    """Memory for KV blocks."""
    batch_max: int = Field(default=16, ge=1, le=1024)
    """Sequences that decode together."""
    queue_max: int = Field(default=1024, ge=1, le=1_000_000)
    """Requests that may wait; more are refused with 429."""
    prefill_chunk_tokens: int = Field(default=512, ge=16)
    """Prompt tokens computed in one step, so that other sequences can decode between steps."""
    drain_timeout_s: DurationS = Field(default=5.0, ge=0, le=3600)
    """Time for running requests to finish when the process is asked to stop."""


class ConnectorSection(Section):
    """How an engine uses the pool."""

    enabled: bool = True
    """Use the pool; without it the engine has its own cache only."""
    save_decode_blocks: bool = True
    """Also keep blocks that are filled while decoding, for the next turn."""
    load_timeout_s: DurationS = Field(default=10.0, gt=0, le=600)
    """Time for loading the blocks of one request; missing blocks are computed."""
    save_timeout_s: DurationS = Field(default=10.0, gt=0, le=600)
    """Time for one batch of saved blocks; unstored blocks are dropped."""
    save_queue_bytes_max: SizeBytes = Field(default=1 << 30, ge=1 << 20)
    """Bytes that may wait to be saved; further blocks are counted, not saved."""
    load_threads: int = Field(default=2, ge=1, le=64)
    """Threads that load blocks."""
    break_even: bool = True
    """Compute what the pool has when that was measured to be faster, and cut slow loads; else load all of it."""
    registered_bytes_max: SizeBytes = Field(default=256 << 30, ge=0)
    """KV memory up to this size is registered with RDMA devices, so that blocks need no copy; 0: never."""
    stream: Literal["auto", "on", "off"] = "auto"
    """Load blocks as another instance computes them: always, never, or where it gains and memory is free."""
    shadow_share: float = Field(default=0.0, ge=0, le=1)
    """Share of hits that are computed all the same, to verify the pool's blocks; 0 verifies none."""
    shadow_tokens_per_s: float = Field(default=500.0, gt=0, le=1e9)
    """Budget of an engine for that, in prompt tokens a second; a hit of more than ten seconds' tokens is not taken."""
    shadow_tolerance: float = Field(default=0.0, ge=0, le=10)
    """Distance up to which a verified block counts as the pool's; 0: by the type of KV, see docs/operations.md."""
    layerwise: bool = False
    """Save every layer as soon as it is computed instead of whole blocks after each step."""
    head_groups: int = Field(default=0, ge=0, le=256)
    """Parts by heads in which a block is stored, to share it over tensor parallel sizes; 0: one for each rank."""
    layer_groups: int = Field(default=1, ge=1, le=256)
    """Parts by layers, for other pipeline parallel sizes; together with head_groups only."""


class TracingSection(Section):
    """OpenTelemetry."""

    endpoint: str = ""
    """OTLP endpoint: gRPC, as http://127.0.0.1:4317; with a path or port 4318: HTTP; empty records nothing."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of new traces that are recorded; a caller's sampling decision is kept."""
