"""The classes that SGLang's P/D takes of a transfer backend: manager of a rank, sender and receiver of a request.

SGLang's own common classes keep the states of requests, find the ranks of the other side, watch it and count who is
done. Here are the messages between the ranks, and what moves the bytes.
"""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import (
    ABORT_TAG,
    AbortNotification,
    CommonKVBootstrapServer,
    CommonKVManager,
    CommonKVReceiver,
    CommonKVSender,
)
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_disagg, get_memory, get_parallel
from sglang.srt.utils.network import NetworkAddress, get_local_ip_auto

from mooncache.config import load
from mooncache.connectors.sglang.core.parcels import KV, METADATA, ParcelNote, ParcelTaken, Piece
from mooncache.connectors.sglang.core.ranks import RankLayout, Route, route
from mooncache.connectors.sglang.engine_passport import check_version
from mooncache.connectors.sglang.handover.buffers import EngineBuffers, RequestRows
from mooncache.connectors.sglang.handover.inbox import ENDED, Inbox
from mooncache.connectors.sglang.handover.outbox import (
    DECODE_NAME,
    PREFILL_NAME,
    Chunk,
    ChunkTarget,
    Destination,
    Outbox,
    metadata_rows,
)
from mooncache.errors import ConfigInvalid, InvalidArgument, PassportMismatch, Unauthenticated
from mooncache.runtime.logs import Event, get_logger
from mooncache.transfer import TransferEngine

JOIN: Final = b"MC_JOIN"
ROOM: Final = b"MC_ROOM"
PARCEL: Final = b"MC_PARCEL"
TAKEN: Final = b"MC_TAKEN"
STATUS: Final = b"MC_STATUS"
STATES: Final = frozenset({"mamba", "swa", "dsa"})
"""States whose rows go as they are."""
PAGED_STATES: Final = frozenset({"swa", "dsa"})
"""Of them those in pages, of which the two sides may have one more or less."""
_POLL_MS: Final = 200
_log = get_logger(__name__)


class _Join(msgspec.Struct, frozen=True):
    """A decode rank, as it introduces itself to a prefill rank."""

    host: str
    port: int
    layout: RankLayout


class _Announcement(msgspec.Struct, frozen=True):
    """A request that a decode rank has room for. `rows` is None: it needs nothing of this prefill rank."""

    room: int
    host: str
    port: int
    required_dst_info_num: int
    decode_prefix_len: int
    opening: int
    """Of the request on the decode rank: parcels that were meant for an earlier one of the same number are refused."""
    rows: dict[int, int] | None
    """How many rows of each component it has."""


@dataclass(slots=True)
class DecodeSide:
    """One decode rank of one request. The names are those that SGLang's common classes read."""

    endpoint: str
    dst_port: int
    required_dst_info_num: int
    is_dummy: bool
    opening: int
    rows: dict[int, int]

    @property
    def destination(self) -> Destination:
        """Where it listens."""
        return Destination(self.endpoint, self.dst_port)


