"""docs/grpc.md, followed by somebody who has the .proto files and plain grpcio: a plan, its report, its record."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import json
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mooncache
from mooncache import auth
from mooncache.errors import DecisionUnknown, PermissionDenied, Unauthenticated
from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.runtime import tls
from mooncache.runtime.certificates import make_certificates
from mooncache.runtime.grpc_channel import GrpcChannel
from mooncache.runtime.rpc import CONDUCTOR_SERVICE
from tests.conductor.support import CALM, Conductor, config_at, pair, running, serve
from tests.docs.blocks import ROOT, block, changed, environment, run_script
from tests.rpcs import health_of

EXAMPLES = ROOT / "docs" / "examples"
PAGE = ROOT / "docs" / "grpc.md"
VECTORS: dict[str, Any] = json.loads((EXAMPLES / "grpc_proof_vectors.json").read_text(encoding="utf-8"))
OURS = "python -c 'import mooncache; assert not hasattr(mooncache, \"connect\"), mooncache'\n"


def needs_compiler() -> None:
    # Looked for, not imported: it may not live in one process with NIXL, which other tests load.
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("grpcio-tools is not installed")


def client() -> ModuleType:
    spec = importlib.util.spec_from_file_location("grpc_client", EXAMPLES / "grpc_client.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_examples_use_generated_modules_and_nothing_else_of_ours() -> None:
    for path in sorted(EXAMPLES.glob("*.py")):
        modules = [
            node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        ours = {str(module) for module in modules if str(module).startswith("mooncache")}
        assert ours == {"mooncache.proto.v1"}, path


def test_the_proto_files_are_where_the_package_says() -> None:
    folder = Path(mooncache.get_proto_path()) / "mooncache" / "proto" / "v1"
    names = {path.name for path in folder.glob("*.proto")}
    assert names == {path.name for path in (ROOT / "protos" / "v1").glob("*.proto")}
    assert "conductor.proto" in names


@pytest.mark.parametrize("vector", VECTORS["calls"], ids=lambda vector: str(vector["what"]))
def test_the_example_makes_the_documented_proofs(vector: dict[str, Any]) -> None:
    module, answer = client(), vector["answer"]
    key = bytes.fromhex(vector["control_key"].rpartition(".")[2])
    head, _, mac = vector["authorization"].rpartition(" ")
    made = module.call_mac(key, head, vector["path"], bytes.fromhex(vector["request_hex"]))
    assert made.hex() == mac
    body = answer["details"].encode() if "details" in answer else bytes.fromhex(answer["response_hex"])
    sealed = module.answer_mac(key, made, answer["code"], answer["nonce"], body)
    assert answer["mooncache_proof"].rpartition(" ")[2] == sealed.hex()


def test_the_page_shows_one_of_the_vectors() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = dict(
        re.findall(r"^    (K|path|request|authorization|response|mooncache-proof) +(\S.*)$", page, re.M)
    )
    vector = VECTORS["calls"][1]
    assert shown == {
        "K": vector["control_key"].removeprefix("mck1."),
        "path": vector["path"],
        "request": vector["request_hex"],
        "authorization": vector["authorization"],
        "response": vector["answer"]["response_hex"],
        "mooncache-proof": vector["answer"]["mooncache_proof"],
    }


def test_a_plan_its_report_and_its_record_in_plain_grpcio(tmp_path: Path) -> None:
    """The page's commands as they stand, against a real conductor that has nonces to give."""
    needs_compiler()

    async def scenario(c: Conductor) -> None:
        await c.register(*pair())
        text = changed(
            block("docs/grpc.md", "PROTOS=$(python -c").text,
            {
                "grpc_client.py 127.0.0.1:7800": f"{EXAMPLES / 'grpc_client.py'} {c.service.grpc_target}",
                "--model tiny-model": "--model m",
                "PYTHONPATH=generated ": "export PYTHONPATH=generated; " + OURS,
            },
        )
        env = environment(MOONCACHE_CLUSTER_STATE_DIR=str(tmp_path))
        printed = json.loads(await asyncio.to_thread(run_script, text, tmp_path, env))
        assert printed["decode"] == "http://127.0.0.1:1/d"
        record = await c.record(printed["decision"])
        assert (record["decision_id"], record["state"]) == (printed["decision"], "finished")
        assert record["observed"]["output_tokens"] == 20

    serve(tmp_path, scenario)


def test_the_key_of_another_cluster_is_refused(tmp_path: Path) -> None:
    """The example tells who is wrong: here the caller, and not a stranger that answers for the conductor."""
    import grpc

    module = client()

    async def scenario(c: Conductor) -> None:
        def ask(key: str) -> int:
            with grpc.insecure_channel(c.service.grpc_target) as channel:
                caller = module.Caller(channel, key)
                with pytest.raises(module.CallError) as refused:
                    caller.call("GetDecision", pb.GetDecisionRequest(id="none"), pb.GetDecisionResponse)
                return int(refused.value.code)

        right = auth.control_key(c.service.token).text
        assert await asyncio.to_thread(ask, f"mck1.{'0' * 64}") == Unauthenticated.code
        assert await asyncio.to_thread(ask, right) == DecisionUnknown.code
        tenant = auth.control_key(auth.tenant_token(c.service.token, "team-a")).text
        assert await asyncio.to_thread(ask, tenant) == PermissionDenied.code

    serve(tmp_path, scenario)


def test_generated_stubs_and_a_bearer_token_over_tls(tmp_path: Path) -> None:
    needs_compiler()
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make certificates with")
    pki = make_certificates(tmp_path / "pki", ["localhost", "127.0.0.1"])[0]
    files = {f"tls.{name}_file": pki / f"{name}.pem" for name in ("ca", "cert", "key")}

    async def scenario() -> None:
        config = config_at(tmp_path, **{**CALM, **files, "tls.enabled": True})
        async with running(config) as c:
            await c.channel.close()
            c.channel = GrpcChannel(
                c.service.grpc_target,
                CONDUCTOR_SERVICE,
                token=c.service.token.text,
                credentials=tls.channel_credentials(config.tls),
            )
            await c.register(*pair())
            commands = block("docs/grpc.md", "PROTOS=$(python -c").text.splitlines()
            example = (
                f"{EXAMPLES / 'grpc_client_tls.py'} {c.service.grpc_target} control.key {pki / 'ca.pem'}"
            )
            text = "\n".join([*commands[:-1], f"PYTHONPATH=generated python {example}"])
            env = environment(MOONCACHE_CLUSTER_STATE_DIR=str(tmp_path))
            printed = await asyncio.to_thread(run_script, text, tmp_path, env)
            assert [line.split()[0] for line in printed.splitlines()] == ["d", "p"]

    asyncio.run(scenario())


def test_a_conductor_says_that_it_serves(tmp_path: Path) -> None:
    async def scenario(c: Conductor) -> None:
        for name in ("", "readiness", "liveness", CONDUCTOR_SERVICE.full_name):
            assert await health_of(c.service.grpc_target, name) == "SERVING"
        c.service.draining = True
        assert await health_of(c.service.grpc_target, CONDUCTOR_SERVICE.full_name) == "NOT_SERVING"
        assert await health_of(c.service.grpc_target, "liveness") == "SERVING"
        c.service.draining = False

    serve(tmp_path, scenario)
