"""Cluster descriptions: what is written is read back, and what is wrong is said with field, value and unit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncache.errors import ClusterInvalid, ModelTooLarge, ProfileInvalid
from mooncache.simulate import (
    LLAMA3_70B_8XA800,
    ClusterSpec,
    InstanceGroup,
    ScheduledEvent,
    Slo,
    paper_cluster,
)
from mooncache.simulate.cluster import Replication, RoleSwitching
from mooncache.simulate.description import parse, read, to_toml

GROUPS = st.builds(
    InstanceGroup,
    role=st.sampled_from(["prefill", "both", "decode"]),
    count=st.integers(1, 300),
    dram_blocks=st.integers(0, 10**6),
    ssd_blocks=st.integers(0, 10**6),
    nic_in_gbps=st.floats(0.1, 3200),
    fetch_latency_s=st.floats(0, 1),
    eviction=st.sampled_from(["lru", "fifo"]),
    sequences_max=st.integers(0, 1000),
    chunk_tokens=st.integers(1, 10_000),
    profile=st.sampled_from([None, LLAMA3_70B_8XA800, replace(LLAMA3_70B_8XA800, name="other", gpus=16)]),
)


@settings(max_examples=60, deadline=None)
@given(
    GROUPS,
    st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), max_size=20),
    st.builds(Slo, st.floats(0.1, 100), st.floats(0.001, 1)),
    st.booleans(),
    st.sampled_from([LLAMA3_70B_8XA800, replace(LLAMA3_70B_8XA800, name="mine")]),
)
def test_what_is_written_is_read_back(
    group: InstanceGroup, name: str, slo: Slo, on: bool, profile: object
) -> None:
    spec = ClusterSpec(
        instances=(replace(group, name="first"), InstanceGroup("decode", 2)),
        name=name,
        slo=slo,
        roles=RoleSwitching(enabled=on),
        replication=Replication(enabled=on),
        profile=profile,  # type: ignore[arg-type]
        events=(ScheduledEvent(3.0, "fail", "decode-1"), ScheduledEvent(4.0, "role", "first-0", "both")),
    ).check()
    assert parse(to_toml(spec)) == spec


def test_the_papers_cluster() -> None:
    spec = parse(to_toml(paper_cluster(8, 8)))
    assert spec == paper_cluster(8, 8).check()
    assert spec.count == 16
    assert spec.names()[8] == "decode-0"


def test_files_and_profiles_beside_them(tmp_path: Path) -> None:
    (tmp_path / "model.toml").write_text(f'base = "{LLAMA3_70B_8XA800.name}"\nweights_bytes = 1e9\n')
    (tmp_path / "small.toml").write_text('profile = "model.toml"\n[[instances]]\nrole = "both"\ncount = 2\n')
    spec = read(tmp_path / "small.toml")
    assert spec.name == "small"
    assert spec.profile.weights_bytes == 1e9
    with pytest.raises(ClusterInvalid, match="cannot be read"):
        read(tmp_path / "absent.toml")


BOTH = '[[instances]]\nrole = "both"\ncount = 2\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x =", "not TOML"),
        ("", "instances is missing"),
        ("instances = 3", r"write \[\[instances\]\]"),
        (BOTH + "dram_block = 3", "did you mean dram_blocks"),
        ("pol = 3\n" + BOTH, "did you mean pool"),
        ('pool = "remote"\n' + BOTH, "choose one of global, local"),
        ('[[instances]]\nrole = "both"', "count is missing"),
        (BOTH + "nic_in_gbps = 0", "nic_in_gbps is 0.0 Gbps.*no data would ever move"),
        (BOTH + "nic_out_gbps = nan", "nic_out_gbps is nan.*finite number of Gbps"),
        (BOTH + "nic_efficiency = 87.0", "share of the line rate is at most 1"),
        (BOTH + "dram_blocks = -1", "dram_blocks is -1 blocks"),
        (BOTH + "dram_blocks = 1.5", "dram_blocks is 1.5: it has to be a whole number"),
        (BOTH + 'dram_blocks = "1"', "has to be a whole number"),
        (BOTH + 'eviction = "clairvoyant"', "eviction"),
        (BOTH + "pipeline_size = 4", "the group has 2"),
        (BOTH + "pipeline_size = 2", "only prefill instances"),
        (BOTH + BOTH, "two groups are called both"),
        ('[[instances]]\nrole = "prefill"\ncount = 2\n', "no group decodes"),
        ('[[instances]]\nrole = "decoder"\ncount = 2\n', "role is 'decoder'"),
        (BOTH + "[slo]\nttft_s = 0", "slo.ttft_s is 0.0 s"),
        (BOTH + "[slo]\ntbt_s = 100", "tbt_s is 100 s: more than 10 s looks like milliseconds"),
        (BOTH + "nic_in_gbps = 1e11", "looks like Mbps or bytes/s"),
        (BOTH + "[slo]\ntbt_s = inf", "slo.tbt_s is inf"),
        (BOTH + '[[events]]\nat_s = 1\nkind = "fail"\ninstance = "both-2"', "no instance has this name"),
        (BOTH + '[[events]]\nat_s = 1\nkind = "join"\ninstance = "both-1"', "names a group"),
        (BOTH + '[[events]]\nat_s = -1\nkind = "fail"\ninstance = "both-1"', r"events\[1\].at_s is -1.0 s"),
        (BOTH + '[[events]]\nat_s = 1\nkind = "role"\ninstance = "both-1"', "role is ''"),
    ],
)
def test_impossible_clusters(text: str, words: str) -> None:
    with pytest.raises(ClusterInvalid, match=words):
        parse(text)


def test_models_that_do_not_fit() -> None:
    with pytest.raises(ModelTooLarge, match=r"weights_bytes is 900\.0 GB"):
        parse(f'{BOTH}[profile]\nbase = "{LLAMA3_70B_8XA800.name}"\nweights_bytes = 9e11\n')
    with pytest.raises(ModelTooLarge, match="kv_capacity_tokens is 2000000 tokens"):
        parse(BOTH + "kv_capacity_tokens = 2000000")
    with pytest.raises(ProfileInvalid, match="did you mean"):
        parse('profile = "llama3-70b-8xa80"\n' + BOTH)
