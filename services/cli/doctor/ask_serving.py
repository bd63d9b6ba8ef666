"""Asks conductor and gateway what the checks of serving need, and reads the end of engines' logs."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from mooncache.auth import load_cluster_token
from mooncache.cli.common import Where
from mooncache.cli.doctor.core.facts import ServingFacts
from mooncache.client.options import ClientOptions
from mooncache.config import Config
from mooncache.errors import ConductorUnavailable, EngineUnavailable, MooncacheError, PermissionDenied
from mooncache.proto.v1 import conductor_pb2
from mooncache.runtime.tls import http_opener

LOG_TAIL_BYTES: Final = 16 << 10
_CALL_S: Final = 3.0
_ANSWER_S: Final = 0.5  # for the gateway's answer, behind what it does
_DECISIONS: Final = 200
_WITH_MISSES: Final = 16
_ANSWER_BYTES_MAX: Final = 4 << 20


async def ask_instances(where: Where, rows: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """The rows with `passport` (a digest of it, "" without one) and `software_version`."""
    channel = where.conductor_channel()
    try:
        answer = await channel.call(
            "ListInstances",
            conductor_pb2.ListInstancesRequest(),
            conductor_pb2.ListInstancesResponse,
            _CALL_S,
        )
    finally:
        await channel.close()
    known = {view.instance.instance_id: view.instance for view in answer.instances}
    found = []
    for row in rows:
        instance = known.get(str(row["instance_id"]))
        text = instance.passport_json if instance is not None else ""
        digest = sha256(text.encode()).hexdigest()[:16] if text else ""
        version = instance.software_version if instance is not None else ""
        found.append({**row, "passport": digest, "software_version": version})
    return tuple(found)


async def ask_decisions(where: Where) -> tuple[Mapping[str, Any], ...]:
    """Records of the last decisions, the newest first; the first of those that ended have their misses."""
    channel = where.conductor_channel()
    try:
        answer = await channel.call(
            "ListDecisions",
            conductor_pb2.ListDecisionsRequest(count=_DECISIONS),
            conductor_pb2.ListDecisionsResponse,
            _CALL_S,
        )
        records: list[dict[str, Any]] = [json.loads(text) for text in answer.records_json]
        ended = [record for record in records if record.get("state") == "finished"][:_WITH_MISSES]

        async def misses(record: dict[str, Any]) -> None:
            try:
                whole = await channel.call(
                    "GetDecision",
                    conductor_pb2.GetDecisionRequest(id=record["decision_id"]),
                    conductor_pb2.GetDecisionResponse,
                    _CALL_S,
                )
            except MooncacheError:
                return  # it was dropped meanwhile
            record["misses"] = json.loads(whole.record_json).get("misses", [])

        await asyncio.gather(*(misses(record) for record in ended))
    except (ValueError, KeyError) as error:
        raise ConductorUnavailable(f"It answered with a record that makes no sense ({error!r}).") from None
    finally:
        await channel.close()
    return tuple(records)


async def ask_agreement(
    where: Where, config: Config, serving: ServingFacts, timeout_s: float
) -> tuple[Mapping[str, Any], ...] | None:
    """How the first gateway that is known reads a prompt, and its engines, and what these loaded of each other's
    blocks. Raises MooncacheError."""
    urls = [serving.gateway_url, *(str(one["url"]) for one in serving.conductor.get("gateways", ()))]
    url = next((url for url in urls if url), "")
    if not url:
        raise EngineUnavailable("no gateway is known here")
    options = ClientOptions.gather(**{**where.settings(), "master": where.master or "127.0.0.1:1"})
    token = load_cluster_token(config.cluster.token_path).text if not options.token else options.token
    wanted = {"read_back_ms": max(1, int((timeout_s - _ANSWER_S) * 1e3))}
    asked = json.dumps(wanted).encode()
    body = await asyncio.to_thread(_post, f"{url}/agreement", asked, token, config, timeout_s)
    try:
        models = [
            {
                "model": str(model["model"]),
                "prompt_tokens": int(model["prompt_tokens"]),
                "block_tokens": int(model["block_tokens"]),
                "reason": str(model["reason"]),
                "instances": [
                    {
                        "instance_id": str(one["instance_id"]),
                        "engine_tokens": int(one["engine_tokens"]),
                        "first_difference": int(one["first_difference"]),
                        "keys": [bytes.fromhex(key).hex() for key in one["keys"]],
                        "error": str(one["error"]),
                    }
                    for one in model["instances"]
                ],
                "read_backs": [_read_back(one) for one in model.get("read_backs", ())],
            }
            for model in json.loads(body)["models"]
        ]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise EngineUnavailable(f"the gateway's answer makes no sense ({error!r:.200})") from None
    return tuple(models)


def _read_back(said: Mapping[str, Any]) -> dict[str, Any]:
    """As the gateway says it. Raises ValueError, KeyError, TypeError."""
    kinds: dict[str, type] = {
        **dict.fromkeys(("writer", "reader", "outcome", "reason", "error"), str),
        **dict.fromkeys(("expected_tokens", "loaded_tokens", "local_tokens", "first_difference"), int),
        **dict.fromkeys(("waited_ms", "load_ms"), float),
    }
    return {name: kind(said[name]) for name, kind in kinds.items()}


def _post(url: str, asked: bytes, token: str, config: Config, timeout_s: float) -> bytes:
    request = urllib.request.Request(  # noqa: S310  (the cluster's own gateway, by http or https)
        url,
        data=asked,
        headers={"Authorization": f"Bearer {token}", "Content-Type": "application/json"},
        method="POST",
    )
    try:
        with http_opener(url, config.tls).open(request, timeout=timeout_s) as answer:
            data: bytes = answer.read(_ANSWER_BYTES_MAX)
            return data
    except urllib.error.HTTPError as error:
        if error.code in {401, 403}:
            raise PermissionDenied("the gateway wants the cluster token for it") from None
        if error.code == 404:
            raise EngineUnavailable("the gateway is of an earlier version, which has no such call") from None
        raise EngineUnavailable(f"the gateway answered {error.code}") from None
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise EngineUnavailable(f"the gateway at {url} does not answer ({reason})") from None


def engine_logs(state_dir: Path, names: Iterable[str]) -> dict[str, str]:
    """The last bytes of the logs of engines that run on this machine, and of their workers."""
    found = {}
    for name in names:
        text = "".join(_tail(state_dir / "logs" / file) for file in (f"{name}.log", f"{name}.engine.log"))
        if text:
            found[name] = text
    return found


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_TAIL_BYTES))
            return file.read(LOG_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
