"""Tenant accounting."""

from __future__ import annotations

import pytest

from mooncache import errors
from mooncache.master.core.usage import TenantLedger


def ledger() -> TenantLedger:
    return TenantLedger(len, {"abc": 100})


def test_names_are_believed_only_when_their_hash_is_the_id() -> None:
    book = ledger()
    book.learn(4, "abcd")
    book.learn(9, "liar")
    assert book.names == {3: "abc", 4: "abcd"}


def test_rows_are_largest_first_with_quota_and_name() -> None:
    rows = ledger().rows({3: (50, 2), 8: (70, 1)})
    assert [(row.tenant_id, row.name, row.used_bytes, row.block_count, row.quota_bytes) for row in rows] == [
        (8, "", 70, 1, None),
        (3, "abc", 50, 2, 100),
    ]


def test_a_tenant_at_its_quota_gets_no_further_copies() -> None:
    book = ledger()
    book.refuse_over_quota(3, {3: (99, 1)})
    with pytest.raises(errors.QuotaExceeded):
        book.refuse_over_quota(3, {3: (100, 1)})
