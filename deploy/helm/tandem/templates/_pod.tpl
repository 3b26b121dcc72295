{{/* What the pods of all services share: (list $ "target"). */}}

{{- define "tandem.podMetadata" -}}
{{- $values := index (index . 0).Values (index . 1) -}}
labels:
  {{- include "tandem.labels" . | nindent 2 }}
{{- with $values.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "tandem.podSettings" -}}
{{- $root := index . 0 -}}
{{- $values := index $root.Values (index . 1) -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "tandem.selector" . | nindent 8 }}
{{- end -}}

{{- define "tandem.container" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
image: "{{ $root.Values.image.repository }}:{{ $root.Values.image.tag | default $root.Chart.AppVersion }}"
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{- define "tandem.env" -}}
{{- $root := index . 0 -}}
{{- $variables := (index $root.Values (index . 1)).env -}}
{{- with $root.Values.tracing.endpoint -}}
{{- $variables = prepend $variables (dict "name" "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" "value" .) -}}
{{- end -}}
{{- with $variables -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}

{{- define "tandem.resources" -}}
{{- $values := index (index . 0).Values (index . 1) -}}
{{- $resources := deepCopy $values.resources -}}
{{- if $values.gpusPerPod -}}
{{- $gpus := dict "limits" (dict $values.gpuResource $values.gpusPerPod) -}}
{{- $resources = mergeOverwrite $resources $gpus -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "tandem.volumeMounts" -}}
{{- $root := index . 0 -}}
- name: cache
  mountPath: /cache
- name: tmp
  mountPath: /tmp
{{- if $root.Values.model.volume }}
- name: models
  mountPath: /models
  readOnly: true
{{- end }}
{{- if $root.Values.tls.enabled }}
- name: tls
  mountPath: /tls
  readOnly: true
{{- end }}
{{- end -}}

{{- define "tandem.volumes" -}}
{{- $root := index . 0 -}}
- name: cache
  emptyDir: {}
- name: tmp
  emptyDir: {}
{{- with $root.Values.model.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $root.Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ index $root.Values.tls.secrets (index . 1) }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{/* How a target or a draft listens. */}}
{{- define "tandem.serverArgs" -}}
{{- $root := index . 0 -}}
- --host=0.0.0.0
- --port={{ index . 2 }}
- --health-port=50063
- --drain-s={{ (index $root.Values (index . 1)).drainSeconds }}
- --log-format=json
{{- if $root.Values.tls.enabled }}
- --ssl-certfile=/tls/tls.crt
- --ssl-keyfile=/tls/tls.key
- --ssl-ca-certs=/tls/ca.crt
{{- else }}
- --insecure
{{- end }}
{{- with (index $root.Values (index . 1)).args }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Health checks of a target or a draft; the port speaks plain text, for probes have no certificates. */}}
{{- define "tandem.probes" -}}
{{- $values := index (index . 0).Values (index . 1) -}}
startupProbe:
  grpc:
    port: 50063
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: {{ div $values.startupSeconds 2 }}
readinessProbe:
  grpc:
    port: 50063
  periodSeconds: 5
  timeoutSeconds: 5
livenessProbe:
  grpc:
    port: 50063
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 3
{{- end -}}

{{/* Names of services are looked up here. */}}
{{- define "tandem.egressToDns" -}}
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
{{- end -}}

{{/* The Hugging Face hub and the collector of traces. */}}
{{- define "tandem.egressToOutside" -}}
{{- $rules := list -}}
{{- if .Values.model.fromHub -}}
{{- $rules = append $rules (dict "ports" (list (dict "port" 443 "protocol" "TCP"))) -}}
{{- end -}}
{{- with .Values.tracing.endpoint -}}
{{- $port := regexFind "[0-9]+$" . | int -}}
{{- $rules = concat $rules ($.Values.tracing.egress | default (list (dict "ports" (list (dict "port" $port "protocol" "TCP"))))) -}}
{{- end -}}
{{- with $rules -}}
{{- toYaml . -}}
{{- end -}}
{{- end -}}
