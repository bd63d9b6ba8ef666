"""GetTokens: which cluster tokens a process accepts and proves, by fingerprint. Every control port answers it."""

from __future__ import annotations

from typing import Protocol

from mooncache.proto.v1 import process_pb2 as pb
from mooncache.runtime.live_tokens import LiveTokens
from mooncache.runtime.rpc import PROCESS_SERVICE, CallContext, RpcTable


class TokenHolder(Protocol):
    """A process, as far as its tokens go."""

    @property
    def tokens(self) -> LiveTokens: ...

    def token_uses(self) -> list[pb.TokenUse]: ...

    def engine_token(self) -> str: ...


def table(process: TokenHolder) -> RpcTable:
    """What every process answers, for its control port."""
    return RpcTable(PROCESS_SERVICE, process, {"GetTokens": handle}, admin_only=("GetTokens",))


def answer(process: TokenHolder) -> pb.GetTokensResponse:
    """What a process says of its tokens."""
    return pb.GetTokensResponse(
        tokens=process.token_uses(), problem=process.tokens.problem, engine_token=process.engine_token()
    )


async def handle(
    process: TokenHolder, request: pb.GetTokensRequest, context: CallContext
) -> pb.GetTokensResponse:
    """Answer by what is valid now."""
    return answer(process)
