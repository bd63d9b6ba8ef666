"""Conductor, gateways, engines: whether they are there, whether they agree about keys, and who has too much to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from mooncache.cli.doctor.core.facts import Facts, ServingFacts
from mooncache.cli.doctor.core.result import CheckResult, failed, passed, skipped, warned
from mooncache.conductor.core.members import MemberKind, Presence

KV_SHARE_MAX = 0.95
WAITING_MIN = 8
LOAD_FACTOR = 3.0
REPORT_AGE_MAX_S = 10.0

_CAUSES = (
    (
        r"out of memory|CUDA error: out of memory|Not enough memory|No available memory for the cache blocks",
        "give it less: vllm.gpu_memory_utilization, vllm.max_model_len; `nvidia-smi` shows what else holds the GPU",
    ),
    (r"No module named '?vllm", "install the engine: `pip install 'mooncache[vllm]'`"),
    (r"No module named '?(torch|transformers)", "install the engine: `pip install 'mooncache[hf]'`"),
    (
        r"Address already in use|address is in use",
        "`ss -ltnp` shows who has the port; stop it, or set another",
    ),
    (
        r"no kernel image is available|CUDA driver version is insufficient|driver on your system is too old",
        "the GPU's driver and PyTorch do not fit each other: update the driver (`nvidia-smi` shows its version)",
    ),
    (
        r"Bus error|No space left on device.*shm|insufficient shared memory",
        "more /dev/shm: Docker --shm-size=8g; Kubernetes: an emptyDir of medium Memory",
    ),
    (r"Too many open files", "`ulimit -n 1048576`; systemd: LimitNOFILE=1048576"),
    (
        r"is not a local folder|does not appear to have a file|No such file or directory|Repository Not Found",
        "check the model's folder on that host (--model, vllm.model)",
    ),
    (r"bfloat16 is only supported|Bfloat16", "set vllm.dtype to float16 or float32 for this GPU"),
    (r"signal SIGKILL|exit code 137", "`dmesg | tail` shows whether the kernel ended it for lack of memory"),
)


def conductor(serving: ServingFacts) -> CheckResult:
    """Whether it answers."""
    if not serving.conductor_target:
        return skipped("conductor", "serving", "a pool alone: no conductor is configured here")
    if serving.conductor_error:
        fix = "check that `mooncache conductor` runs and that cluster.conductor_target is its address"
        return failed("conductor", "serving", serving.conductor_error, fix)
    if serving.conductor and not serving.conductor.get("pool_connected", True):
        fix = "check cluster.master_targets on its host; see its log"
        return failed(
            "conductor", "serving", "it does not reach the pool, so no request is planned by its cache", fix
        )
    return passed("conductor", "serving", f"answers at {serving.conductor_target}")


def processes(facts: Facts) -> Iterator[CheckResult]:
    """Processes that the conductor misses. Store nodes and engines have checks of their own."""
    if facts.members is None:
        if facts.serving is not None and not facts.serving.conductor_error:
            yield skipped("processes", "cluster", facts.members_error or "the conductor did not list them")
        return
    missed = 0
    for member in facts.members:
        if member.kind == MemberKind.STORE_NODE or member.state not in (Presence.SILENT, Presence.GONE):
            continue
        missed += 1
        text = f"is {member.state}, last heard of {member.heard_age_s:.0f} s ago"
        fix = "see its log on that host, and start it again; if it was taken away, the entry goes after ten minutes"
        yield (failed if member.state == Presence.SILENT else warned)("processes", member.label, text, fix)
    if not missed:
        present = [member for member in facts.members if member.state != Presence.STOPPED]
        hosts = len({member.host for member in present})
        yield passed("processes", "cluster", f"{len(present)} are heard of, on {hosts} hosts")


def gateways(serving: ServingFacts) -> Iterator[CheckResult]:
    """Whether the one of this machine is ready, and which ones the conductor hears."""
    if not serving.conductor_target:
        return
    if serving.gateway_url:
        if serving.gateway_reason:
            fix = "see its log; it is ready once its engines are"
            yield failed("gateway", "here", serving.gateway_reason, fix)
        else:
            yield passed("gateway", "here", f"ready at {serving.gateway_url}/v1")
    for other in serving.conductor.get("gateways", ()):
        if other["url"] == serving.gateway_url:
            continue
        if other["draining"]:
            yield warned(
                "gateway",
                other["gateway_id"],
                "is draining",
                "start it again, or take it out of the balancer",
            )
        else:
            yield passed(
                "gateway", other["gateway_id"], f"asked the conductor {other['heard_age_s']:.0f} s ago"
            )


def engines(serving: ServingFacts) -> Iterator[CheckResult]:
    """State of each engine, with the cause where its reason or the end of its log shows one."""
    if not serving.conductor_target or serving.conductor_error:
        return
    if not serving.instances:
        yield failed("engines", "serving", "none is registered", "start one: `mooncache worker`")
    for row in serving.instances:
        name = str(row["instance_id"])
        if row["state"] == "starting":
            reason = row["reason"] or "it loads its model"
            cause = cause_of(f"{reason}\n{serving.engine_logs.get(name, '')}")
            text = f"is starting: {reason}"
            yield (
                failed("engines", name, text, cause)
                if cause
                else warned("engines", name, text, "wait until it has loaded")
            )
        elif row["state"] == "draining":
            fix = f"`mooncache instance undrain {name}` gives it requests again"
            yield warned("engines", name, "is draining: it gets no new requests", fix)
        elif row["state"] != "ready":
            reason = row["reason"] or "no reason given"
            cause = cause_of(f"{reason}\n{serving.engine_logs.get(name, '')}")
            yield failed("engines", name, f"is {row['state']}: {reason}", cause or "see its worker's log")
        elif not row["pool"]:
            fix = "set connector.enabled, or give an attached vLLM the connector (docs/vllm-connector.md)"
            yield warned("engines", name, "does not use the pool", fix)
        else:
            yield passed("engines", name, f"{row['role']}, {row['engine']} serves {row['model']}")
    yield from _roles(serving)


def cause_of(text: str) -> str:
    """What to do about an engine that ended with these words; "" when they are not known."""
    return next((fix for pattern, fix in _CAUSES if re.search(pattern, text, re.IGNORECASE)), "")


def _roles(serving: ServingFacts) -> Iterator[CheckResult]:
    for model in sorted({str(row["model"]) for row in serving.instances}):
        roles = {
            row["role"] for row in serving.instances if row["model"] == model and row["state"] == "ready"
        }
        if roles == {"prefill"}:
            yield failed(
                "engines", f"model {model}", "has no engine that decodes", "start one with worker.role decode"
            )


def passports(serving: ServingFacts) -> Iterator[CheckResult]:
    """Engines of one model that cannot share blocks, and models that share a passport."""
    if not serving.instances:
        return
    for row in serving.instances:
        if row["apart"]:
            fix = "start both with equal model, type, block size and engine version, or name the models differently"
            yield failed("passports", str(row["instance_id"]), row["apart"], fix)
    models: dict[str, set[str]] = {}
    for row in serving.instances:
        if row.get("passport"):
            models.setdefault(str(row["passport"]), set()).add(str(row["model"]))
    for names in models.values():
        if len(names) > 1:
            text = f"models {', '.join(sorted(names))} have one passport: each is given the other's blocks"
            fix = "right for two names of the same files; else give each its own files, and start the workers again"
            yield warned("passports", "serving", text, fix)
    if not any(row["apart"] for row in serving.instances) and all(
        len(names) == 1 for names in models.values()
    ):
        yield passed(
            "passports", "serving", f"{len(models)} for {len(serving.instances)} engines, each of one model"
        )


def agreement(facts: Facts) -> Iterator[CheckResult]:
    """Whether gateway and engines make the same tokens of a prompt, and the same keys of its blocks."""
    serving = facts.serving
    if serving is None or serving.agreement is None:
        why = (
            serving.agreement_error
            if serving is not None and serving.agreement_error
            else "no gateway was asked"
        )
        yield skipped("hash agreement", "serving", why)
        return
    for model in serving.agreement:
        yield from _of_model(model)


def _of_model(model: Mapping[str, Any]) -> Iterator[CheckResult]:
    name = f"model {model['model']}"
    if model["reason"]:
        fix = "give the gateway the engine's tokenizer files and chat template; see tokenizer.unusable in its log"
        yield failed("hash agreement", name, f"requests are served without keys: {model['reason']}", fix)
        return
    for one in model["instances"]:
        yield _of_engine(model, one)


def _of_engine(model: Mapping[str, Any], one: Mapping[str, Any]) -> CheckResult:
    check, name, tokens = "hash agreement", str(one["instance_id"]), model["prompt_tokens"]
    keys, saved = len(one["keys"]), one.get("saved")
    if one["error"]:
        return warned(check, name, f"not compared: {one['error']}", "see its worker's log")
    if one["first_difference"] >= 0:
        text = (
            f"reads a prompt of {tokens} tokens as {one['engine_tokens']}, which differ from token "
            f"{one['first_difference']} on: no block of it is ever found"
        )
        fix = "start it with the chat template and the tokenizer of the gateway's model folder (no --chat-template)"
        return failed(check, name, text, fix)
    if saved is None or not keys:
        return passed(check, name, f"{tokens} tokens are equal; its blocks could not be looked for")
    if saved < keys:
        text = f"tokens are equal, but the pool has {saved} of the {keys} blocks it computed under the gateway's keys"
        fix = "see its log for blocks that were not saved; give gateway and engine one version"
        return failed(check, name, text, fix)
    return passed(check, name, f"{tokens} tokens and {keys} block keys are equal")


def overload(serving: ServingFacts) -> Iterator[CheckResult]:
    """Engines with full KV memory, long queues, or much more to do than the others of their kind."""
    rows = [row for row in serving.instances if row["state"] == "ready"]
    if not rows:
        return
    found = False
    for row in rows:
        others = [other for other in rows if (other["model"], other["role"]) == (row["model"], row["role"])]
        mean = sum(other["running"] + other["waiting"] for other in others) / len(others)
        load = row["running"] + row["waiting"]
        if row["report_age_s"] > REPORT_AGE_MAX_S:
            text, fix = f"last reported {row['report_age_s']:.0f} s ago", "see its worker's log"
        elif row["kv_usage"] > KV_SHARE_MAX and row["waiting"]:
            text = f"its KV memory is {row['kv_usage']:.0%} full, and {row['waiting']} requests wait"
            fix = "add an engine, or shorten vllm.max_model_len"
        elif row["waiting"] >= WAITING_MIN and row["waiting"] > row["running"]:
            text = f"{row['waiting']} requests wait, {row['running']} run"
            fix = "add an engine of this role, or let roles follow the load (conductor.rebalance_roles)"
        elif len(others) > 1 and load >= WAITING_MIN and load > LOAD_FACTOR * mean:
            text = f"has {load} requests, the {len(others)} engines of its kind {mean:.1f} on average"
            fix = "`mooncache why` shows what drew them there; conductor.replicate_bytes_per_s copies hot prefixes"
        else:
            continue
        found = True
        yield warned("overload", str(row["instance_id"]), text, fix)
    if not found:
        yield passed("overload", "serving", f"{len(rows)} engines keep up")
