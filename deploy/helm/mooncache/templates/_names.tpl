{{/* Names, labels and addresses. What one service is told of another comes from here and nowhere else. */}}

{{- define "mooncache.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "mooncache.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "mooncache.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "mooncache.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* The whole release. */}}
{{- define "mooncache.releaseLabels" -}}
app.kubernetes.io/name: {{ include "mooncache.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* {root, component[, set]}: what selectors of one component match. Components are Prometheus' jobs: store_node. */}}
{{- define "mooncache.selectorLabels" -}}
{{ include "mooncache.releaseLabels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- with .set }}
mooncache/set: {{ . }}
{{- end }}
{{- end -}}

{{- define "mooncache.labels" -}}
{{ include "mooncache.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | quote }}
{{- end -}}

{{- define "mooncache.domain" -}}
{{ .Release.Namespace }}.svc.{{ .Values.clusterDomain }}
{{- end -}}

{{- define "mooncache.masterTargets" -}}
{{- $name := printf "%s-master" (include "mooncache.fullname" .) -}}
{{- $targets := list -}}
{{- range $i := until (int .Values.master.replicas) -}}
{{- $targets = append $targets (printf "%s-%d.%s.%s:7700" $name $i $name (include "mooncache.domain" $)) -}}
{{- end -}}
{{- join "," $targets -}}
{{- end -}}

{{- define "mooncache.conductorHost" -}}
{{ include "mooncache.fullname" . }}-conductor.{{ include "mooncache.domain" . }}
{{- end -}}

{{/* One address, or that of each conductor, in the order in which they go first. */}}
{{- define "mooncache.conductorTargets" -}}
{{- $name := printf "%s-conductor" (include "mooncache.fullname" .) -}}
{{- $targets := list -}}
{{- if gt (int .Values.conductor.replicas) 1 -}}
{{- range $i := until (int .Values.conductor.replicas) -}}
{{- $targets = append $targets (printf "%s-%d.%ss.%s:7800" $name $i $name (include "mooncache.domain" $)) -}}
{{- end -}}
{{- else -}}
{{- $targets = list (printf "%s:7800" (include "mooncache.conductorHost" .)) -}}
{{- end -}}
{{- join "," $targets -}}
{{- end -}}

{{/* "true" when KEDA scales a set of workers. */}}
{{- define "mooncache.autoscaled" -}}
{{- range $set, $given := .Values.workers -}}
{{- $worker := mergeOverwrite (deepCopy $.Values.workerDefaults) (deepCopy $given) -}}
{{- if $worker.autoscaling.enabled }}true{{ end -}}
{{- end -}}
{{- end -}}

{{- define "mooncache.tokenSecret" -}}
{{- default (printf "%s-token" (include "mooncache.fullname" .)) .Values.token.existingSecret -}}
{{- end -}}

{{- define "mooncache.tlsSecret" -}}
{{- default (printf "%s-tls" (include "mooncache.fullname" .)) .Values.tls.existingSecret -}}
{{- end -}}

{{- define "mooncache.serverName" -}}
{{- default (printf "%s.%s.svc" (include "mooncache.fullname" .) .Release.Namespace) .Values.tls.serverName -}}
{{- end -}}

{{/* {root, image}: the set's own image before the common one. */}}
{{- define "mooncache.image" -}}
{{- $image := merge (deepCopy (default dict .image)) .root.Values.image -}}
{{- if and .image .image.tag (not .image.digest) }}{{ $_ := set $image "digest" "" }}{{ end -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default .root.Chart.AppVersion $image.tag }}
{{- end -}}
{{- end -}}

{{/* "8GiB" as a number of MiB. */}}
{{- define "mooncache.mib" -}}
{{- if hasSuffix "GiB" . -}}{{ mul (trimSuffix "GiB" . | int64) 1024 }}{{- else -}}{{ trimSuffix "MiB" . }}{{- end -}}
{{- end -}}
