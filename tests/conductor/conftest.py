"""What tests of conductors share with those of coordination."""

from tests.coordination.conftest import etcd, kubernetes

__all__ = ["etcd", "kubernetes"]
