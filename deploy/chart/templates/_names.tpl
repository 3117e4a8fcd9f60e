{{/* The values, with the defaults of those that are missing: --reuse-values has the values of an older chart only. */}}
{{- define "values" -}}
{{- $defaults := dict
  "image" (dict "repository" "sluice" "tag" "" "pullPolicy" "IfNotPresent")
  "imagePullSecrets" list "configMap" "kube-proxy" "apiServer" "" "kubeProxyConfiguration" dict "args" list
  "privilegedInit" false "sysResource" false "hostProcesses" false "podOptOut" false "kubeProxyLabel" false
  "healthzPort" 10256 "healthzHost" ""
  "resources" (dict "requests" (dict "cpu" "100m" "memory" "192Mi"))
  "nodeSelector" (dict "kubernetes.io/os" "linux") "tolerations" (list (dict "operator" "Exists")) "affinity" dict
  "priorityClassName" "system-node-critical" "maxUnavailable" "10%" "updateStrategy" dict
  "podAnnotations" dict "podLabels" dict "env" list "volumes" list "volumeMounts" list
  "monitoring" (dict "podMonitor" false "rules" false "dashboard" false "labels" dict "port" 10249 "interval" "30s")
-}}
{{- mergeOverwrite $defaults (deepCopy .Values) | toYaml }}
{{- end }}

{{/* The port of an address, IP:PORT or only an IP. */}}
{{- define "port" -}}
{{ if regexMatch "^([^:]+|\\[.*\\]):[0-9]+$" .address }}{{ regexFind "[0-9]+$" .address }}{{ else }}{{ .default }}{{ end }}
{{- end }}

{{/* Values that contradict each other, or take what is the chart's own. Of a configuration that the chart does not make, it knows nothing. */}}
{{- define "check" -}}
{{- $v := include "values" . | fromYaml }}
{{- if $v.apiServer }}
{{- $healthz := default "0.0.0.0" $v.kubeProxyConfiguration.healthzBindAddress }}
{{- $metrics := default "127.0.0.1" $v.kubeProxyConfiguration.metricsBindAddress }}
{{- $healthzPort := include "port" (dict "address" $healthz "default" "10256") }}
{{- $metricsPort := include "port" (dict "address" $metrics "default" "10249") }}
{{- if ne $healthzPort (toString $v.healthzPort) }}
{{- fail (printf "healthzPort: it is %v, and kubeProxyConfiguration.healthzBindAddress %s: the kubelet would probe another port than the agent's" $v.healthzPort $healthz) }}
{{- end }}
{{- if and (or (hasPrefix "127." $healthz) (hasPrefix "[::1]" $healthz) (eq "::1" $healthz)) (not $v.healthzHost) }}
{{- fail (printf "healthzHost: kubeProxyConfiguration.healthzBindAddress is %s, and the kubelet would probe the address of the node: set healthzHost to that address" $healthz) }}
{{- end }}
{{- if $v.monitoring.podMonitor }}
{{- if ne $metricsPort (toString $v.monitoring.port) }}
{{- fail (printf "monitoring.port: it is %v, and kubeProxyConfiguration.metricsBindAddress %s: Prometheus would ask another port than the agent's" $v.monitoring.port $metrics) }}
{{- end }}
{{- if or (hasPrefix "127." $metrics) (hasPrefix "[::1]" $metrics) (eq "::1" $metrics) }}
{{- fail (printf "monitoring.podMonitor: metrics are served on %s, where Prometheus does not reach them: set kubeProxyConfiguration.metricsBindAddress to 0.0.0.0:%v" $metrics $v.monitoring.port) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and $v.updateStrategy (ne (toString $v.maxUnavailable) "10%") }}
{{- fail "updateStrategy: maxUnavailable is set as well, which it replaces: set one of them" }}
{{- end }}
{{- range $name := list "app.kubernetes.io/name" "k8s-app" }}
{{- if hasKey $v.podLabels $name }}
{{- fail (printf "podLabels: %s is the chart's own label" $name) }}
{{- end }}
{{- end }}
{{- range $v.env }}
{{- if eq .name "NODE_NAME" }}
{{- fail "env: NODE_NAME is the chart's own" }}
{{- end }}
{{- end }}
{{- range $v.volumes }}
{{- if has .name (list "kube-proxy" "cgroup" "bpf" "netns" "run") }}
{{- fail (printf "volumes: %s is the name of one of the chart's own" .name) }}
{{- end }}
{{- end }}
{{- end }}

{{/* The image, with a tag if there is one. */}}
{{- define "image" -}}
{{- $v := include "values" . | fromYaml -}}
{{ $v.image.repository }}{{ with $v.image.tag }}:{{ . }}{{ end }}
{{- end }}

{{/* The ConfigMap that the agent reads. */}}
{{- define "configMap" -}}
{{- $v := include "values" . | fromYaml -}}
{{ if $v.apiServer }}sluice{{ else }}{{ $v.configMap }}{{ end }}
{{- end }}

{{/* What the agent and the container before it have in common. */}}
{{- define "agent" -}}
{{- $v := include "values" . | fromYaml -}}
image: {{ include "image" . }}
imagePullPolicy: {{ $v.image.pullPolicy }}
env:
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- with $v.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Where the kubelet asks for the agent's health. */}}
{{- define "healthz" -}}
{{- $v := include "values" . | fromYaml -}}
{{- with $v.healthzHost }}
host: {{ . | quote }}
{{- end }}
port: {{ $v.healthzPort }}
{{- end }}
