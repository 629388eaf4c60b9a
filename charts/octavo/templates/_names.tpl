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
