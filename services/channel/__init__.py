"""How services call each other: the Channel protocol, over gRPC in production and in memory in tests."""

from mooncache.channel.base import Channel
from mooncache.channel.grpc_channel import GrpcChannel
from mooncache.channel.memory import MemoryChannel, MemoryNetwork, NetworkFaults

__all__ = ["Channel", "GrpcChannel", "MemoryChannel", "MemoryNetwork", "NetworkFaults"]
