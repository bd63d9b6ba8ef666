#!/bin/bash
# Health of the service in this container: 0 when its probe port answers 200 to GET /ready (or $1).
# Bash only, because a new Python every few seconds in every container would cost more than some services do.
exec 2>/dev/null
exec 3<>"/dev/tcp/127.0.0.1/${MOONCACHE_PROBE_PORT:-9100}" || exit 1
printf 'GET %s HTTP/1.0\r\n\r\n' "${1:-/ready}" >&3
read -r -t 3 _ status _ <&3
[ "$status" = 200 ]
