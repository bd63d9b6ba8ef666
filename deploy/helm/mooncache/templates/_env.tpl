{{/* {root, own, config}: the environment of a container as a list. `own` is what the chart says for this component; the
operator's settings come beside it and never instead of it. */}}
{{- define "mooncache.env" -}}
{{- $values := .root.Values -}}
{{- $chart := dict
  "MOONCACHE_CLUSTER_MASTER_TARGETS" (include "mooncache.masterTargets" .root)
  "MOONCACHE_CLUSTER_CONDUCTOR_TARGET" (include "mooncache.conductorTargets" .root)
  "MOONCACHE_CLUSTER_STATE_DIR" "/var/lib/mooncache"
  "MOONCACHE_CLUSTER_TOKEN_FILE" "/run/mooncache/secret/cluster.token"
  "MOONCACHE_METRICS_HOST" "0.0.0.0"
  "MOONCACHE_LOGGING_LEVEL" $values.logLevel
  "MOONCACHE_LOGGING_FORMAT" "json"
  "MOONCACHE_TRACING_ENDPOINT" $values.tracingEndpoint
  "MOONCACHE_TLS_ENABLED" (toString $values.tls.enabled)
  "MOONCACHE_TLS_INSECURE" (toString $values.tls.insecure)
  "MOONCACHE_RDMA_ENABLED" (toString $values.rdma.enabled)
-}}
{{- if $values.tls.enabled -}}
{{- $chart = merge $chart (dict
  "MOONCACHE_TLS_CERT_FILE" "/run/mooncache/secret/tls.crt"
  "MOONCACHE_TLS_KEY_FILE" "/run/mooncache/secret/tls.key"
  "MOONCACHE_TLS_CA_FILE" "/run/mooncache/secret/ca.crt"
  "MOONCACHE_TLS_REQUIRE_CLIENT_CERT" (toString $values.tls.requireClientCert)
  "MOONCACHE_TLS_SERVER_NAME" (include "mooncache.serverName" .root)
) -}}
{{- end -}}
{{- if $values.sharedMemory.hostPath -}}
{{- $chart = merge $chart (dict "MOONCACHE_CLIENT_HOST_ID" "$(NODE_NAME)") -}}
{{- else -}}
{{- $chart = merge $chart (dict "MOONCACHE_CLIENT_SHM_ENABLED" "false") -}}
{{- end -}}
{{- $chart = merge $chart .own -}}
{{- $asked := merge (deepCopy (default dict .config)) (deepCopy $values.config) -}}
{{- range $section, $fields := $asked -}}
{{- range $field, $value := $fields -}}
{{- $name := printf "MOONCACHE_%s_%s" (upper $section) (upper $field) -}}
{{- if hasKey $chart $name -}}
{{- fail (printf "config.%s.%s is set by the chart: use its own value for it (see values.yaml)." $section $field) -}}
{{- end -}}
{{- if kindIs "slice" $value -}}
{{- $_ := set $chart $name (join "," $value) -}}
{{- else if kindIs "float64" $value -}}
{{- $_ := set $chart $name (ternary (printf "%.0f" $value) (toString $value) (eq (floor $value) $value)) -}}
{{- else -}}
{{- $_ := set $chart $name (toString $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{/* First what the others refer to. */ -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- name: POD_ZONE
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['topology.kubernetes.io/zone']"}}
{{- range $name, $value := $chart }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* Of gateways and endpoint pickers: the database of accounts, from its Secret. A list, empty without one. */}}
{{- define "mooncache.accountsEnv" -}}
{{- $accounts := .Values.accounts -}}
{{- if $accounts.existingSecret -}}
- name: MOONCACHE_CLUSTER_ACCOUNTS_DIR
  valueFrom: {secretKeyRef: {name: {{ $accounts.existingSecret }}, key: {{ $accounts.key }}}}
{{- if $accounts.caKey }}
- name: PGSSLROOTCERT
  value: /run/mooncache/secret/accounts-ca.crt
{{- end }}
{{- else -}}
[]
{{- end -}}
{{- end -}}
