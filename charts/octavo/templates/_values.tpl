{{- /* What a setting without a value has, as with `--set NAME=null`. A null removes the items of a list or map: those are empty here. */}}
{{- define "octavo.defaults" -}}
images: {registry: localhost/octavo, pullPolicy: IfNotPresent, pullSecrets: []}
podTemplates: restricted
operator:
  replicas: 2
  workers: 16
  maxRollouts: 1
  lameDuckSeconds: 15
  logFormat: json
  resources: {}
  podLabels: {}
  podSecurityContext: {}
  securityContext: {}
  env: []
serviceAccount: {}
networkPolicy: {enabled: true}
fixedUser: true
commonLabels: {}
watchNamespaces: []
aggregateRoles: true
clusterDomain: cluster.local
crds: {install: true}
monitoring: {labels: {}, scrapeNamespaces: [], scrapePeers: [], dashboards: {}}
metricsApi: {enabled: true}
gatewayApi: {}
leaderWorkerSets: {enabled: true}
{{- end }}

{{- /* Writes the defaults into the values. Every template begins with it, as Helm may render any of them first. */}}
{{- define "octavo.values" -}}
{{- range $group, $default := include "octavo.defaults" . | fromYaml }}
{{- if kindIs "invalid" (index $.Values $group) }}
{{- $_ := set $.Values $group $default }}
{{- else if kindIs "map" $default }}
{{- range $name, $value := $default }}
{{- if kindIs "invalid" (index $.Values $group $name) }}
{{- $_ := set (index $.Values $group) $name $value }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
