"""Memory of this process that other engines read and write in batches of ranges, without a store between them."""

from mooncache.transfer.engine import TransferEngine
from mooncache.transfer.peer import EnginePeer, Notification, RangeTransfer, RemoteRegion
from mooncache.transfer.region import EngineRegion

__all__ = [
    "EnginePeer",
    "EngineRegion",
    "Notification",
    "RangeTransfer",
    "RemoteRegion",
    "TransferEngine",
]
