"""Whose commands a node carries out: those of the newest leader, and only when they are meant for this life of it."""

from __future__ import annotations

from mooncache.client.terms import Terms
from mooncache.errors import NotLeader, StaleIncarnation
from mooncache.proto.v1 import store_node_pb2 as pb


def check_fence(terms: Terms, incarnation: int, fence: pb.Fence) -> None:
    """A command has to be for this life of this node, and from a master that no newer one has followed.

    Raises:
        StaleIncarnation: another node, or an earlier life of this one, is meant.
        NotLeader: a newer term than the command's was heard.
    """
    if fence.incarnation and fence.incarnation != incarnation:
        raise StaleIncarnation("The command is for another node, or for an earlier start of this one.")
    if not terms.obey(fence.term):
        raise NotLeader(
            f"The command comes from a master of term {fence.term}; a master of term {terms.newest} leads now."
        )
