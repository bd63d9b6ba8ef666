{{/* The models volume: {volumes, mounts}. */}}
{{- define "mooncache.models" -}}
{{- $models := .Values.models -}}
{{- if or $models.persistentVolumeClaim $models.hostPath -}}
volumes:
  - name: models
    {{- if $models.persistentVolumeClaim }}
    persistentVolumeClaim: {claimName: {{ $models.persistentVolumeClaim }}, readOnly: true}
    {{- else }}
    hostPath: {path: {{ $models.hostPath }}, type: Directory}
    {{- end }}
mounts:
  - {name: models, mountPath: /models, readOnly: true}
{{- else -}}
volumes: []
mounts: []
{{- end -}}
{{- end -}}

{{/* The price book of gateways and endpoint pickers: {volumes, mounts, annotations}. A new text makes new pods: they read it
at their start. */}}
{{- define "mooncache.prices" -}}
{{- $book := .Values.gateway.priceBook -}}
{{- if or $book.text $book.existingConfigMap -}}
volumes:
  - name: prices
    configMap:
      name: {{ default (include "mooncache.pricesName" .) $book.existingConfigMap }}
      items: [{key: {{ $book.key }}, path: prices.toml}]
mounts:
  - {name: prices, mountPath: /etc/mooncache/prices, readOnly: true}
{{- if $book.text }}
annotations: {mooncache/prices: {{ sha256sum $book.text | trunc 16 | quote }}}
{{- else }}
annotations: {}
{{- end }}
{{- else -}}
volumes: []
mounts: []
annotations: {}
{{- end -}}
{{- end -}}

{{- define "mooncache.pricesName" -}}
{{ include "mooncache.fullname" . }}-prices
{{- end -}}

