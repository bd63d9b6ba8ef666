"""What a port itself counts of trouble: the kernel's counters of the RDMA device, read on demand.

Devices name and choose their counters freely, so only names that are known here are read; a device has those that it
has. A counter that cannot be read is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mooncache.topology.sysfs import Sysfs

# folder of the port -> names. All of them stand still on a healthy, quiet network but the four of congestion.
TROUBLE: Final[Mapping[str, tuple[str, ...]]] = {
    "hw_counters": (
        "duplicate_request",
        "implied_nak_seq_err",
        "local_ack_timeout_err",
        "out_of_buffer",
        "out_of_sequence",
        "out_of_seq_request",
        "packet_seq_err",
        "rcvd_rnr_err",
        "rcvd_seq_err",
        "req_cqe_error",
        "req_remote_access_errors",
        "resp_cqe_error",
        "retrans_pkts",
        "retrans_timeout_events",
        "retry_exceeded_err",
        "retry_rnr_exceeded_err",
        "rnr_nak_retry_err",
        "roce_adp_retrans",
        "roce_adp_retrans_to",
        "roce_slow_restart",
        "send_err",
        "send_rnr_err",
        "completer_retry_err",
        "np_cnp_sent",
        "np_ecn_marked_roce_packets",
        "rp_cnp_handled",
    ),
    "counters": (
        "link_downed",
        "link_error_recovery",
        "local_link_integrity_errors",
        "port_rcv_errors",
        "port_xmit_discards",
        "port_xmit_wait",
        "symbol_error",
    ),
}


def trouble_of(device: str, port: int, root: Path = Path("/")) -> dict[str, int]:
    """The known counters of a port, by name. Raises nothing; empty where the kernel shows none."""
    files = Sysfs(root)
    found = {}
    for folder, names in TROUBLE.items():
        for name in names:
            text = files.text("sys", "class", "infiniband", device, "ports", str(port), folder, name)
            if text.isdigit():
                found[name] = int(text)
    return found
