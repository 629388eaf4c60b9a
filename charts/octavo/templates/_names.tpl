{{- define "octavo.name" -}}
{{- if contains "octavo" .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{ else }}{{ printf "%s-octavo" .Release.Name | trunc 40 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "octavo.operator" -}}
{{ include "octavo.name" . }}-operator
{{- end }}

{{- define "octavo.selector" -}}
app.kubernetes.io/name: octavo-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "octavo.ownLabels" -}}
{{ include "octavo.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: octavo
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* The chart's own labels override the user's: selectors and Helm depend on them. */}}
{{- define "octavo.labels" -}}
{{ merge (include "octavo.ownLabels" . | fromYaml) .Values.commonLabels | toYaml }}
{{- end }}

{{- /* The name of an image. Arguments: the root context, and operator, engine or router. */}}
{{- define "octavo.image" -}}
{{- $root := index . 0 -}}
{{- $images := $root.Values.images -}}
{{ index $images (index . 1) | default (printf "%s/%s:%s" $images.registry (index . 1) (default $root.Chart.AppVersion $images.tag)) }}
{{- end }}

{{- define "octavo.metricsApi" -}}
{{ include "octavo.name" . }}-metrics-api
{{- end }}
