"""Statuses of the error catalogue as gRPC's own, and back: the one place that knows both."""

from __future__ import annotations

import grpc

from mooncache.errors import GrpcStatus


def to_library(status: GrpcStatus) -> grpc.StatusCode:
    """The status as gRPC's library has it."""
    return grpc.StatusCode[status.name]


def of_library(status: grpc.StatusCode) -> GrpcStatus:
    """The status that gRPC's library reported, by its standard name."""
    return GrpcStatus(status.name)
