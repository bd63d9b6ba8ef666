# etcd from the distribution, for deploy/docker-compose.yml. An etcd that you have already is as good.
ARG BASE_IMAGE=debian:12-slim
FROM ${BASE_IMAGE}
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends etcd-client etcd-server \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10002 --user-group --no-create-home --shell /usr/sbin/nologin etcd-user \
 && install -d -o etcd-user -g etcd-user -m 0700 /data
USER etcd-user
ENV ETCDCTL_API=3
ENTRYPOINT ["/usr/bin/etcd"]