class MooncacheKVManager(CommonKVManager):  # type: ignore[misc]
    """One rank of an engine with `--disaggregation-transfer-backend mooncache`.

    Raises:
        ConfigInvalid: a setting with which KV cannot be handed over, no cluster token, or another version of SGLang.
    """

    kv_status_msg_tag = STATUS
    kv_status_msg_carries_reason = True
    reports_transfer_latency = True

    def __init__(self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        check_version()
        refuse_unsupported(args)
        self._timeout_s = load().connector.load_timeout_s
        self._engine = open_engine(prefill=mode == DisaggregationMode.PREFILL)
        super().__init__(args, mode, server_args, is_mla_backend)
        self.layout = layout_of(args, self.attn_tp_size, self.attn_tp_rank, bool(is_mla_backend))
        device = get_device().device
        self._buffers = EngineBuffers(args, f"cuda:{args.gpu_id}" if device == "cuda" else "cpu")
        self._stopping = threading.Event()
        self.outbox: Outbox | None = None
        self.inbox: Inbox | None = None
        if mode == DisaggregationMode.PREFILL:
            self.outbox = self._make_outbox()
            self._descriptor = self._engine.describe(DECODE_NAME)
            self._routes: dict[Destination, Route | str] = {}
        else:
            self.inbox = Inbox(
                self._engine, self._buffers, answer=self._answer, failed=self._fail, timeout_s=self._timeout_s
            )
            self._start_heartbeat_checker_thread()
        receive = self._on_decode_message if self.inbox else self._on_prefill_message
        self._control = threading.Thread(
            target=self._serve, args=(receive,), name="mooncache-pd", daemon=True
        )
        self._control.start()

    def _make_outbox(self) -> Outbox:
        return Outbox(
            self._engine,
            self._buffers,
            reply_to=f"{self.local_ip}:{self.rank_port}",
            announce=self._announce,
            live=lambda room: self.request_status.get(room, KVPoll.Failed) != KVPoll.Failed,
            delivered=lambda room: self.conclude_transfer(bootstrap_room=room, status=KVPoll.Success),
            failed=lambda room, why: self.conclude_failure(bootstrap_room=room, failure_reason=why),
            timeout_s=self._timeout_s,
        )

    # --- messages -----------------------------------------------------------------------------------------------

    def _serve(self, receive: Any) -> None:
        poller = zmq.Poller()
        poller.register(self.server_socket, zmq.POLLIN)
        while not self._stopping.is_set():
            try:
                if poller.poll(_POLL_MS):
                    receive(self.server_socket.recv_multipart())
                if self.outbox:
                    self.outbox.sweep()
            except (msgspec.MsgspecError, ValueError, IndexError) as error:
                _log.warning(Event.CONNECTOR_DEFECT, code="PROTOCOL_ERROR", reason=str(error))
            except Exception as error:  # noqa: BLE001  (a message must not end the rank)
                _log.warning(Event.CONNECTOR_DEFECT, code="DEFECT", reason=str(error), exc_info=True)

    def _on_prefill_message(self, frames: list[bytes]) -> None:
        match frames[0]:
            case tag if tag == JOIN:
                self._join(msgspec.msgpack.decode(frames[1], type=_Join))
            case tag if tag == ROOM:
                self._open_room(msgspec.msgpack.decode(frames[1], type=_Announcement))
            case tag if tag == TAKEN and self.outbox:
                self.outbox.taken(msgspec.msgpack.decode(frames[1], type=ParcelTaken))
            case tag if tag == ABORT_TAG:
                notice = AbortNotification.from_zmq(frames)
                if (
                    notice is not None
                    and self.request_status.get(notice.room, KVPoll.Success) != KVPoll.Success
                ):
                    self.record_failure(notice.room, ENDED)
                    self.update_status(notice.room, KVPoll.Failed)

    def _on_decode_message(self, frames: list[bytes]) -> None:
        if frames[0] == PARCEL and self.inbox:
            self.inbox.offer(msgspec.msgpack.decode(frames[1], type=ParcelNote), frames[2])
            return
        parsed = self.parse_kv_status_message(frames)
        if parsed is not None:
            room, status, rank, reason = parsed
            self.apply_prefill_status(
                bootstrap_room=room, status=status, prefill_rank=rank, failure_reason=reason
            )

    def _join(self, message: _Join) -> None:
        destination = Destination(message.host, message.port)
        try:
            self._routes[destination] = route(self.layout, message.layout)
        except (PassportMismatch, InvalidArgument) as error:
            _log.warning(Event.CONNECTOR_OFF, code=error.name, reason=error.message)
            self._routes[destination] = str(error)

    def _open_room(self, message: _Announcement) -> None:
        side = DecodeSide(
            message.host,
            message.port,
            message.required_dst_info_num,
            message.rows is None,
            message.opening,
            message.rows or {},
        )
        sides = self.transfer_infos.setdefault(message.room, {})
        sides[f"{message.host}:{message.port}"] = side
        if len(sides) == message.required_dst_info_num:
            self.resolve_kv_replica_factor(sides)
            self.req_to_decode_prefix_len[message.room] = message.decode_prefix_len
            self.update_status(message.room, KVPoll.WaitingForInput)

    def _announce(self, destination: Destination, note: ParcelNote) -> None:
        self._send_to(destination, [PARCEL, msgspec.msgpack.encode(note), self._descriptor])

    def _answer(self, note: ParcelNote, answer: ParcelTaken) -> None:
        host, _, port = note.reply_to.rpartition(":")
        try:
            self._send_to(Destination(host, int(port)), [TAKEN, msgspec.msgpack.encode(answer)])
        except (zmq.ZMQError, ValueError) as error:
            _log.warning(Event.CONNECTOR_LOAD_FAILED, code="CONNECTION_LOST", reason=str(error))

    def _send_to(self, destination: Destination, frames: list[bytes]) -> None:
        address = NetworkAddress(destination.host, destination.port)
        self._send_multipart_locked(address.to_tcp(), frames, is_ipv6=address.is_ipv6)

    def build_receiver_registration_message(self) -> list[bytes]:
        """What a decode rank says first to a prefill rank."""
        return [JOIN, msgspec.msgpack.encode(_Join(self.local_ip, self.rank_port, self.layout))]

    def build_receiver_metadata_message(
        self,
        *,
        bootstrap_room: int,
        required_dst_info_num: int,
        kv_indices: Any,
        aux_index: int | None,
        state_indices: list[Any] | None,
        decode_prefix_len: int | None,
        is_dummy: bool,
        **_unused: Any,
    ) -> list[bytes]:
        """A request that this decode rank has room for; from now on its rows may be filled."""
        rows: dict[int, Any] = {KV: np.asarray(kv_indices), **metadata_rows(aux_index)}
        rows.update((at, np.asarray(each)) for at, each in enumerate(state_indices or []) if each is not None)
        assert self.inbox is not None
        opening = 0 if is_dummy else self.inbox.expect(bootstrap_room, rows)
        counts = {component: len(each) for component, each in rows.items()}
        message = _Announcement(
            bootstrap_room,
            self.local_ip,
            self.rank_port,
            required_dst_info_num,
            decode_prefix_len or 0,
            opening,
            None if is_dummy else counts,
        )
        return [ROOM, msgspec.msgpack.encode(message)]

    # --- sending ------------------------------------------------------------------------------------------------

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        *,
        wait_event: Any = None,
        indices_event: Any = None,
        trace_ctx: Any = None,
    ) -> None:
        """Send pages of a request; with the last ones its states and its first token."""
        if self.request_status.get(bootstrap_room, KVPoll.Failed) == KVPoll.Failed:
            return
        sides = [side for side in self.transfer_infos.get(bootstrap_room, {}).values() if not side.is_dummy]
        if not sides:  # nothing is needed of this rank: another one has the same KV
            if is_last_chunk:
                self.update_status(bootstrap_room, KVPoll.Success)
            return

        first = index_slice.start

        def rows() -> RequestRows:
            for event in (wait_event, indices_event):
                if event is not None:
                    event.synchronize()
            pages = np.asarray(kv_indices)
            found: dict[int, Any] = {KV: np.concatenate([np.full(first, -1, pages.dtype), pages])}
            found.update(metadata_rows(aux_index if is_last_chunk else None))
            found.update((at, each) for at, each in enumerate(state_indices or []) if each is not None)
            return {component: np.asarray(each) for component, each in found.items()}

        def targets(found: RequestRows) -> list[ChunkTarget]:
            return [
                ChunkTarget(side.destination, side.opening, self._pieces(side, found, first))
                for side in sides
            ]

        assert self.outbox is not None
        self.update_status(bootstrap_room, KVPoll.Transferring)
        try:
            self.outbox.put(Chunk(bootstrap_room, is_last_chunk, rows, targets))
        except queue.Full:
            self.conclude_failure(
                bootstrap_room=bootstrap_room, failure_reason="Too many chunks are waiting to be sent."
            )

    def _pieces(self, side: DecodeSide, rows: RequestRows, first_page: int) -> list[Piece]:
        found = self._routes.get(side.destination)
        if not isinstance(found, Route):
            raise PassportMismatch(found or "The decode rank has not introduced itself.")
        pieces: list[Piece] = []
        for component in sorted(rows, key=lambda one: (one == METADATA, one)):
            here, there = len(rows[component]), side.rows.get(component, 0)
            paged = component == KV or (component >= 0 and self.layout.state_kinds[component] in PAGED_STATES)
            if here != there and not paged:
                raise PassportMismatch(
                    f"Component {component} has {here} rows here and {there} in the decode engine."
                )
            first = first_page if component == KV else 0
            pieces += found.pieces(component, first=first, rows=max(0, min(here, there) - first))
        return pieces

    # --- ends ---------------------------------------------------------------------------------------------------

    def _fail(self, room: int, why: str) -> None:
        if room in self.request_status:
            self.record_failure(room, why)
            self.update_status(room, KVPoll.Failed)

    def deregister_buffer_to_engine(self) -> None:
        """SGLang gives the memory of its KV back for a while."""
        self._buffers.unmap()

    def register_buffer_to_engine(self) -> None:
        """It has it again."""
        self._buffers.map()

    def teardown(self) -> None:
        """End threads and connections."""
        self._stopping.set()
        self._control.join()
        if self.inbox:
            self._heartbeat_shutdown.set()
            self.inbox.stop()
        if self.outbox:
            self.outbox.close()
        self._engine.close()
        MooncacheKVReceiver.close_all_sockets()
        self._zmq_ctx.destroy(linger=0)


