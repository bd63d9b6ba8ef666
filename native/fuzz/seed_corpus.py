"""Write the seed corpora: for fuzz_wire one valid message for each decoder, in the order of kTargets; for fuzz_frames
streams of frames, each behind the length at which it is cut; for fuzz_disk one page of each kind; for fuzz_catalogue
rows of changes.

Usage: python native/fuzz/seed_corpus.py native/fuzz
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

KEY = bytes(range(32))
EXTENT = struct.pack("<QIIQQQ", 7, 0, 3, 2, 512, 4096)


def crc32c(data: bytes) -> int:
    """Bit by bit: slow and plainly right."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def counted(*items: bytes) -> bytes:
    return struct.pack("<I", len(items)) + b"".join(items)


def text(value: str) -> bytes:
    return struct.pack("<H", len(value)) + value.encode()


def frame(opcode: int, meta: bytes, payload_bytes: int = 0) -> bytes:
    head = struct.pack("<4sBBHQQI", b"MCK1", 1, opcode, 0, 1, payload_bytes, len(meta))
    return head + struct.pack("<I", crc32c(head + meta)) + meta


PUT = KEY + struct.pack("<QII", 4096, 1, 100)
RANGE = struct.pack("<QQII", 0, 4096, 1, 0)
GET_RESULT = struct.pack("<HBBIQQ", 0, 1, 0, 5, 4096, 4096)
HELLO = struct.pack("<HHI", 0, 1, 77) + KEY[:16] + text("default") + text("client") + text("0.1")
AUTH_RESPONSE = (
    KEY + struct.pack("<HIQ", 0, 0, 9) + text("node") + text("host") + struct.pack("<IIQ", 9, 9, 9)
)

SEEDS: list[tuple[str, bytes]] = [
    ("header", frame(3, counted(PUT), 4096)),
    ("lengths", counted(PUT, PUT)),
    ("status", struct.pack("<H", 200) + text("not here")),
    ("keys", counted(KEY, KEY)),
    ("grants", counted(struct.pack("<Q", 5), struct.pack("<Q", 6))),
    ("codes", counted(struct.pack("<H", 0), struct.pack("<H", 300))),
    ("match_response", struct.pack("<HII", 9, 2, 3) + b"\x0b\x00"),
    ("hello_request", HELLO),
    ("auth_request", KEY),
    ("reserve_request", struct.pack("<II", 1, 50) + KEY + struct.pack("<Q", 4096)),
    ("write_request", struct.pack("<Q", 5) + counted(RANGE)),
    ("pin_request", struct.pack("<I", 1000) + counted(KEY)),
    ("read_request", struct.pack("<QQQ", 5, 0, 4096)),
    ("list_request", struct.pack("<QI", 0, 100)),
    ("hello_response", KEY[:16]),
    ("auth_response", AUTH_RESPONSE),
    ("list_response", struct.pack("<Q", 0) + counted(KEY + struct.pack("<QB3xI", 4096, 1, 2))),
    ("node_stat_response", counted(text("blocks") + struct.pack("<Q", 3))),
    ("put_items", counted(PUT)),
    ("get_items", counted(KEY + struct.pack("<QQ", 0, 4096))),
    ("get_results", counted(GET_RESULT)),
    ("lookup_results", counted(struct.pack("<HBBIQ", 0, 1, 0, 5, 4096) + EXTENT)),
    ("reserve_items", counted(KEY + struct.pack("<Q", 4096))),
    ("reserve_results", counted(struct.pack("<HHI", 0, 0, 0) + EXTENT)),
    ("write_ranges", counted(RANGE)),
    ("commit_items", counted(struct.pack("<QII", 5, 1, 1))),
    ("stat_results", counted(struct.pack("<HBBIQIIQ", 0, 1, 0, 5, 4096, 1, 2, 30))),
    ("list_items", counted(KEY + struct.pack("<QB3xI", 4096, 1, 2))),
    ("segment_infos", counted(struct.pack("<IIQ", 0, 0, 1 << 20))),
    ("rdma_addresses", counted(struct.pack("<HHBBBBII", 0, 0, 2, 5, 16, 0, 17, 99) + KEY[:16])),
    ("exposures", counted(struct.pack("<HHIQ8I", 0, 0, 0, 512, *range(8)))),
    ("wait_request", struct.pack("<II", 5000, 20) + counted(KEY, KEY)),
    ("wait_news", struct.pack("<HI", 9, 1) + counted(struct.pack("<I", 0), struct.pack("<I", 8))),
    ("reserved_ranges", counted(struct.pack("<Q", 5) + RANGE, struct.pack("<Q", 6) + RANGE)),
]

