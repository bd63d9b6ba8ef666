{{/* The pod of every component: user 10001, no capabilities, a read-only root, secrets as files of mode 0600, three
probes, a bounded end.

{root, component, values, own: environment, ports: [{name, containerPort}], ready: path, grace: seconds}, and optional
{set, config, image, account: a service account, resources, preStop: command, startSeconds, volumes, mounts, secretEnv, hostNetwork, spread: bool,
shm, cache, runtimeClassName, keys, accounts: {existingSecret, caKey}, tenantKeys: a Secret, holder: path of its socket, envFrom, annotations, module: of the package, where it is
not the component} */}}
{{- define "mooncache.pod" -}}
{{- $values := .root.Values -}}
{{- $scheme := ternary "HTTPS" "HTTP" $values.tls.enabled -}}
{{- $module := default .component .module -}}
metadata:
  labels:
    {{- include "mooncache.labels" . | nindent 4 }}
  {{- with merge (dict) (default dict .annotations) (default dict .values.podAnnotations) }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  {{- with .account }}
  serviceAccountName: {{ . }}
  {{- end }}
  enableServiceLinks: false # or MOONCACHE_MASTER_PORT=tcp://... of a Service would be taken for a setting
  terminationGracePeriodSeconds: {{ .grace }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with .runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- if .hostNetwork }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- if .holder }}
  shareProcessNamespace: true # the holder waits for the end of the node's process
  {{- end }}
  securityContext:
    runAsNonRoot: true
    runAsUser: 10001
    runAsGroup: 10001
    fsGroup: 10001
    fsGroupChangePolicy: OnRootMismatch
    seccompProfile: {type: RuntimeDefault}
  initContainers:
    # A mounted Secret belongs to root and its group may read it; the services refuse such files. Their copies are in
    # memory, and only user 10001 may read them.
    - name: secrets
      image: {{ include "mooncache.image" (dict "root" .root "image" .image) }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- if .tenantKeys }}
      command: [/bin/bash, -ec, 'install -m 0600 /run/mooncache/from/* /run/mooncache/secret/; install -d -m 0700 /run/mooncache/secret/tenants; install -m 0600 /run/mooncache/tenant-keys/* /run/mooncache/secret/tenants/']
      {{- else }}
      command: [/bin/bash, -ec, 'install -m 0600 /run/mooncache/from/* /run/mooncache/secret/']
      {{- end }}
      securityContext: &locked
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {memory: 64Mi}}
      volumeMounts:
        - {name: from, mountPath: /run/mooncache/from, readOnly: true}
        - {name: secret, mountPath: /run/mooncache/secret}
        {{- if .tenantKeys }}
        - {name: tenant-keys, mountPath: /run/mooncache/tenant-keys, readOnly: true}
        {{- end }}
  containers:
    - name: {{ .component | replace "_" "-" }}
      image: {{ include "mooncache.image" (dict "root" .root "image" .image) }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args: [mooncache.{{ $module }}]
      env:
        {{- include "mooncache.env" . | nindent 8 }}
        {{- with .secretEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- with .values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with .envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        {{- toYaml .ports | nindent 8 }}
        - {name: metrics, containerPort: 9100}
      startupProbe:
        httpGet: {path: /health, port: metrics, scheme: {{ $scheme }}}
        periodSeconds: 5
        timeoutSeconds: 4
        failureThreshold: {{ div (default 300 .startSeconds) 5 }}
      livenessProbe:
        httpGet: {path: /health, port: metrics, scheme: {{ $scheme }}}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: {{ .ready }}, port: metrics, scheme: {{ $scheme }}}
        periodSeconds: 5
        timeoutSeconds: 4
        failureThreshold: 2
      {{- with .preStop }}
      lifecycle:
        preStop:
          exec:
            command: {{ toJson . }}
      {{- end }}
      securityContext: *locked
      resources:
        {{- toYaml (default .values.resources .resources) | nindent 8 }}
      volumeMounts:
        - {name: secret, mountPath: /run/mooncache/secret, readOnly: true}
        - {name: state, mountPath: /var/lib/mooncache}
        - {name: tmp, mountPath: /tmp}
        {{- if .shm }}
        - {name: shm, mountPath: /dev/shm}
        {{- end }}
        {{- with .mounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- with .values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with .holder }}
    # It has descriptors of the node's memory files while the node's container is started again, and reads no byte.
    - name: holder
      image: {{ include "mooncache.image" (dict "root" $.root "image" $.image) }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args: [mooncache.store_node.holder, {{ . }}]
      securityContext: *locked
      resources: {requests: {cpu: 10m, memory: 32Mi}, limits: {memory: 64Mi}}
      volumeMounts:
        - {name: holder, mountPath: /run/mooncache/holder}
    {{- end }}
  volumes:
    - name: from
      projected:
        defaultMode: 0440
        sources:
          - secret: {name: {{ include "mooncache.tokenSecret" .root }}, items: [{key: cluster.token, path: cluster.token}]}
          {{- if $values.tls.enabled }}
          - secret:
              name: {{ include "mooncache.tlsSecret" .root }}
              items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}, {key: ca.crt, path: ca.crt}]
          {{- end }}
          {{- with .keys }}
          - secret: {name: {{ . }}, items: [{key: keys.toml, path: keys.toml}]}
          {{- end }}
          {{- with .accounts }}
          {{- if and .existingSecret .caKey }}
          - secret: {name: {{ .existingSecret }}, items: [{key: {{ .caKey }}, path: accounts-ca.crt}]}
          {{- end }}
          {{- end }}
    {{- if .tenantKeys }}
    - {name: tenant-keys, secret: {secretName: {{ .tenantKeys }}, defaultMode: 0440}}
    - {name: secret, emptyDir: {medium: Memory, sizeLimit: 17Mi}} # a page of memory for each of 4096 files
    {{- else }}
    - {name: secret, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
    {{- end }}
    - {name: state, emptyDir: {sizeLimit: {{ default "1Gi" .cache }}}}
    - {name: tmp, emptyDir: {sizeLimit: {{ default "1Gi" .cache }}}}
    {{- if .shm }}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ .shm }}}}
    {{- end }}
    {{- with .volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- with .values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- if .spread }}
  topologySpreadConstraints:
    {{- range $values.spread.topologyKeys }}
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: {{ $values.spread.whenUnsatisfiable }}
      labelSelector:
        matchLabels:
          {{- include "mooncache.selectorLabels" $ | nindent 10 }}
    {{- end }}
  {{- end }}
  {{- with .values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}

{{/* The Service of a component, also Prometheus' way to its pods. {root, component, name, ports} and optional {set,
stable: one address instead of one for each pod} */}}
{{- define "mooncache.service" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ .name }}
  labels:
    {{- include "mooncache.labels" . | nindent 4 }}
spec:
  {{- if not .stable }}
  clusterIP: None
  publishNotReadyAddresses: true # a pod's name is how others reach it while it starts
  {{- end }}
  selector:
    {{- include "mooncache.selectorLabels" . | nindent 4 }}
  ports:
    {{- range .ports }}
    - {name: {{ .name }}, port: {{ .containerPort }}, targetPort: {{ .name }}}
    {{- end }}
    - {name: metrics, port: 9100, targetPort: metrics}
{{- end -}}

{{/* {root, component, name[, set]} */}}
{{- define "mooncache.pdb" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels:
    {{- include "mooncache.labels" . | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels:
      {{- include "mooncache.selectorLabels" . | nindent 6 }}
{{- end -}}
