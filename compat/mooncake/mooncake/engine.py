"""The names that programs import from Mooncake's module of this name."""

from mooncache.dropin.transfer_engine import MooncakeTransferEngine as TransferEngine
from mooncache.dropin.transfer_values import TransferNotify, TransferOpcode

__all__ = ["TransferEngine", "TransferNotify", "TransferOpcode"]