ENGINE_RANGE = struct.pack("<QQ", 1 << 40, 4096)
DESCRIPTOR = (
    b"MCED"
    + struct.pack("<H", 1)
    + text("prefill-0")
    + text("host")
    + struct.pack("<Q", 9)
    + text("127.0.0.1")
    + struct.pack("<HB", 7900, 0)
    + text("/run/engine/socket")
    + counted(struct.pack("<QQB", 1 << 40, 1 << 20, 5) + text("kv"))
)
MAP_NODE = (
    struct.pack("<IQBBHQd", 3, 9, 0, 1, 7801, 1 << 30, 0.5)
    + text("node-3")
    + text("host")
    + text("127.0.0.1")
    + text("/run/node/socket")
    + text("memory")
    + struct.pack("<H", 1)
    + text("zone")
    + text("a")
)
MAP_PAGE = struct.pack("<QQII", 2, 5, 9, 7)
MAP_RECORD = struct.pack("<H", len(MAP_NODE)) + MAP_NODE
LATER_RECORD = struct.pack("<H", len(MAP_NODE) + 4) + MAP_NODE + b"more"
# Of decoders that have no seed before them: their numbers.
ENGINE_SEEDS: list[tuple[int, str, bytes]] = [
    (37, "engine_ranges", counted(ENGINE_RANGE, ENGINE_RANGE)),
    (38, "engine_writes", counted(ENGINE_RANGE + struct.pack("<I", 5))),
    (39, "open_ranges_request", struct.pack("<I", 1) + counted(ENGINE_RANGE)),
    (40, "mapped_region", struct.pack("<QQB", 1 << 40, 1 << 20, 1)),
    (41, "engine_descriptor", DESCRIPTOR + struct.pack("<I", crc32c(DESCRIPTOR))),
    (41, "engine_descriptor_body", DESCRIPTOR),
    (42, "cluster_map_request", struct.pack("<QQI", 2, 5, 7)),
    (43, "cluster_map_page", MAP_PAGE + counted(MAP_RECORD, LATER_RECORD)),
    (43, "cluster_map_known", struct.pack("<QQIII", 2, 5, 9, 0, 0)),
]

STREAM = frame(20, b"") + frame(4, counted(KEY + struct.pack("<QQ", 0, 4096))) + frame(20, b"")
STREAMS: list[tuple[str, bytes]] = [
    ("whole", bytes([0]) + STREAM),
    ("in_bytes", bytes([1]) + STREAM),
    ("in_pieces", bytes([31]) + STREAM),
    ("cut_off", bytes([7]) + STREAM[:-5]),
    ("refused", bytes([40]) + STREAM[:40] + STREAM),
]

# The first byte is the kind of page; with 0x80 the target puts its checksum right.
UUID = KEY[:16]
DISK: list[tuple[str, bytes]] = [
    (
        "superblock",
        b"\x80MOONSSD\n" + struct.pack("<I", 1) + UUID + struct.pack("<QI", 1 << 20, 16) + text("node-1"),
    ),
    ("segment", b"\x81" + struct.pack("<I", 0x47455343) + UUID + struct.pack("<Q", 7)),
    (
        "record",
        b"\x82"
        + struct.pack("<II", 0x43455243, 0)
        + UUID
        + struct.pack("<Q", 7)
        + KEY
        + struct.pack("<QII", 9, 64, 5),
    ),
    (
        "record_with_end",
        b"\x82"
        + struct.pack("<II", 0x43455243, 1_000_000 << 8)
        + UUID
        + struct.pack("<Q", 7)
        + KEY
        + struct.pack("<QII", 9, 64, 5),
    ),
    ("footer", b"\x83" + struct.pack("<I", 0x544F4643) + UUID + struct.pack("<QII", 7, 100, 5)),
]


def change(what: int, arena: int, slot: int, offset: int, size: int, value: int) -> bytes:
    return struct.pack("<BBHIII", what, arena, slot, offset, size, value)


# 0: a committed record, 1: a reserved one, 2: a byte of the catalogue, 3: a byte of the generations.
CATALOGUE: list[tuple[str, bytes]] = [
    ("record", change(0, 0, 5, 100, 500, 7) + change(1, 0, 9, 104, 900, 8)),
    ("bytes", change(2, 0, 0, 4096 + 96 * 8 + 3, 0, 255) + change(3, 0, 0, 16, 0, 1)),
    ("overlap", b"".join(change(number % 2, 0, number * 3, number * 7, 900, number) for number in range(20))),
]


def main(folder: Path) -> None:
    wire, frames, disk, catalogue = (
        folder / f"fuzz_{name}_corpus" for name in ("wire", "frames", "disk", "catalogue")
    )
    for corpus in (wire, frames, disk, catalogue):
        corpus.mkdir(parents=True, exist_ok=True)
    for name, changes in CATALOGUE:
        (catalogue / name).write_bytes(changes)
    for name, page in DISK:
        (disk / name).write_bytes(page)
    for number, (name, message) in enumerate(SEEDS):
        (wire / f"{number:02d}_{name}").write_bytes(bytes([number]) + message)
    for number, name, message in ENGINE_SEEDS:
        (wire / f"{number:02d}_{name}").write_bytes(bytes([number]) + message)
    for name, stream in STREAMS:
        (frames / name).write_bytes(stream)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
