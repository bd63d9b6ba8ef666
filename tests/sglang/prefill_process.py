"""A prefill engine of one rank as a process: bootstrap server, manager, and a request whose KV it sends.

    python -m tests.sglang.prefill_process PORT ROOM whole|part

Prints "sent" when the pages of ROOM are handed to the sender, of which `part` leaves the last chunk out, and then the
status in which the request ends.
"""

from __future__ import annotations

import sys

from tests.sglang.package import need_sglang

need_sglang()

SEED = 11


def main(port: int, room: int, how: str) -> None:
    """Serve one request."""
    import numpy as np

    from tests.sglang import handover

    with handover.engine_process(port):
        from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

        server = get_kv_class(TransferBackend("mooncache"), KVClassType.BOOTSTRAP_SERVER)("127.0.0.1", port)
        rank = handover.make_rank("prefill")
        handover.fill(rank, SEED)
        sender = handover.Request(f"127.0.0.1:{port}", room).send(rank)
        handover.wait_for_room(sender)
        sender.init(3, 0)
        sender.send(np.array([7, 3], np.int32))
        if how == "whole":
            sender.send(np.array([9], np.int32))
        print("sent", flush=True)
        print(handover.ended(sender), flush=True)
        rank.close()
        server.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
