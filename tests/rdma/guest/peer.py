"""Runs inside the test machine: a peer made of pyverbs and sockets reads and writes what a node grants it.

Nothing of the product is used: Debian's Python, its pyverbs, and the wire format as `speaker` spells it. Each
line of output names one thing that was tried and what came of it.
"""

from __future__ import annotations

import struct
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR
from speaker import (
    ADDRESS,
    COMMIT,
    ENDPOINT,
    EXPOSE,
    EXPOSURE,
    GET,
    LOOKUP,
    ONE_SIDED,
    PUT,
    RELEASE,
    RESERVE,
    Connection,
    crc32c,
)

DEVICE, PORT, SECRET = "rxa0", 7801, bytes(range(32))
SIZE = 100_000
FIRST_PACKET, MTU, ROCE_V2 = 77, 3, 2
PATIENCE_S = 20.0


@dataclass
class Grant:
    number: int
    address: int
    key: int
    crc: int = 0


class Peer:
    """One connection with one queue pair of ours behind it."""

    def __init__(self, context: Context, pd: PD) -> None:
        self.context, self.pd = context, pd
        self.gid_index, self.gid = routable_gid()
        self.wire = Connection(PORT, SECRET)
        self.memory = MR(pd, SIZE + 4096, e.IBV_ACCESS_LOCAL_WRITE)
        self.meet()

    def meet(self) -> None:
        """A new queue pair; the old one is of no use after an error."""
        self.cq = CQ(self.context, 8)
        capacity = QPCap(max_send_wr=4, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        self.qp = QP(self.pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=capacity))
        mine = ADDRESS.pack(0, 0, ROCE_V2, MTU, 1, 0, self.qp.qp_num, FIRST_PACKET, self.gid)
        body, _ = self.wire.call(ENDPOINT, struct.pack("<I", 1) + mine)
        code, _, _, mtu, reads, _, number, packet, raw = ADDRESS.unpack_from(body, 4)
        assert code == 0, f"ENDPOINT: {code}"
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = 0
        self.qp.to_init(attributes)
        hexes = raw.hex()
        remote = GID(":".join(hexes[i : i + 4] for i in range(0, 32, 4)))
        route = GlobalRoute(dgid=remote, sgid_index=self.gid_index)
        attributes.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
        attributes.dest_qp_num, attributes.rq_psn = number, packet
        attributes.path_mtu, attributes.max_dest_rd_atomic = min(mtu, MTU), 1
        attributes.min_rnr_timer = 12
        self.qp.to_rtr(attributes)
        attributes.sq_psn, attributes.timeout, attributes.retry_cnt = FIRST_PACKET, 16, 6
        attributes.rnr_retry, attributes.max_rd_atomic = 6, min(reads, 1)
        self.qp.to_rts(attributes)

    def move(self, opcode: int, grant: Grant, length: int, offset: int = 0) -> str:
        """What the device says: "success", or the error's name."""
        request = SendWR(opcode=opcode, num_sge=1, sg=[SGE(self.memory.buf, length, self.memory.lkey)])
        request.set_wr_rdma(grant.key, (grant.address + offset) % (1 << 64))
        self.qp.post_send(request)
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            count, found = self.cq.poll(1)
            if count:
                names = {getattr(e, n): n for n in dir(e) if n.startswith("IBV_WC_") and "_ERR" in n}
                return "success" if found[0].status == e.IBV_WC_SUCCESS else names[found[0].status]
        return "nothing"

    def read(self, grant: Grant, length: int = SIZE, offset: int = 0) -> str:
        return self.move(e.IBV_WR_RDMA_READ, grant, length, offset)

    def write(self, grant: Grant, length: int = SIZE, offset: int = 0) -> str:
        return self.move(e.IBV_WR_RDMA_WRITE, grant, length, offset)

    def look_up(self, key: bytes) -> Grant:
        body, _ = self.wire.call(LOOKUP, struct.pack("<I", 1) + key, flags=EXPOSE)
        code, _, _, crc, size, number = struct.unpack_from("<HBBIQQ", body, 4)
        exposed = EXPOSURE.unpack_from(body, 4 + 56 + 4)
        assert (code, exposed[0], size) == (0, 0, SIZE)
        return Grant(number, exposed[3], exposed[4], crc)

    def reserve(self, key: bytes) -> Grant:
        meta = struct.pack("<II", 1, 0) + key + struct.pack("<Q", SIZE)
        body, _ = self.wire.call(RESERVE, meta, flags=EXPOSE)
        code, _, _, number = struct.unpack_from("<HHIQ", body, 4)
        exposed = EXPOSURE.unpack_from(body, 4 + 48 + 4)
        assert (code, exposed[0]) == (0, 0)
        return Grant(number, exposed[3], exposed[4])

    def release(self, grant: Grant) -> None:
        self.wire.call(RELEASE, struct.pack("<IQ", 1, grant.number))


def routable_gid() -> tuple[int, bytes]:
    """Index and bytes of the first RoCE v2 GID that holds an IPv4 address."""
    port = Path("/sys/class/infiniband") / DEVICE / "ports" / "1"
    for index in range(16):
        raw = bytes.fromhex((port / "gids" / str(index)).read_text().strip().replace(":", ""))
        if raw[:12] != bytes(10) + b"\xff\xff":
            continue
        if "RoCE v2" in (port / "gid_attrs" / "types" / str(index)).read_text():
            return index, raw
    raise SystemExit("no routable GID")


def say(what: str, found: object) -> None:
    print(f"{what}: {found}", flush=True)


def main() -> None:
    context = Context(name=DEVICE)
    pd = PD(context)
    peer = Peer(context, pd)
    block, key = bytes(range(250)) * (SIZE // 250), b"k" * 32
    put = struct.pack("<I", 1) + key + struct.pack("<QII", SIZE, crc32c(block), 0)
    peer.wire.call(PUT, put, block)

    grant = peer.look_up(key)
    say("read", peer.read(grant))
    say("read the block's bytes", peer.memory.read(SIZE, 0) == block and grant.crc == crc32c(block))

    mine, written = b"w" * 32, block[::-1]
    room = peer.reserve(mine)
    peer.memory.write(written, SIZE)
    say("write", peer.write(room))
    commit = struct.pack("<IQII", 1, room.number, crc32c(written), ONE_SIDED)
    body, _ = peer.wire.call(COMMIT, commit)
    say("commit", struct.unpack_from("<IH", body)[1])
    _, stored = peer.wire.call(GET, struct.pack("<I", 1) + mine + struct.pack("<QQ", 0, SIZE))
    say("stored what was written", stored == written)

    # Each refusal costs both queue pairs; the grant lives on.
    say("write to what may be read", peer.write(grant, 16))
    peer.meet()
    say("read behind the end", peer.read(grant, 16, SIZE - 15))
    peer.meet()
    say("read before the begin", peer.read(grant, 16, -1))
    peer.meet()
    say("write after the commit", peer.write(room, 16))
    peer.meet()
    say("the grant still reads", peer.read(grant))

    other = Peer(context, pd)
    say("read by another connection", other.read(grant, 16))
    other.wire.close()

    peer.release(grant)
    say("read after the release", peer.read(grant, 16))
    peer.meet()
    again = peer.look_up(key)
    peer.memory.write(bytes(SIZE), SIZE)
    say("a new grant reads", peer.read(again) == "success" and peer.memory.read(SIZE, 0) == block)
    peer.wire.close()


if __name__ == "__main__":
    main()
    sys.exit(0)
