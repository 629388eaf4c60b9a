{{- /* Settings that the operator's pods and the pod of `helm test` share. */}}
{{- define "octavo.placement" -}}
{{- with .Values.images.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.operator.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .Values.operator.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.operator.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.operator.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* The user's fields replace those of the chart. */}}
{{- define "octavo.podSecurity" -}}
{{ mergeOverwrite (include "octavo.ownPodSecurity" . | fromYaml) .Values.operator.podSecurityContext | toYaml }}
{{- end }}

{{- define "octavo.confined" -}}
{{ mergeOverwrite (include "octavo.ownConfined" . | fromYaml) .Values.operator.securityContext | toYaml }}
{{- end }}

{{- define "octavo.ownPodSecurity" -}}
runAsNonRoot: true
{{- if .Values.fixedUser }}
runAsUser: 10001
runAsGroup: 10001
{{- end }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "octavo.ownConfined" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}
