{{/* The image, with a tag if there is one. */}}
{{- define "image" -}}
{{ .Values.image.repository }}{{ with .Values.image.tag }}:{{ . }}{{ end }}
{{- end }}

{{/* The ConfigMap that the agent reads. */}}
{{- define "configMap" -}}
{{ if .Values.apiServer }}sluice{{ else }}{{ .Values.configMap }}{{ end }}
{{- end }}

{{/* What the agent and the container before it have in common. */}}
{{- define "agent" -}}
image: {{ include "image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
- name: NODE_NAME
  valueFrom:
    fieldRef:
      fieldPath: spec.nodeName
{{- end }}
