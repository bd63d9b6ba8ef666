"""The same with generated stubs, for a conductor with TLS: the control key is a bearer token, and nothing is signed.

python grpc_client_tls.py conductor.example:7800 control.key ca.pem
"""

from __future__ import annotations

import sys
from pathlib import Path

import grpc

from mooncache.proto.v1 import conductor_pb2 as pb
from mooncache.proto.v1 import conductor_pb2_grpc


def main() -> None:
    target, key_file, ca_file = sys.argv[1:]
    authorization = (("authorization", f"Bearer {Path(key_file).read_text().strip()}"),)
    credentials = grpc.ssl_channel_credentials(Path(ca_file).read_bytes())
    with grpc.secure_channel(target, credentials) as channel:
        conductor = conductor_pb2_grpc.ConductorServiceStub(channel)
        listed = conductor.ListInstances(pb.ListInstancesRequest(), timeout=10, metadata=authorization)
    for view in listed.instances:
        print(view.instance.instance_id, view.instance.model, view.instance.url)


if __name__ == "__main__":
    main()
