"""What the model profile says about measured figures (2, 7, 14), the break-even of section 2.3, pipelined prefill.

The profile's coefficients were fitted to Figure 14; Figures 2 and 7 check it on another model and another fact.
"""

from __future__ import annotations

from typing import Final

from mooncache.conductor.core.policy.pipeline import best
from mooncache.reproduce.finding import Sheet, measured, published
from mooncache.reproduce.lab import Lab
from mooncache.reproduce.scenario import Scenario
from mooncache.reproduce.setting import NODE_NETWORK_GBPS, PROFILE

K: Final = 1024
LENGTHS: Final = (8 * K, 16 * K, 32 * K, 64 * K, 128 * K)
# FAST'25 Figure 14, read off the drawing: seconds at 8k ... 128k tokens.
PREFILL_S: Final = {0.0: (1.005, 2.053, 4.478, 10.585, 27.517), 0.95: (0.134, 0.227, 0.406, 0.882, 2.329)}
TRANSFER_S: Final = (0.034, 0.063, 0.126, 0.251, 0.498)
LOAD_S: Final = (0.029, 0.053, 0.106, 0.213, 0.420)
DECODE_128_S: Final = (3.391, 3.435, 3.522, 3.657, 3.937)
FIT_BAR: Final = 0.045
# arXiv Figure 2: prefill of 8k, 16k ... 128k relative to 128k; decode step of batch 1..16 at 8k relative to 14.
FIGURE_2_PREFILL: Final = (0.033, 0.0705, 0.1119, 0.1574, 0.2062, 0.2581, 0.3141, 0.3725)
FIGURE_2_PREFILL_REST: Final = (0.4369, 0.5046, 0.5765, 0.653, 0.7335, 0.8195, 0.908, 1.0)
FIGURE_2_BATCH: Final = {1: 0.801, 4: 0.826, 8: 0.876, 12: 0.938, 16: 0.9945}
# arXiv Figure 7: seconds that storing the KV adds, one after the other and layer by layer.
SERIAL_STORE_S: Final = (0.111, 0.121, 0.230, 0.422, 0.866)
LAYERED_STORE_S: Final = (0.10, 0.10, 0.12, 0.10, 0.10)
FIGURE_7_GB_PER_S: Final = 50.0  # what the serialised column says: 128k tokens (42.9 GB) in .87 s
FIGURE_7_LEAST_S: Final = (
    0.1  # no length is below it in either column: a fixed cost of the paper's store path
)


def figure_14(_lab: Lab, sheet: Sheet) -> None:
    prefill, decode, worst = PROFILE.prefill, PROFILE.decode, 0.0
    for share, seconds in PREFILL_S.items():
        for tokens, paper in zip(LENGTHS, seconds, strict=True):
            ours = PROFILE.prefill.seconds(tokens, int(tokens * share))
            worst = max(worst, abs(ours / paper - 1))
            name = f"prefill of {tokens // K}k tokens, {share:.0%} held"
            sheet.findings.append(published(name, ours, "s", paper, within=FIT_BAR))
    kv_bytes = PROFILE.kv_bytes_per_token
    for tokens, transfer, load, steps in zip(LENGTHS, TRANSFER_S, LOAD_S, DECODE_128_S, strict=True):
        size = f"{tokens // K}k tokens"
        link = tokens * kv_bytes * 8 / (NODE_NETWORK_GBPS * 1e9)
        sheet.findings += [
            published(f"transfer of {size}", link, "s", transfer),
            published(f"load of {size} into HBM", tokens * kv_bytes / PROFILE.load_bytes_per_s, "s", load),
            published(f"128 decode steps at {size}", 128 * decode_s(1, tokens + 64), "s", steps),
        ]
    sheet.findings.append(measured("prefill, largest difference of the ten points", worst, ""))
    sheet.notes.append(
        f"Prefill {prefill.a:g} + {prefill.b:g} (n-p) + {prefill.c:g} (n^2-p^2) + {prefill.d:g} p seconds, decode step "
        f"{decode.base_s:g} + {decode.per_sequence_s:g} per sequence + {decode.per_token_s:g} per token of KV"
    )


def figure_2(_lab: Lab, sheet: Sheet) -> None:
    curve = (*FIGURE_2_PREFILL, *FIGURE_2_PREFILL_REST)
    longest = PROFILE.prefill.seconds(128 * K, 0)
    for number in (1, 2, 4, 8, 12):
        ours = PROFILE.prefill.seconds(number * 8 * K, 0) / longest
        sheet.findings.append(
            published(f"prefill of {number * 8}k / 128k tokens", ours, "", curve[number - 1])
        )
    reference = decode_s(14, 14 * 8 * K)
    for batch, paper in FIGURE_2_BATCH.items():
        ours = decode_s(batch, batch * 8 * K) / reference
        sheet.findings.append(published(f"decode step, batch {batch} / 14, 8k context", ours, "", paper))
    sheet.notes.append(
        "Figure 2 is LLaMA2-70B with its older kernels; the profile is of LLaMA3-70B: shapes compare"
    )


