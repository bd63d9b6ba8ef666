"""Whether engines load through their own connector what another one has saved, and go on from it as that one did."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from mooncache.cli.doctor.core.facts import ServingFacts
from mooncache.cli.doctor.core.result import CheckResult, failed, passed, skipped, warned
from mooncache.kvcache.leg_hint import CacheOutcome

_CHECK: Final = "read back"
_NO_LOAD: Final = {
    CacheOutcome.TIMEOUT: (
        "waited {waited_ms:.0f} ms for the blocks of {writer}, which did not come",
        "mend what `store nodes` and `probe block` say; else see the log of {writer} for blocks it did not save",
    ),
    CacheOutcome.POOL_ABSENT: (
        "does not reach the pool",
        "mend what `store nodes` says; else check its worker's cluster.master_targets, and the way to the nodes",
    ),
    CacheOutcome.FAILED: (
        "could not load the blocks of {writer}{reason}",
        "mend what `store nodes` and `probe block` say; else see its log for the loads that failed",
    ),
    CacheOutcome.MISS: (
        "found none of the blocks of {writer}",
        "give both engines one version; see `hash agreement`, and `hit ratio` for blocks that were evicted",
    ),
    CacheOutcome.PARTIAL: (
        "loaded {loaded_tokens} of {expected_tokens} tokens that {writer} saved{reason}",
        "see `hit ratio` for blocks that were evicted, and the log of {writer} for blocks that it did not save",
    ),
}
_COMPUTED: Final = frozenset({CacheOutcome.COMPUTED_FASTER, CacheOutcome.LOAD_CUT})


def read_back(serving: ServingFacts) -> Iterator[CheckResult]:
    """One result for each engine that was asked to load blocks."""
    if serving.agreement is None:
        yield skipped(_CHECK, "serving", serving.agreement_error or "no gateway was asked")
        return
    pool = {str(row["instance_id"]): row["pool"] for row in serving.instances}
    found = [
        one
        for model in serving.agreement
        for one in model.get("read_backs", ())
        if pool.get(one["writer"]) and pool.get(one["reader"])
    ]
    if not found:
        yield skipped(_CHECK, "serving", "no engine saved a prompt that another one could be asked for")
    for one in found:
        yield _of_engine(one)


def _of_engine(one: Mapping[str, Any]) -> CheckResult:
    name, writer, whole = str(one["reader"]), str(one["writer"]), one["expected_tokens"]
    is_alone = writer == name
    whose = "it had saved itself" if is_alone else f"{writer} had saved"
    if one["error"]:
        return warned(_CHECK, name, f"was not read: {one['error']}", "run it again; see its worker's log")
    if not whole:
        return skipped(_CHECK, name, "the longest prompt of its model has no complete block")
    if not one["outcome"]:
        return skipped(_CHECK, name, "it does not say what it loads (kv_transfer_params of its answer)")
    if one["loaded_tokens"] < whole <= one["loaded_tokens"] + one["local_tokens"]:
        alone = "one engine: no other shares its blocks, and " if is_alone else ""
        return skipped(_CHECK, name, f"{alone}its own cache had the prompt, so nothing was loaded")
    if one["loaded_tokens"] < whole:
        return _not_loaded(one)
    if one["first_difference"] >= 0:
        text = (
            f"loaded {one['loaded_tokens']} tokens that {whose}, and then chose another token than {writer} did "
            f"(number {one['first_difference'] + 1} of its answer)"
        )
        fix = (
            "run it again: two tokens may be equally likely once; if not, see `mooncache quarantine ls`, "
            "and give both engines one version and the same model files"
        )
        return warned(_CHECK, name, text, fix)
    text = (
        f"loaded {one['loaded_tokens']} tokens that {whose}, in {one['load_ms']:.0f} ms; its answer is equal"
    )
    return passed(_CHECK, name, text)


def _not_loaded(one: Mapping[str, Any]) -> CheckResult:
    name, outcome = str(one["reader"]), CacheOutcome.parse(one["outcome"])
    if outcome is CacheOutcome.OFF:
        fix = "docs/vllm-connector.md says which settings and models use the pool"
        return warned(_CHECK, name, f"does not use the pool: {one['reason'] or 'it does not say why'}", fix)
    if outcome in _COMPUTED:
        text = f"computed what the pool had: {one['reason'] or 'that was faster'}"
        fix = "`node to node` and `probe block` show a slow path; an engine of an earlier version computes now and then"
        return warned(_CHECK, name, text, fix)
    why, fix = _NO_LOAD.get(outcome, _NO_LOAD[CacheOutcome.PARTIAL])
    words = {**one, "reason": f": {one['reason']}" if one["reason"] else ""}
    return failed(_CHECK, name, why.format(**words), fix.format(**words))