{{/* What a schema cannot say in a sentence: values that do not fit together. */}}
{{- define "mooncache.check" -}}
{{- $v := .Values -}}
{{- if and $v.tls.enabled $v.tls.insecure -}}
{{- fail "tls.enabled and tls.insecure are both true: set one of them to false." -}}
{{- end -}}
{{- if and (not $v.tls.enabled) (not $v.tls.insecure) -}}
{{- fail "tls.enabled is false: say tls.insecure=true as well if you trust every pod and host of this network." -}}
{{- end -}}
{{- if and $v.tls.enabled (not $v.tls.existingSecret) (not $v.tls.certManager.enabled) -}}
{{- fail "TLS needs certificates: set tls.existingSecret, or tls.certManager.enabled with an issuer, or tls.enabled=false and tls.insecure=true." -}}
{{- end -}}
{{- if and $v.tls.enabled $v.tls.certManager.enabled (not $v.tls.certManager.issuerRef.name) -}}
{{- fail "tls.certManager needs issuerRef.name." -}}
{{- end -}}
{{- if and $v.accounts.existingSecret (hasKey (default dict $v.config.cluster) "accounts_dir") -}}
{{- fail "config.cluster.accounts_dir is set by the chart: accounts.existingSecret has the database." -}}
{{- end -}}
{{- if and $v.accounts.caKey (not $v.accounts.existingSecret) -}}
{{- fail "accounts.caKey is a key of accounts.existingSecret, which is empty." -}}
{{- end -}}
{{- if and $v.rdma.enabled $v.tls.enabled -}}
{{- fail "rdma.enabled has no effect with TLS, because RDMA is not encrypted: set tls.enabled=false and tls.insecure=true, or rdma.enabled=false." -}}
{{- end -}}
{{- if and (eq $v.coordination.backend "etcd") (not $v.coordination.etcd.endpoints) -}}
{{- fail "coordination.etcd.endpoints is empty: name your etcd servers, or set coordination.backend=lease, which needs none." -}}
{{- end -}}
{{- if and $v.serving.enabled (eq $v.conductor.election "etcd") (not $v.coordination.etcd.endpoints) -}}
{{- fail "conductor.election=etcd uses coordination.etcd, whose endpoints are empty: name them, or set conductor.election=lease." -}}
{{- end -}}
{{- if and $v.coordination.etcd.tls (not $v.tls.enabled) -}}
{{- fail "coordination.etcd.tls uses the files of tls: tls.enabled has to be true." -}}
{{- end -}}
{{- if and (eq $v.coordination.backend "embedded") (gt (int $v.master.replicas) 1) -}}
{{- fail "coordination.backend=embedded has exactly one master: set master.replicas=1." -}}
{{- end -}}
{{- $ssd := $v.storeNode.ssd -}}
{{- if and $ssd.size (not $ssd.claim.size) (not $ssd.hostPath) -}}
{{- fail "storeNode.ssd.size needs a place: storeNode.ssd.claim.size (StatefulSet) or storeNode.ssd.hostPath." -}}
{{- end -}}
{{- if and $ssd.claim.size $ssd.hostPath -}}
{{- fail "storeNode.ssd has both claim and hostPath: keep one." -}}
{{- end -}}
{{- if and (eq $v.storeNode.kind "DaemonSet") $ssd.claim.size -}}
{{- fail "A DaemonSet has no volume claims: use storeNode.ssd.hostPath, or storeNode.kind=StatefulSet." -}}
{{- end -}}
{{- $shared := $v.storeNode.shared -}}
{{- if gt (len (compact (list $shared.existingClaim $shared.hostPath $shared.url))) 1 -}}
{{- fail "storeNode.shared is one of existingClaim, hostPath and url: keep one." -}}
{{- end -}}
{{- if and $shared.secret (not $shared.url) -}}
{{- fail "storeNode.shared.secret has the credentials of storeNode.shared.url, which is empty." -}}
{{- end -}}
{{- $book := $v.gateway.priceBook -}}
{{- if and $book.text $book.existingConfigMap -}}
{{- fail "gateway.priceBook has both text and existingConfigMap: keep one." -}}
{{- end -}}
{{- $batches := $v.gateway.batches -}}
{{- if and $batches.existingClaim $batches.claim.size -}}
{{- fail "gateway.batches has both existingClaim and claim.size: keep one." -}}
{{- end -}}
{{- if and (not $batches.enabled) (or $batches.existingClaim $batches.claim.size) -}}
{{- fail "gateway.batches has a volume and is not enabled: set gateway.batches.enabled=true." -}}
{{- end -}}
{{- if and $batches.enabled (ne (int $v.gateway.replicas) 1) -}}
{{- fail "gateway.batches: each gateway keeps its files and batches in a folder of its own, and clients would reach any gateway: set gateway.replicas=1." -}}
{{- end -}}
{{- if and $v.networkPolicy.enabled $v.storeNode.hostNetwork -}}
{{- fail "Network policies do not select pods of the host's network: set networkPolicy.enabled=false with storeNode.hostNetwork." -}}
{{- end -}}
{{- if $v.serving.enabled -}}
{{- range $set, $worker := $v.workers -}}
{{- if and $v.networkPolicy.enabled (default $v.workerDefaults.hostNetwork $worker.hostNetwork) -}}
{{- fail (printf "Network policies do not select pods of the host's network: set networkPolicy.enabled=false with hostNetwork of workers.%s." $set) -}}
{{- end -}}
{{- end -}}
{{- if and $v.workers (not $v.models.persistentVolumeClaim) (not $v.models.hostPath) -}}
{{- fail "Workers need models: set models.persistentVolumeClaim or models.hostPath." -}}
{{- end -}}
{{- end -}}
{{- if and $v.serving.enabled $v.endpointPicker.enabled $v.networkPolicy.enabled (not $v.networkPolicy.envoyFrom) -}}
{{- fail "endpointPicker.enabled: name the pods of your Envoy in networkPolicy.envoyFrom; they call the picker and the engines." -}}
{{- end -}}
{{- if and $v.endpointPicker.enabled (not $v.endpointPicker.keyRequired) (not $v.networkPolicy.enabled) -}}
{{- fail "endpointPicker.keyRequired is false: a network policy has to keep others from the picker (networkPolicy.enabled and envoyFrom)." -}}
{{- end -}}
{{- range $set, $given := $v.workers -}}
{{- $worker := mergeOverwrite (deepCopy $v.workerDefaults) (deepCopy $given) -}}
{{- if and $worker.autoscaling.enabled (gt (int $worker.autoscaling.minReplicas) (int $worker.autoscaling.maxReplicas)) -}}
{{- fail (printf "workers.%s.autoscaling: minReplicas is larger than maxReplicas." $set) -}}
{{- end -}}
{{- end -}}
{{- if and $v.metrics.serviceMonitor.enabled (not $v.metrics.serviceMonitor.keySecret.name) -}}
{{- fail "metrics.serviceMonitor needs keySecret.name: a Secret with what `mooncache token --metrics` prints; /metrics asks for it." -}}
{{- end -}}
{{- end -}}
