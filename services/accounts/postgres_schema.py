"""The tables of accounts in PostgreSQL, as numbered steps: a database has carried out the first so many of them.

A step is never changed once it was released. Gateways of before go on beside a step that they do not know, as long as
it says so: `OLDEST` is how many steps a program has to know at least. A step that only adds tables, or columns with a
default, leaves it as it is.

Texts compare by their bytes (COLLATE "C"): rows come in the order that SQLite has, and no index depends on the locales
of a machine.
"""

from __future__ import annotations

from typing import Final

SCHEMA: Final = "mooncache"
LOCK_NUMBER: Final = 0x6D6F6F6E61636373  # "moonaccs": whoever changes tables holds this advisory lock

STEPS: Final[tuple[str, ...]] = (
    """
    CREATE TABLE account_change (topic TEXT PRIMARY KEY, token TEXT NOT NULL);
    INSERT INTO account_change (topic, token) VALUES
        ('keys', gen_random_uuid()::text), ('limits', gen_random_uuid()::text),
        ('spending', gen_random_uuid()::text), ('usage', gen_random_uuid()::text), ('audit', '');
    CREATE TABLE api_key (
        id TEXT COLLATE "C" PRIMARY KEY, tenant TEXT COLLATE "C" NOT NULL, name TEXT NOT NULL, scopes TEXT NOT NULL,
        sha256 BYTEA NOT NULL, created_s BIGINT NOT NULL, expires_s BIGINT NOT NULL, revoked_s BIGINT NOT NULL,
        requests_per_minute DOUBLE PRECISION NOT NULL, tokens_per_minute DOUBLE PRECISION NOT NULL,
        created_by TEXT NOT NULL
    );
    CREATE TABLE request_limit (
        tenant TEXT COLLATE "C" NOT NULL, key_id TEXT COLLATE "C" NOT NULL,
        requests_per_minute DOUBLE PRECISION NOT NULL, tokens_per_minute DOUBLE PRECISION NOT NULL,
        requests_under_way BIGINT NOT NULL, tokens_under_way BIGINT NOT NULL,
        money_per_month DOUBLE PRECISION NOT NULL, PRIMARY KEY (tenant, key_id)
    );
    CREATE TABLE spent (
        month BIGINT NOT NULL, holder TEXT COLLATE "C" NOT NULL, own DOUBLE PRECISION NOT NULL,
        others DOUBLE PRECISION NOT NULL, PRIMARY KEY (month, holder)
    );
    CREATE TABLE spending_writer (id TEXT PRIMARY KEY, sequence BIGINT NOT NULL, written_s BIGINT NOT NULL);
    CREATE TABLE ledger (id TEXT NOT NULL);
    CREATE TABLE usage (
        hour_s BIGINT NOT NULL, tenant TEXT COLLATE "C" NOT NULL, key_id TEXT COLLATE "C" NOT NULL,
        model TEXT COLLATE "C" NOT NULL, work_class TEXT COLLATE "C" NOT NULL, requests BIGINT NOT NULL,
        failed BIGINT NOT NULL, cancelled BIGINT NOT NULL, input_tokens BIGINT NOT NULL, cached_tokens BIGINT NOT NULL,
        output_tokens BIGINT NOT NULL, estimated_tokens BIGINT NOT NULL,
        PRIMARY KEY (hour_s, tenant, key_id, model, work_class)
    );
    CREATE TABLE usage_writer (id TEXT PRIMARY KEY, sequence BIGINT NOT NULL, written_s BIGINT NOT NULL);
    CREATE TABLE audit_entry (number BIGINT PRIMARY KEY, line BYTEA NOT NULL);
    """,
    "ALTER TABLE request_limit ADD COLUMN priority BIGINT NOT NULL DEFAULT 0",
)
OLDEST: Final = (1, 1)
"""For each step: how many steps a program has to know to use a database that has it."""
