"""The store for asyncio: every call also as `async_<call>`, in a thread."""

from mooncache.dropin.async_store import MooncakeDistributedStoreAsync

__all__ = ["MooncakeDistributedStoreAsync"]
