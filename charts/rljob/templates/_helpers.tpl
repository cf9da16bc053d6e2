{{- define "rljob.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 53 | trimSuffix "-" }}
{{- end }}

{{- define "rljob.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 53 | trimSuffix "-" }}
{{- else if contains (include "rljob.name" .) .Release.Name }}
{{- .Release.Name | trunc 53 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "rljob.name" .) | trunc 53 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "rljob.selectorLabels" -}}
app.kubernetes.io/name: {{ include "rljob.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "rljob.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "rljob.selectorLabels" . }}
{{- end }}

{{- /* Another name than the operator's pods have: whatever selects those must not find these. */}}
{{- define "rljob.webhookSelectorLabels" -}}
app.kubernetes.io/name: {{ include "rljob.name" . }}-webhook
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: webhook
{{- end }}

{{- define "rljob.webhookLabels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "rljob.webhookSelectorLabels" . }}
{{- end }}

{{- define "rljob.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "rljob.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name must name an existing account when serviceAccount.create is false" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "rljob.keySecret" -}}
{{- default (printf "%s-key" (include "rljob.fullname" .)) .Values.operator.existingKeySecret }}
{{- end }}

{{- define "rljob.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{- /* The whole of what the operator may do. It reads no Secret; no exec, no wildcard, nothing on nodes; it writes no RLJob but its status. */}}
{{- define "rljob.rules" -}}
- apiGroups: [rljob.dev]
  resources: [rljobs]
  verbs: [get, list, watch]
- apiGroups: [rljob.dev]
  resources: [rljobs/status]
  verbs: [patch]
# To own a RayCluster with blockOwnerDeletion, where the API server asks for that right.
- apiGroups: [rljob.dev]
  resources: [rljobs/finalizers]
  verbs: [update]
# patch: a finished run's workers go at once, its head stays for ttlSecondsAfterFinished.
- apiGroups: [ray.io]
  resources: [rayclusters]
  verbs: [get, list, watch, create, patch, delete]
# create, delete: the pod that looks at the checkpoint volume before a RayCluster is made. Other pods are KubeRay's.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, create, delete]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  verbs: [get]
# Its own events, and the warnings that say why a pod does not start.
- apiGroups: [""]
  resources: [events]
  verbs: [list, create]
# The token of an attempt and the network policy of a run; neither is ever read.
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [create]
{{- if eq .Values.operator.rayAccess "ApiServerProxy" }}
- apiGroups: [""]
  resources: [services/proxy]
  verbs: [get, create]
{{- end }}
{{- end }}