class MooncacheKVSender(CommonKVSender):  # type: ignore[misc]
    """A request of a prefill rank. The decode ranks hear of its end at once, and not by a time limit."""

    def clear(self) -> None:
        """The request has ended."""
        super().clear()
        self.kv_mgr.outbox.forget(self.bootstrap_room)

    def abort(self) -> None:
        """End it."""
        self._tell("The prefill side has aborted the request.")
        super().abort()

    def failure_exception(self) -> None:
        """Raise why it failed."""
        self._tell("The prefill side has failed the request.")
        super().failure_exception()

    def _tell(self, why: str) -> None:
        manager, room = self.kv_mgr, self.bootstrap_room
        if manager.request_status.get(room, KVPoll.Success) != KVPoll.Success:
            targets = manager._room_notify_targets(room)
            manager.send_kv_status_message(
                targets=targets, bootstrap_room=room, status=KVPoll.Failed, failure_reason=why
            )


class MooncacheKVReceiver(CommonKVReceiver):  # type: ignore[misc]
    """A request of a decode rank. No byte moves into its rows once SGLang knows that it has failed or ended."""

    def abort(self) -> None:
        """End it, and say so to the prefill ranks."""
        super().abort()
        self.kv_mgr.inbox.close(self.bootstrap_room)

    def _poll(self) -> int:
        status: int = super()._poll()
        if status == KVPoll.Failed:
            self.kv_mgr.inbox.close(self.bootstrap_room)
        return status

    def _clear(self) -> None:
        self.kv_mgr.inbox.close(self.bootstrap_room)
        super()._clear()


class MooncacheKVBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """Where decode ranks find prefill ranks: SGLang's own."""


def layout_of(args: Any, ranks: int, rank: int, latent: bool) -> RankLayout:
    """What peers have to know of a rank's buffers."""
    return RankLayout(
        ranks=ranks,
        rank=rank,
        page_tokens=int(args.page_size),
        latent=latent,
        heads=0 if latent else int(getattr(args, "total_kv_head_num", 0) or 0),
        kv_row_bytes=tuple(map(int, args.kv_item_lens)),
        kv_layers=tuple(map(int, args.kv_layer_ids)),
        state_kinds=tuple(kind.value for kind in args.state_types),
        state_row_bytes=tuple(tuple(map(int, each)) for each in args.state_item_lens),
        state_layers=tuple(tuple(map(int, each)) for each in args.state_layer_ids),
        metadata_row_bytes=tuple(map(int, args.aux_item_lens)),
    )


def open_engine(*, prefill: bool) -> TransferEngine:
    """The transfer engine of a rank. Raises ConfigInvalid: there is no token of a cluster, or a tenant's."""
    try:
        if prefill:
            return TransferEngine(PREFILL_NAME, listen="0.0.0.0:0", advertise=get_local_ip_auto())
        return TransferEngine(DECODE_NAME, listen=None)
    except Unauthenticated as error:
        raise ConfigInvalid(
            f"The hand-over needs the token of a cluster, so that ranks can prove what they are: {error.message}"
        ) from None


def refuse_unsupported(args: Any) -> None:
    """Raises ConfigInvalid with all settings of this engine under which its KV cannot be handed over."""
    parallel, disagg = get_parallel(), get_disagg()
    states = sorted(kind.value for kind in args.state_types if kind.value not in STATES)
    found = {
        "--pp-size above 1": parallel.pp_size > 1,
        "--attn-cp-size above 1": parallel.attn_cp_size > 1,
        "--dcp-size above 1": parallel.attn_dcp_size > 1,
        "--enable-kv-cache-sharding": parallel.enable_kv_cache_sharding,
        "--enable-pd-role-switch": disagg.enable_pd_role_switch,
        "--enable-unified-memory": get_memory().enable_unified_memory,
        "--disaggregation-decode-allocation-policy other than early": (
            disagg.disaggregation_decode_allocation_policy != "early"
        ),
        "SGLANG_DISAGG_STAGING_BUFFER": envs.SGLANG_DISAGG_STAGING_BUFFER.get(),
        f"states of the kind {', '.join(states)}": states,
    }
    named = [name for name, given in found.items() if given]
    if named:
        raise ConfigInvalid(
            f"The transfer backend mooncache does not support {'; '.join(named)}. Take another backend for this engine."
        )
