{{/* Elections by etcd: the settings, as JSON, and the password's variable. */}}
{{- define "mooncache.etcdEnv" -}}
{{- $etcd := .Values.coordination.etcd -}}
{{- dict
  "MOONCACHE_COORDINATION_ETCD_ENDPOINTS" (join "," $etcd.endpoints)
  "MOONCACHE_COORDINATION_PREFIX" (default (printf "/mooncache/%s/%s" .Release.Namespace (include "mooncache.fullname" .)) $etcd.prefix)
  "MOONCACHE_COORDINATION_ETCD_TLS" (toString $etcd.tls)
  "MOONCACHE_COORDINATION_ETCD_USER" $etcd.user | toJson }}
{{- end -}}

{{- define "mooncache.etcdSecretEnv" -}}
{{- with .Values.coordination.etcd.passwordSecret }}
- name: MOONCACHE_COORDINATION_ETCD_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ .name }}, key: {{ .key }}}}
{{- end }}
{{- end -}}

{{/* Elections by a Lease: what processes are started with, the files of their account, and the rights on one object. */}}
{{- define "mooncache.leaseEnv" -}}
MOONCACHE_COORDINATION_LEASE_NAME: {{ include "mooncache.fullname" . }}
MOONCACHE_COORDINATION_LEASE_NAMESPACE: {{ .Release.Namespace }}
MOONCACHE_COORDINATION_KUBERNETES_ACCOUNT: /run/mooncache/kubernetes
{{- end -}}

{{/* {name}: {name, volumes, mounts}. The token is for the API server and ends in an hour; the kubelet replaces it before. */}}
{{- define "mooncache.account" -}}
name: {{ .name }}
volumes:
  - name: kubernetes
    projected:
      defaultMode: 0440
      sources:
        - serviceAccountToken: {path: token, expirationSeconds: 3600}
        - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
mounts:
  - {name: kubernetes, mountPath: /run/mooncache/kubernetes, readOnly: true}
{{- end -}}

{{/* {root, component, name, lease}: the Lease is made here, so that nothing may create one: RBAC cannot limit that to a name. */}}
{{- define "mooncache.leaseRights" -}}
apiVersion: coordination.k8s.io/v1
kind: Lease
metadata:
  name: {{ .lease }}
  labels:
    {{- include "mooncache.labels" . | nindent 4 }}
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ .name }}
  labels:
    {{- include "mooncache.labels" . | nindent 4 }}
automountServiceAccountToken: false
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ .name }}
  labels:
    {{- include "mooncache.labels" . | nindent 4 }}
rules:
  - apiGroups: [coordination.k8s.io]
    resources: [leases]
    resourceNames: [{{ .lease }}]
    verbs: [get, update]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ .name }}
  labels:
    {{- include "mooncache.labels" . | nindent 4 }}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: {{ .name }}}
subjects:
  - {kind: ServiceAccount, name: {{ .name }}, namespace: {{ .root.Release.Namespace }}}
{{- end -}}
