"""The conductor's settings as its parts want them, and limits that are not configurable."""

from __future__ import annotations

from typing import Final

from mooncache.conductor.core.decisions import SchedulerSettings
from mooncache.conductor.core.policy.roles import PLANS_EVERY
from mooncache.conductor.core.policy.types import AdmissionMode, Rules
from mooncache.config import ConductorSection

KEYS_MAX: Final = 1_000_000  # keys in one message: 32 MB
SCALER_LOOK_S: Final = 1.0
PROMPT_TOKENS_MAX: Final = 100_000_000
SEQUENCES_MAX: Final = 100_000
EXCLUDED_MAX: Final = 4096
REPORTS_MAX: Final = 1024
LEGS_MAX: Final = 64  # of one request
ENDED_LEGS_MAX: Final = 4096  # in one report of an instance
TEXT_CHARS_MAX: Final = 4096
NAME_CHARS_MAX: Final = 256
WATCHERS_MAX: Final = 4096
WATCH_MAX_S: Final = 60.0
BURST_S: Final = 0.05  # after a change a list waits so long for others, so that many changes make few answers
EXPIRE_INTERVAL_S: Final = 0.25
LEAD_PAUSE_S: Final = 0.1  # after a defect
REMEMBER_INTERVAL_S: Final = 0.05
CHECK_INTERVAL_S: Final = 30.0
POOL_RETRY_S: Final = 1.0
# A running engine does the work of either role without a start, and others find its blocks in the pool: it is missing
# for as long as what is under way there takes to end.
ROLE_SWITCH_S: Final = 4.0
REBALANCE_INTERVAL_S: Final = (
    PLANS_EVERY * ROLE_SWITCH_S
)  # a lasting change of load moves roles after two plans
REPLICATE_INTERVAL_S: Final = 2.0
JOBS_MAX: Final = 1024  # prompts that wait to be explained or remembered
JOB_BYTES_MAX: Final = 256 << 20


def settings_of(section: ConductorSection) -> SchedulerSettings:
    """The scheduler's settings."""
    return SchedulerSettings(
        policy=section.policy,
        rules=Rules(
            admission=AdmissionMode.LEARNED if section.admission_enabled else AdmissionMode.NONE,
            inline_tokens_max=section.inline_tokens_max,
            offline_share=section.offline_share,
        ),
        report_interval_s=section.report_interval_s,
        suspect_after_s=section.suspect_after_s,
        lease_s=section.lease_s,
        request_timeout_s=section.request_timeout_s,
        handover_margin_s=section.handover_margin_s,
        ttft_slo_s=section.ttft_slo_s,
        tbt_slo_s=section.tbt_slo_s,
    )
