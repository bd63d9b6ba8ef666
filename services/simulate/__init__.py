"""The simulator: real policies over traces, on clusters that need not exist.

`simulate(trace, cluster, options)` gives a `Result`; the policies are the conductor's own.
"""

from mooncache.simulate.cluster import ClusterSpec, InstanceGroup, ScheduledEvent, Slo, paper_cluster
from mooncache.simulate.options import SimOptions
from mooncache.simulate.profile import LLAMA3_70B_8XA800, ModelProfile
from mooncache.simulate.result import Result
from mooncache.simulate.run import simulate

__all__ = [
    "LLAMA3_70B_8XA800",
    "ClusterSpec",
    "InstanceGroup",
    "ModelProfile",
    "Result",
    "ScheduledEvent",
    "SimOptions",
    "Slo",
    "paper_cluster",
    "simulate",
]
