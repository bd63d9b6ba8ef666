#!/bin/bash
# Health of the service in this container: 0 when its probe port answers 200 to GET /ready (or $1).
# Bash only, because a new Python every few seconds in every container would cost more than some services do; but bash
# speaks no TLS, and beyond loopback the port does when TLS is on.
exec 2>/dev/null
port=${MOONCACHE_PROBE_PORT:-9100} path=${1:-/ready}
case ${MOONCACHE_TLS_ENABLED:-} in
  true | True | 1 | yes | on)
    exec /opt/mooncache/bin/python -c '
import ssl, sys, urllib.request
url = f"https://127.0.0.1:{sys.argv[1]}{sys.argv[2]}"
context = ssl._create_unverified_context()  # this container asks itself, and nothing secret is sent
sys.exit(urllib.request.urlopen(url, timeout=3, context=context).status != 200)' "$port" "$path"
    ;;
esac
exec 3<>"/dev/tcp/127.0.0.1/$port" || exit 1
printf 'GET %s HTTP/1.0\r\n\r\n' "$path" >&3
read -r -t 3 _ status _ <&3
[ "$status" = 200 ]