def figure_7(_lab: Lab, sheet: Sheet) -> None:
    """Layer by layer only the last layer's store is left when the computing ends, as long as computing is slower."""
    layers = 80
    for tokens, serial, layered in zip(LENGTHS, SERIAL_STORE_S, LAYERED_STORE_S, strict=True):
        store_s = tokens * PROFILE.kv_bytes_per_token / (FIGURE_7_GB_PER_S * 1e9)
        compute_s = PROFILE.prefill.seconds(tokens, 0)
        left_s = max(0.0, store_s - compute_s) + store_s / layers
        name = f"KV of {tokens // K}k tokens stored"
        sheet.findings += [
            published(f"{name} after the prefill", max(FIGURE_7_LEAST_S, store_s), "s", serial),
            published(f"{name} layer by layer", max(FIGURE_7_LEAST_S, left_s), "s", layered),
            measured(f"{name} layer by layer, without the fixed cost", left_s, "s"),
        ]
    sheet.notes.append(
        f"Rate ({FIGURE_7_GB_PER_S:g} GB/s) and fixed cost ({FIGURE_7_LEAST_S:g} s) come from the figure itself; what "
        "it shows, and the model too, is that the part that grows with the length vanishes"
    )


def decode_s(sequences: int, kv_tokens: float) -> float:
    """The seconds of one decode step by the profile."""
    decode = PROFILE.decode
    return decode.base_s + decode.per_sequence_s * (sequences - 1) + decode.per_token_s * kv_tokens


# FAST'25 section 2.3 and its Table 1.
WIDTH, GQA, VALUE_BYTES, A, B = 8192, 8, 2, 4, 22
TFLOPS: Final = {"8 x A800": (8 * 312.0, 5.86, 6.0), "8 x H800": (8 * 989.0, 18.57, 19.0)}


def break_even_gb_per_s(held: int, tflops: float) -> float:
    """The bandwidth above which loading `held` tokens beats computing them (B/G > 2ds / gqa(apd + bd^2))."""
    per_flop = 2 * WIDTH * VALUE_BYTES / (GQA * (A * held * WIDTH + B * WIDTH**2))
    return per_flop * tflops * 1e12 / 1e9


def break_even(_lab: Lab, sheet: Sheet) -> None:
    for machine, (tflops, exact, printed) in TFLOPS.items():
        ours = break_even_gb_per_s(8192, tflops)
        name = f"{machine}, 8,192 tokens, the paper's formula"
        sheet.findings.append(published(name, ours, "GB/s", printed, within=0.03))
        sheet.findings.append(published(f"{name}, its exact value", ours, "GB/s", exact, within=0.001))
    for held in (512, 8 * K, 32 * K, 128 * K):
        saved_s = PROFILE.prefill.seconds(held, 0) - PROFILE.prefill.a
        rate = held * PROFILE.kv_bytes_per_token / saved_s / 1e9
        sheet.findings.append(
            measured(f"8 x A800, {held:,} tokens, measured speed (Figure 14)", rate, "GB/s")
        )
    sheet.notes.append(
        "At measured speed computing is slower than the formula's peak, so loading wins even earlier: any 100 Gbps "
        "network (12.5 GB/s) by four times"
    )


def pipeline(_lab: Lab, sheet: Sheet) -> None:
    """Chunked pipeline parallelism: the paper gives neither group size, chunk size nor speed-up."""
    for tokens in (8 * K, 32 * K, 128 * K):
        alone = PROFILE.prefill.seconds(tokens, 0)
        sheet.findings.append(measured(f"{tokens // K}k tokens, one node", alone, "s"))
        for stages in (2, 4, 8):
            plan = best(PROFILE.prefill, tokens, 0, stages)
            name = f"{tokens // K}k tokens, {stages} nodes, chunks of {plan.chunk_tokens}"
            sheet.findings += [
                measured(name, plan.seconds, "s"),
                measured(f"{name}: speed-up", alone / plan.seconds, "x"),
                measured(
                    f"{name}: share of the nodes' time that computes", alone / plan.seconds / stages, ""
                ),
            ]
    sheet.notes.append(
        "The paper publishes no number here; this is the model that the policy chooses groups with"
    )


SCENARIOS: Final = (
    Scenario(
        "fig14", "latency of one request, the profile's fit", "FAST'25, Figure 14", figure_14, "at once"
    ),
    Scenario(
        "fig2", "prefill and decode by length and batch", "arXiv 2407.00079, Figure 2", figure_2, "at once"
    ),
    Scenario("fig7-layers", "storing KV layer by layer", "arXiv 2407.00079, Figure 7", figure_7, "at once"),
    Scenario("break-even", "loading against computing again", "FAST'25, section 2.3", break_even, "at once"),
    Scenario("cpp", "chunked pipeline parallelism", "FAST'25, section 3.3 (no figure)", pipeline, "at once"),
)
