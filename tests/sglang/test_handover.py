"""KV from prefill ranks to decode ranks, by SGLang's own manager, sender, receiver and bootstrap server."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mooncache.auth import create_cluster_token
from mooncache.errors import ConfigInvalid
from tests.conditions import wait_until
from tests.sglang.package import need_sglang

need_sglang()

from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: E402

from mooncache.connectors.sglang.handover import inbox as inbox_module  # noqa: E402
from mooncache.connectors.sglang.handover import outbox as outbox_module  # noqa: E402
from tests.sglang import handover  # noqa: E402
from tests.sglang.handover import (  # noqa: E402
    PAGE,
    PAGES,
    RankUnderTest,
    Request,
    ended,
    fill,
    make_rank,
    reason,
    send_chunks,
    wait_for_room,
)

Make = Callable[..., RankUnderTest]
_rooms = itertools.count(1)


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a cluster of which only the token is needed."""
    folder = tmp_path_factory.mktemp("cluster")
    create_cluster_token(folder / "cluster.token")
    return folder


@pytest.fixture
def address(token: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """SGLang's own bootstrap server."""
    monkeypatch.setenv("MOONCACHE_STATE_DIR", str(token))
    port = handover.free_port()
    with handover.engine_process(port):
        from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

        server = get_kv_class(TransferBackend("mooncache"), KVClassType.BOOTSTRAP_SERVER)("127.0.0.1", port)
        yield f"127.0.0.1:{port}"
        server.close()


@pytest.fixture
def make(address: str) -> Iterator[Make]:
    """Makes ranks, and ends them."""
    del address
    made: list[RankUnderTest] = []

    def build(mode: str, **more: Any) -> RankUnderTest:
        made.append(make_rank(mode, **more))
        return made[-1]

    yield build
    for rank in reversed(made):
        rank.close()


def pair(make: Make, **more: Any) -> tuple[RankUnderTest, RankUnderTest]:
    """A prefill rank full of bytes and an empty decode rank."""
    prefill, decode = make("prefill", **more), make("decode", **more)
    fill(prefill, 1)
    return prefill, decode


def one_request(address: str, prefill: RankUnderTest, decode: RankUnderTest, **more: Any) -> tuple[Any, Any]:
    """Its sender and receiver, the pages [7, 3, 9] of prefill for [2, 5, 4] of decode, all sent."""
    request = Request(address, next(_rooms))
    sender = request.send(prefill)
    receiver = request.receive(decode, [2, 5, 4], **more)
    wait_for_room(sender)
    send_chunks(sender, [[7, 3], [9]])
    return sender, receiver


def empty(rank: RankUnderTest, pages: set[int]) -> bool:
    """Whether the other pages have only zeros."""
    return all(not page.any() for at in range(PAGES) if at not in pages for page in rank.page(at))


def equal(here: RankUnderTest, number: int, there: RankUnderTest, other: int) -> bool:
    return all(torch.equal(a, b) for a, b in zip(here.page(number), there.page(other), strict=True))


def test_pages_and_the_first_token_arrive(make: Make, address: str) -> None:
    prefill, decode = pair(make)
    prefill.metadata.output_ids[5, 0] = 4711
    request = Request(address, next(_rooms))
    sender = request.send(prefill)
    receiver = request.receive(decode, [2, 5, 4], row=3)
    wait_for_room(sender)
    send_chunks(sender, [[7, 3], [9]], row=5)
    assert ended(receiver) == KVPoll.Success
    assert ended(sender) == KVPoll.Success
    assert all(equal(prefill, a, decode, b) for a, b in ((7, 2), (3, 5), (9, 4)))
    assert empty(decode, {2, 5, 4})
    assert int(decode.metadata.output_ids[3, 0]) == 4711
    assert not decode.metadata.output_ids[[0, 1, 2, 4]].any()
    assert sender.get_transfer_metric().transfer_total_bytes == 3 * sum(prefill.manager.kv_args.kv_item_lens)
    for one in (sender, receiver):
        one.clear()


def test_a_prefix_that_decode_has_is_not_sent(make: Make, address: str) -> None:
    prefill, decode = pair(make)
    sender, receiver = one_request(address, prefill, decode)
    assert ended(receiver) == ended(sender) == KVPoll.Success
    request = Request(address, next(_rooms))
    sender = request.send(prefill)
    receiver = request.receive(decode, [])
    wait_for_room(sender)
    send_chunks(sender, [[]])
    assert ended(receiver) == ended(sender) == KVPoll.Success


def test_parcels_smaller_than_the_request(make: Make, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = PAGE * handover.HEADS * handover.HEAD_DIM * 2
    monkeypatch.setattr(outbox_module, "SLOT_BYTES", 2 * row)
    monkeypatch.setattr(outbox_module, "SLOTS", 2)
    prefill, decode = pair(make)
    request = Request(address, next(_rooms))
    sender = request.send(prefill)
    receiver = request.receive(decode, list(range(1, 21)))
    wait_for_room(sender)
    send_chunks(sender, [list(range(20, 8, -1)), list(range(8, 0, -1))])
    assert ended(receiver) == ended(sender) == KVPoll.Success
    assert all(equal(prefill, 21 - at, decode, at) for at in range(1, 21))
    assert empty(decode, set(range(1, 21)))


def whole_model(heads: int) -> list[torch.Tensor]:
    """KV of all heads, for each buffer [tokens, heads, dim]."""
    maker = torch.Generator().manual_seed(5)
    shape = (PAGE * PAGES, heads, handover.HEAD_DIM)
    return [torch.rand(shape, generator=maker).half() for _ in range(2 * handover.LAYERS)]


def heads_of(ranks: int, rank: int, heads: int) -> slice:
    """SGLang's own rule: which heads a rank has."""
    each = max(1, heads // ranks)
    first = rank * each if ranks <= heads else rank // (ranks // heads)
    return slice(first, first + each)


@pytest.mark.parametrize(
    ("prefills", "decodes", "heads"), [(2, 2, 4), (2, 1, 4), (1, 2, 4), (4, 2, 2), (2, 4, 2), (4, 1, 4)]
)
def test_ranks_of_other_numbers(make: Make, address: str, prefills: int, decodes: int, heads: int) -> None:
    whole = whole_model(heads)
    senders = [make("prefill", ranks=prefills, rank=at, heads=heads) for at in range(prefills)]
    receivers = [make("decode", ranks=decodes, rank=at, heads=heads) for at in range(decodes)]
    for at, rank in enumerate(senders):
        for mine, all_heads in zip(rank.buffers(), whole, strict=True):
            mine[: PAGE * PAGES] = all_heads[:, heads_of(prefills, at, heads)]
    request = Request(address, next(_rooms))
    sending = [request.send(rank) for rank in senders]
    receiving = [request.receive(rank, [2, 5, 4]) for rank in receivers]
    for sender in sending:
        wait_for_room(sender)
        send_chunks(sender, [[7, 3], [9]])
    assert {ended(one) for one in [*sending, *receiving]} == {KVPoll.Success}
    for at, rank in enumerate(receivers):
        for here, there in ((7, 2), (3, 5), (9, 4)):
            for page, all_heads in zip(rank.page(there), whole, strict=True):
                wanted = all_heads[here * PAGE : (here + 1) * PAGE, heads_of(decodes, at, heads)]
                assert torch.equal(page, wanted.contiguous().view(torch.uint8))
        assert empty(rank, {2, 5, 4})


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_latent_kv_comes_from_one_rank(make: Make, address: str, prefills: int, decodes: int) -> None:
    senders = [make("prefill", ranks=prefills, rank=at, latent=True) for at in range(prefills)]
    receivers = [make("decode", ranks=decodes, rank=at, latent=True) for at in range(decodes)]
    for rank in senders:
        fill(rank, 3)
    request = Request(address, next(_rooms))
    sending = [request.send(rank) for rank in senders]
    receiving = [request.receive(rank, [2, 5, 4]) for rank in receivers]
    for sender in sending:
        wait_for_room(sender)
        send_chunks(sender, [[7, 3], [9]])
    assert {ended(one) for one in [*sending, *receiving]} == {KVPoll.Success}
    for rank in receivers:
        assert all(equal(senders[0], a, rank, b) for a, b in ((7, 2), (3, 5), (9, 4)))


@pytest.mark.parametrize("kind", ["mamba", "swa", "dsa"])
def test_states_go_with_the_last_pages(make: Make, address: str, kind: str) -> None:
    prefill, decode = pair(make, states=kind)
    request = Request(address, next(_rooms))
    sender = request.send(prefill)
    receiver = request.receive(decode, [2, 5], states=[[6, 1]])
    wait_for_room(sender)
    send_chunks(sender, [[7], [3]], states=[[4, 8]])
    assert ended(receiver) == ended(sender) == KVPoll.Success
    for here, there in zip(prefill.states, decode.states, strict=True):
        assert torch.equal(there[[6, 1]], here[[4, 8]])
        assert not there[[0, 2, 3, 4, 5, 7, 8, 9]].any()


def test_a_state_that_is_missing_fails_the_request(make: Make, address: str) -> None:
    prefill, decode = pair(make, states="mamba")
    request = Request(address, next(_rooms))
    sender = request.send(prefill)
    receiver = request.receive(decode, [2], states=[[6, 1]])
    wait_for_room(sender)
    send_chunks(sender, [[7]], states=[[4]])
    assert ended(receiver) == ended(sender) == KVPoll.Failed
    assert "Component 0 has 1 rows here and 2 in the decode engine" in reason(receiver)


def test_engines_that_do_not_fit_fail_by_name(make: Make, address: str) -> None:
    prefill, decode = make("prefill", heads=4), make("decode", heads=2)
    sender, receiver = one_request(address, prefill, decode)
    assert ended(receiver) == ended(sender) == KVPoll.Failed
    assert "PASSPORT_MISMATCH" in reason(receiver) or "A row of a buffer has" in reason(receiver)
    assert empty(decode, set())


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Readers that have read a parcel and stand still before they put it into rows."""
    gate = SimpleNamespace(reached=threading.Event(), go_on=threading.Event())
    read = inbox_module.Inbox._read

    def slow(self: Any, *arguments: Any) -> None:
        read(self, *arguments)
        gate.reached.set()
        assert gate.go_on.wait(60)

    monkeypatch.setattr(inbox_module.Inbox, "_read", slow)
    yield gate
    gate.go_on.set()


@pytest.mark.parametrize("how", ["abort", "clear"])
def test_bytes_of_an_aborted_request_do_not_reach_the_next_one(
    make: Make, address: str, held: SimpleNamespace, how: str
) -> None:
    prefill, decode = pair(make)
    sender, receiver = one_request(address, prefill, decode)
    assert held.reached.wait(60)
    getattr(receiver, how)()
    for page in (2, 5, 4):  # SGLang gives the pages to another request
        for each in decode.page(page):
            each.fill_(1)
    held.go_on.set()
    assert ended(sender) == KVPoll.Failed
    assert "The decode side has ended the request" in reason(sender)
    assert all(bool((each == 1).all()) for page in (2, 5, 4) for each in decode.page(page))
    again = one_request(address, prefill, decode)
    assert [ended(one) for one in again] == [KVPoll.Success, KVPoll.Success]


def test_an_abort_of_prefill_ends_decode_at_once(make: Make, address: str, held: SimpleNamespace) -> None:
    prefill, decode = pair(make)
    sender, receiver = one_request(address, prefill, decode)
    assert held.reached.wait(60)
    sender.abort()
    assert ended(receiver) == KVPoll.Failed
    assert "The prefill side has aborted the request" in reason(receiver)
    held.go_on.set()
    sender.clear()
    wait_until(
        lambda: prefill.manager.outbox._slots.qsize() == outbox_module.SLOTS, "all staging memory is free"
    )


def test_damaged_bytes_are_found_and_reach_no_page(make: Make, address: str) -> None:
    prefill, decode = pair(make)
    announce = prefill.manager.outbox._announce

    def damage(destination: Any, note: Any) -> None:
        slot = (note.address - prefill.manager.outbox._region.address) // outbox_module.SLOT_BYTES
        prefill.manager.outbox._memory[slot][note.size_bytes // 2] ^= 1
        announce(destination, note)

    prefill.manager.outbox._announce = damage
    sender, receiver = one_request(address, prefill, decode)
    assert ended(receiver) == ended(sender) == KVPoll.Failed
    assert "other bytes than the prefill side has copied" in reason(receiver)
    assert "CHECKSUM_MISMATCH" in reason(sender)
    assert empty(decode, set())


def test_a_decode_rank_that_takes_nothing_costs_a_time_limit(
    make: Make, address: str, held: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCACHE_CONNECTOR_LOAD_TIMEOUT_S", "0.5")
    prefill, decode = pair(make)
    sender, _ = one_request(address, prefill, decode)
    assert held.reached.wait(60)
    assert ended(sender) == KVPoll.Failed
    assert "The decode side has taken nothing for 0.5 s" in reason(sender)
    assert prefill.manager.outbox._slots.qsize() == outbox_module.SLOTS


def test_sglangs_own_failure_injector(make: Make, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.disaggregation.utils import _poll_with_failure_injection

    prefill, decode = pair(make)
    monkeypatch.setenv("SGLANG_TEST_DISAGG_FAILURE_PROB", "0.03")
    random.seed(5)
    outcomes = []
    for _ in range(12):
        for page in (2, 5, 4):
            for each in decode.page(page):
                each.zero_()
        ends = one_request(address, prefill, decode)
        last: dict[int, int] = {}

        def step(ends: Any = ends, last: dict[int, int] = last) -> bool:
            """One look of both schedulers."""
            for at, status in enumerate(_poll_with_failure_injection(ends)):
                if last.get(at) not in (KVPoll.Success, KVPoll.Failed):
                    last[at] = status
                    if status == KVPoll.Failed:
                        ends[at].abort()
            return all(status in (KVPoll.Success, KVPoll.Failed) for status in last.values())

        wait_until(step, "both sides have ended the request")
        outcomes.append(last[1])
        if last[1] == KVPoll.Success:
            assert all(equal(prefill, a, decode, b) for a, b in ((7, 2), (3, 5), (9, 4)))
        for one in ends:
            one.clear()
        assert empty(decode, {2, 5, 4})
    assert KVPoll.Success in outcomes
    wait_until(
        lambda: prefill.manager.outbox._slots.qsize() == outbox_module.SLOTS, "all staging memory is free"
    )


def test_the_metadata_gate_and_the_reduction_of_sglang(make: Make, address: str) -> None:
    from sglang.srt.disaggregation.utils import _apply_metadata_gate

    prefill, decode = pair(make)
    sender, receiver = one_request(address, prefill, decode)
    assert ended(receiver) == ended(sender) == KVPoll.Success
    request = SimpleNamespace(bootstrap_host="127.0.0.1")
    waiting = [SimpleNamespace(req=request, metadata_buffer_index=0)]
    polls = [int(KVPoll.Success)]
    _apply_metadata_gate(polls, waiting, decode.metadata)
    assert polls == [int(KVPoll.Transferring)]  # prefill has written no first token into its row
    prefill.metadata.bootstrap_room[0, 0] = 1
    sender, receiver = one_request(address, prefill, decode)
    assert ended(receiver) == ended(sender) == KVPoll.Success
    polls = [int(KVPoll.Success)]
    _apply_metadata_gate(polls, waiting, decode.metadata)
    assert polls == [int(KVPoll.Success)]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"enable_pd_role_switch": True}, "--enable-pd-role-switch"),
        ({"enable_unified_memory": True}, "--enable-unified-memory"),
    ],
)
def test_settings_that_are_refused(
    token: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], name: str
) -> None:
    monkeypatch.setenv("MOONCACHE_STATE_DIR", str(token))
    with handover.engine_process(handover.free_port(), **fields), pytest.raises(ConfigInvalid, match=name):
        make_rank("decode")


def test_states_of_another_kind_are_refused(address: str) -> None:
    del address
    with pytest.raises(ConfigInvalid, match="states of the kind dsa_tail"):
        make_rank("decode", states="dsa_tail")


def test_without_a_cluster_token(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    del address
    monkeypatch.setenv("MOONCACHE_STATE_DIR", str(tmp_path))
    with pytest.raises(ConfigInvalid, match="token"):
        make_rank("decode")
