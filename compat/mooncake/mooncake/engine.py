"""The names that programs import from Mooncake's module of this name."""

from mooncache.dropin.transfer_engine import MooncakeTransferEngine as TransferEngine
from mooncache.dropin.transfer_values import (
    SUPPORT_CUDA,
    SUPPORT_EFA,
    SUPPORT_HIP,
    SUPPORT_INTRA_NVLINK,
    SUPPORT_MNNVL,
    SUPPORT_MULTI_PROTOCOL,
    SUPPORT_MUSA,
    TransferNotify,
    TransferOpcode,
)

__all__ = [
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MULTI_PROTOCOL",
    "SUPPORT_MUSA",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
]
