{{- /* Replaces `kubeVersion` in Chart.yaml, which helm also checks without a cluster, against a default version. */}}
{{- define "octavo.checks" -}}
{{- include "octavo.values" . -}}
{{- if and (.Capabilities.APIVersions.Has "apps/v1/Deployment") (semverCompare "<1.29.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "Octavo needs Kubernetes 1.29 or newer; this cluster is %s" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end }}
