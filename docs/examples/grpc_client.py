"""A scheduler's client in plain grpcio: ask for a plan, report what became of it, read the decision.

It needs grpcio, protobuf and the modules that protoc makes of mooncache/proto/v1/*.proto, nothing else of Mooncache;
docs/grpc.md has the commands. Every call carries a proof of the control key, and every answer is checked for one.

    python grpc_client.py 127.0.0.1:7800 control.key --model tiny-model
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import itertools
import json
import secrets
import time
from pathlib import Path

import grpc

from mooncache.proto.v1 import conductor_pb2 as pb

SERVICE = "mooncache.v1.ConductorService"
ATTEMPTS = 3  # one without a nonce, one with it, one more when the nonce changed in between
STALE = -1


class CallError(Exception):
    """What the service answered: a stable code (docs/reference-errors.md), or 0 for an error of gRPC itself."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


def call_mac(key: bytes, head: str, path: str, request: bytes) -> bytes:
    signed = b"mooncache call v1\0" + f"{head} {path}".encode() + b"\0" + hashlib.sha256(request).digest()
    return hmac.digest(key, signed, "sha256")


def answer_mac(key: bytes, mac: bytes, code: int, nonce: str, answer: bytes) -> bytes:
    signed = (
        b"mooncache answer v1\0" + mac + f"{code} {nonce}".encode() + b"\0" + hashlib.sha256(answer).digest()
    )
    return hmac.digest(key, signed, "sha256")


class Caller:
    """Calls one service; not for several threads at once."""

    def __init__(self, channel: grpc.Channel, control_key: str) -> None:
        scheme, _, rest = control_key.strip().partition(".")
        tenant, _, key = rest.rpartition(".")  # mck1.<key> of the cluster, mck1.<tenant>.<key> of a tenant
        if scheme != "mck1":
            raise SystemExit("this is no control key; `mooncache token --control` prints one")
        self._channel = channel
        self._who, self._key = tenant or "*", bytes.fromhex(key)
        self._session = secrets.token_hex(16)
        self._numbers = itertools.count(1)
        self._nonce = "-"  # the first answer brings one

    def call(self, method: str, request, response_class, timeout_s: float = 10.0):
        path = f"/{SERVICE}/{method}"
        data = (
            request.SerializeToString()
        )  # signed and sent as they are: serialising again may give other bytes
        send = self._channel.unary_unary(path, request_serializer=None, response_deserializer=None)
        deadline = time.monotonic() + timeout_s
        for _ in range(ATTEMPTS):
            head = f"mcp1 {self._who} {self._nonce} {self._session} {next(self._numbers)}"
            mac = call_mac(self._key, head, path, data)
            metadata = (("authorization", f"{head} {mac.hex()}"),)
            try:
                answer, ended = send.with_call(data, timeout=deadline - time.monotonic(), metadata=metadata)
            except grpc.RpcError as error:
                trailing, text = dict(error.trailing_metadata() or ()), error.details() or ""
                if self._proven(mac, STALE, text.encode(), trailing):
                    continue  # the nonce was old; nothing has been carried out
                code = int(trailing.get("mooncache-code", 0))
                # who does not share the key cannot prove anything, so this one error has no proof
                known = error.code() is grpc.StatusCode.UNAUTHENTICATED
                if code and not known and not self._proven(mac, code, text.encode(), trailing):
                    raise CallError(0, "the error comes from a stranger") from error
                raise CallError(code, f"{error.code().name}: {text}") from error
            if not self._proven(mac, 0, answer, dict(ended.trailing_metadata())):
                raise CallError(0, "the answer comes from a stranger")
            return response_class.FromString(answer)
        raise CallError(0, "every proof was rejected as stale")

    def _proven(self, mac: bytes, code: int, answer: bytes, trailing: dict[str, str]) -> bool:
        nonce, _, given = trailing.get("mooncache-proof", "").partition(" ")
        if not hmac.compare_digest(answer_mac(self._key, mac, code, nonce, answer).hex(), given):
            return False
        self._nonce = nonce
        return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", help="host:port of the conductor")
    parser.add_argument("key_file", type=Path, help="file with what `mooncache token --control` prints")
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    with grpc.insecure_channel(options.target) as channel:
        conductor = Caller(channel, options.key_file.read_text())
        request_id = secrets.token_hex(8)
        question = pb.ScheduleRequest(
            request_id=request_id,
            tenant="default",
            model=options.model,
            prompt_tokens=500,
            max_output_tokens=20,
        )
        plan = conductor.call("Schedule", question, pb.ScheduleResponse)
        if not plan.admitted:
            raise SystemExit(f"refused: {plan.message}; come back in {plan.retry_after_ms} ms")
        # here both legs would be sent to the engines: plan.prefill (where it has an instance) and plan.decode
        report = pb.ReportProgressRequest(
            decision_id=plan.decision_id,
            phase=pb.REQUEST_PHASE_FINISHED,
            elapsed_ms=120.0,
            output_tokens=20,
            code="OK",
        )
        conductor.call("ReportProgress", report, pb.ReportProgressResponse)
        found = conductor.call("GetDecision", pb.GetDecisionRequest(id=request_id), pb.GetDecisionResponse)
        record = json.loads(found.record_json)
    print(json.dumps({"decode": plan.decode.url, "summary": plan.summary, "decision": record["decision_id"]}))


if __name__ == "__main__":
    main()
