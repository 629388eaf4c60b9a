{{- /* Not `kubeVersion` in Chart.yaml: that is checked without a cluster too, where helm may only have a version to guess. */}}
{{- define "octavo.checks" -}}
{{- if and (.Capabilities.APIVersions.Has "apps/v1/Deployment") (semverCompare "<1.29.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "Octavo needs Kubernetes 1.29 or newer; this cluster is %s" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- end }}
