# What deploy/docker-compose.yml needs besides mooncache, from the distribution's packages. An etcd and a Prometheus that
# you have already are as good.
ARG BASE_IMAGE=debian:12-slim

FROM ${BASE_IMAGE} AS etcd
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends etcd-client etcd-server \
 && apt-get clean && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10002 --user-group --no-create-home --shell /usr/sbin/nologin etcd-user \
 && install -d -o etcd-user -g etcd-user -m 0700 /data
USER etcd-user
ENV ETCDCTL_API=3
ENTRYPOINT ["/usr/bin/etcd"]

FROM ${BASE_IMAGE} AS prometheus
# The user is that of the other images, because it reads the key of /metrics.
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends prometheus \
 && apt-get clean && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin mooncache \
 && install -d -o mooncache -g mooncache -m 0700 /data
USER mooncache
ENTRYPOINT ["/usr/bin/prometheus", "--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/data"]
CMD ["--storage.tsdb.retention.time=7d"]
