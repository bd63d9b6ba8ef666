"""Cost models that learn from what was observed, starting from published figures.

Prefill: the polynomial of the papers, fitted by recursive least squares whose parameters may drift (a Kalman
filter). A residual is clipped, so that one odd observation (a compile, a stall) moves little, while a lasting
change of speed is followed within a few steps. Transfer and decode: a factor on a prior, followed in the
logarithm with clipped steps. Parameters stay in the range in which more cache never costs more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mooncache.conductor.core.policy.types import DecodeCost, PrefillCost, TransferCost

# LLaMA3-70B on 8 A800, fitted to Mooncake (FAST'25), figure 14; seconds and tokens.
PREFILL_PRIOR = (0.0666, 1.1003e-4, 7.386e-10, 2.618e-6)
# A small model on a CPU: what the `hf` engine is mostly used with.
PREFILL_PRIOR_HF = (0.02, 3e-4, 3e-9, 1e-6)
DECODE_PRIOR = DecodeCost(0.0263, 0.00021, 3.4e-8)
TRANSFER_PRIOR_BYTES_PER_S = 1e9
TRANSFER_LATENCY_S = 0.005
KV_BYTES_PER_TOKEN_UNKNOWN = 100_000
_SCALE = (1.0, 1e-3, 1e-6, 1e-3)  # features are in thousands of tokens
_LOOSE = 10.0  # prior standard deviation over the prior's value
_DRIFT = 0.02  # share of itself by which a parameter may change between observations
_TRUSTED_AFTER = 8
_SECONDS_MAX = 3600.0
_TOKENS_MAX = 100_000_000


@dataclass(slots=True)
class PrefillLearner:
    """The prefill model of one (model, engine); `observe` improves it."""

    theta: list[float]
    covariance: list[list[float]]
    ceiling: list[float]
    count: int = 0
    cost: PrefillCost = field(default=PrefillCost(*PREFILL_PRIOR))

    @classmethod
    def starting(cls, engine: str) -> PrefillLearner:
        """Return the prior for an engine."""
        prior = PREFILL_PRIOR_HF if engine == "hf" else PREFILL_PRIOR
        theta = [value / scale for value, scale in zip(prior, _SCALE, strict=True)]
        ceiling = [(value * _LOOSE) ** 2 for value in theta]
        covariance = [[ceiling[i] if i == j else 0.0 for j in range(4)] for i in range(4)]
        return cls(theta, covariance, ceiling, 0, PrefillCost(*prior))

    def observe(self, n: int, p: int, seconds: float) -> bool:
        """Take in one prefill of n tokens with p cached; return False for what cannot be."""
        if not (
            0 < n <= _TOKENS_MAX and 0 <= p < n and math.isfinite(seconds) and 0 < seconds <= _SECONDS_MAX
        ):
            return False
        x = (1.0, (n - p) / 1e3, (n * n - p * p) / 1e6, p / 1e3)
        expected = self.cost.seconds(n, p)
        error = seconds - sum(t * v for t, v in zip(self.theta, x, strict=True))
        if self.count >= _TRUSTED_AFTER:
            error = max(-0.5 * expected, min(error, expected))
        noise = (0.1 * expected + 0.001) ** 2
        px = [sum(row[j] * x[j] for j in range(4)) for row in self.covariance]
        divisor = sum(x[j] * px[j] for j in range(4)) + noise
        for i in range(4):
            self.theta[i] += px[i] / divisor * error
        for i in range(4):
            for j in range(4):
                self.covariance[i][j] = self.covariance[i][j] - px[i] * px[j] / divisor
        self._keep_in_range()
        self._drift()
        self.count += 1
        return True

    def _drift(self) -> None:
        """Speeds change: every parameter may have moved a little, up to the uncertainty of the prior."""
        for i in range(4):
            if self.covariance[i][i] < self.ceiling[i]:
                size = max(self.theta[i], 0.01 * self.ceiling[i] ** 0.5)
                self.covariance[i][i] += (_DRIFT * size) ** 2

    def _keep_in_range(self) -> None:
        a, b, c, d = (max(0.0, t * s) for t, s in zip(self.theta, _SCALE, strict=True))
        b = max(b, 1e-9)
        d = min(d, b)  # bringing a token's KV into place never costs more than computing it
        self.cost = PrefillCost(a, b, c, d)
        self.theta = [value / scale for value, scale in zip((a, b, c, d), _SCALE, strict=True)]


@dataclass(slots=True)
class Follower:
    """A positive value followed in the logarithm: a step changes it by `reach` at most."""

    value: float
    weight: float = 0.2
    reach: float = 4.0
    count: int = 0

    def observe(self, seen: float) -> bool:
        """Take in one observation; return False for what cannot be."""
        ratio = seen / self.value
        if not 0 < ratio < math.inf:
            return False
        weight = max(self.weight, 1.0 / (self.count + 1))
        limit = math.log(self.reach) if self.count else 30.0
        step = max(-limit, min(limit, math.log(ratio)))
        self.value = min(1e300, max(1e-300, self.value * math.exp(weight * step)))
        self.count += 1
        return True


class TransferLearner:
    """Bytes per second from the pool into an engine."""

    def __init__(self) -> None:
        self.bytes_per_s = Follower(TRANSFER_PRIOR_BYTES_PER_S)

    def observe(self, loaded_bytes: float, seconds: float) -> bool:
        """Take in one load; small ones say nothing about the rate."""
        if not (loaded_bytes >= 65536 and 1e-5 <= seconds <= _SECONDS_MAX):
            return False
        rate = loaded_bytes / max(1e-5, seconds - min(TRANSFER_LATENCY_S, seconds / 2))
        return self.bytes_per_s.observe(min(1e13, rate))

    def cost(self, kv_bytes_per_token: int) -> TransferCost:
        """Return the model for an engine whose tokens have so many bytes."""
        per_token = kv_bytes_per_token or KV_BYTES_PER_TOKEN_UNKNOWN
        return TransferCost(TRANSFER_LATENCY_S, self.bytes_per_s.value / per_token)


class DecodeLearner:
    """Step time of one instance: the prior times a factor that follows reported TBT."""

    def __init__(self) -> None:
        self.factor = Follower(1.0)
        self.cost = DECODE_PRIOR

    def observe(self, sequences: float, kv_tokens: float, tbt_s: float) -> bool:
        """Take in a reported TBT at a reported batch."""
        if not 0 < tbt_s <= _SECONDS_MAX:
            return False
        taken = self.factor.observe(tbt_s / DECODE_PRIOR.tbt_s(sequences, kv_tokens))
        factor = min(1e6, max(1e-6, self.factor.value))
        prior = DECODE_PRIOR
        self.cost = DecodeCost(
            prior.base_s * factor, prior.per_sequence_s * factor, prior.per_token_s * factor
        )
        return taken
