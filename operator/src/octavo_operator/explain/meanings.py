"""Meaning and remedy of each condition's reason, for `octavo explain infsvc` and for docs/reference/conditions.md.

A test keeps the page's table equal to this one; `pytest --update-golden` writes it.
"""

from typing import NamedTuple


class Meaning(NamedTuple):
    text: str
    remedy: str = ""  # empty if there is nothing to do


#: condition -> reason
MEANINGS: dict[str, dict[str, Meaning]] = {
    "Accepted": {
        "Valid": Meaning("The spec can be served."),
        "ClaimIsForOneNode": Meaning(
            "Several pods share a ReadWriteOnce claim, so they start on one node only. This does not block Ready.",
            "Delete the service, and create it with `model.cache.accessMode: ReadWriteMany`, if its StorageClass "
            "supports that, or keep the replicas on one node.",
        ),
        "ClaimDiffers": Meaning(
            "The claim of `model.cache` existed before, and Kubernetes lets only its size grow: it is used as it is. "
            "The message names the fields that differ. This does not block Ready.",
            "Change the spec, or delete the claim together with the service and create the service again.",
        ),
        "InvalidSpec": Meaning(
            "The operator can't read the spec, though the API server accepted it. Running pods are kept, scaled and "
            "admitted.",
            "The message names the field. The versions of CRD and operator differ: upgrade both together, or "
            "remove the field.",
        ),
        "RouterNotFound": Meaning(
            "`spec.router.ref` names a service that does not exist, or that has no router of its own.",
            "`kubectl get infsvc` lists the services. Create the named one, or correct the name.",
        ),
        "RouterNotAllowed": Meaning(
            "The service that `spec.router.ref` names has a list `router.allowFrom` without this service. Pods that "
            "run behind that router keep serving, under the model names that they have.",
            "Let the owner of that service add this one to its `router.allowFrom`, or leave `router.ref` out, so that "
            "this service has a router of its own.",
        ),
        "HostTaken": Meaning(
            "Another service claimed this host and path earlier.",
            "Choose another host or path, or share that service's router: `spec.router.ref.name`.",
        ),
        "ModelNameTaken": Meaning(
            "Another service behind the same router claimed one of the model names earlier.",
            "Choose other names (`model.servedNames`), or leave `router.ref` out, so that the service has a router of "
            "its own.",
        ),
        "NoGatewayApi": Meaning(
            "`spec.exposure.gateway` needs the Gateway API, but the operator was installed without it, or its CRDs are "
            "missing.",
            "Install the Gateway API's CRDs and set `gatewayApi.enabled` of the chart, or use `exposure.ingress`.",
        ),
        "NoLeaderWorkerSets": Meaning(
            "`parallelism.nodes` above 1 needs LeaderWorkerSets, but their CRD is missing, or the operator was "
            "installed without them.",
            "Install [LeaderWorkerSet](https://lws.sigs.k8s.io), and set `leaderWorkerSets.enabled` of the chart, or "
            "leave `parallelism.nodes` out.",
        ),
        "PodTemplateConflict": Meaning(
            "A `podTemplate` contains fields that only the operator sets, such as the engine's arguments or probes.",
            "The message names the fields. Leave them out; `engine.image`, `engine.extraArgs` and `drain` are the "
            "fields of the spec for them.",
        ),
        "PodTemplateRefused": Meaning(
            "A `podTemplate` or `model.cache` contains fields that give a pod rights on its node, such as `hostPath` "
            "or `privileged`, and the chart's `podTemplates` is `restricted`. Pods that run stay as they are.",
            "Leave the fields out that the message names, or let the administrator set `podTemplates: any`.",
        ),
        "UnusedGpus": Meaning(
            "Each replica requests more GPUs than its engine computes on: one, or as many as `parallelism.tensor`.",
            "Request that number, and raise `replicas` to use more, or divide the model among them: "
            "`parallelism.tensor`.",
        ),
        "TooFewGpus": Meaning(
            "`parallelism.tensor` is above the number of whole GPUs that each replica requests. Partitions and shared "
            "GPUs do not count, as ranks on them cannot exchange data. Pods that run stay as they are.",
            "Request as many GPUs (`nvidia.com/gpu`), or lower `parallelism.tensor`. `engine.device: cpu` divides the "
            "CPU cores instead.",
        ),
        "TooFewCpus": Meaning(
            "`resources.limits.cpu` is less than one core for each rank: `parallelism.tensor` times "
            "`parallelism.pipeline`. Pods that run stay as they are.",
            "Raise the limit, or lower `parallelism.tensor` or `parallelism.pipeline`.",
        ),
        "StagesOnGpus": Meaning(
            "`parallelism.pipeline` is above 1, but the engines run on GPUs. Pods that run stay as they are.",
            "Leave it out and divide each layer with `parallelism.tensor`, or set `engine.device: cpu`.",
        ),
    },
    "ChildrenApplied": {
        "Applied": Meaning("All objects of the service match its spec."),
        "NotTried": Meaning(
            "While the spec is not accepted, the operator only scales and admits running pods.",
            "See `Accepted`.",
        ),
        "NameTaken": Meaning(
            "The name of an object that the service needs belongs to another owner's object, which stays unchanged.",
            "The message names the object and its owner. Remove the object, or give the service another name.",
        ),
        "Refused": Meaning(
            "The API server refuses an object of the service: a quota, an admission webhook, a missing right, or an "
            "unknown field in a part of the spec that is copied into pods. The other objects are written, and running "
            "pods keep serving. The operator retries with growing delays, at least once a minute.",
            "The message is the API server's response, which names the field.",
        ),
        "Retrying": Meaning(
            "The write of an object failed, and the operator tries it again. This does not block Ready.",
            "If this lasts, the message is the API server's error.",
        ),
    },
    "FitsHardware": {
        "Fits": Meaning("Weights and KV cache fit into the engine's memory; the message has the sizes."),
        "NotChecked": Meaning("No engine has measured its memory yet. This does not block Ready."),
        "TooLarge": Meaning(
            "Weights and KV cache do not fit into memory; the message has the sizes.",
            "Lower `engine.maxModelLen`, raise `engine.kvCacheMemory`, choose a smaller model, or give `resources` "
            "more.",
        ),
        "NoGpuSupport": Meaning(
            "The engine found no usable NVIDIA GPU in its pod, or `resources` requests an accelerator of another kind.",
            "The message has the cause, such as a missing driver, too old a GPU, or an image without CUDA, and the "
            "remedy. `engine.device: cpu` computes on the CPU of a node that has a GPU.",
        ),
    },
    "ModelReady": {
        "Fetched": Meaning("The weights are available to the engines."),
        "Fetching": Meaning(
            "A pod is fetching the weights.",
            "`kubectl logs POD -c fetch -f` shows the progress.",
        ),
        "FetchFailed": Meaning(
            "The weights can't be fetched; the message is the source's error.",
            "Possible causes: a wrong name, a missing or wrong token (`model.secretRef`), a full disk "
            "(`model.cache.size`), no connection to the source.",
        ),
        "NotFound": Meaning(
            "The engine's container has no such model: the file, folder or package is missing.",
            "Correct `model.uri`. A `file://` model must be in the engine's image or a volume, the package of a "
            "`pkg://` model in the image.",
        ),
        "Waiting": Meaning(
            "No pod has begun to fetch the weights.",
            "See `WorkloadReady`.",
        ),
    },
    "WorkloadReady": {
        "PodsReady": Meaning("All replicas are ready."),
        "ScaledToZero": Meaning(
            "`spec.replicas` is 0.",
            "`kubectl scale infsvc NAME --replicas 1`",
        ),
        "Starting": Meaning(
            "Pods are starting, without an error so far.",
            "Large models take minutes: `kubectl logs POD`.",
        ),
        "QuotaExceeded": Meaning(
            "A ResourceQuota of the namespace leaves no room for the pods.",
            "`kubectl describe quota` shows it. Raise the quota, or lower `resources` or `replicas`.",
        ),
        "PodRefused": Meaning(
            "The API server refuses the pods by Pod Security, a LimitRange or an admission webhook.",
            "The message names the rule. Change the spec, or the rule.",
        ),
        "Unschedulable": Meaning(
            "No node has enough free resources; the message is the scheduler's.",
            "Lower `resources`, or add nodes; check `nodeSelector` and `tolerations`, and that the claim of a "
            "`pvc://` model exists.",
        ),
        "MountFailed": Meaning(
            "A volume can't be mounted, or the pod's network can't be set up; the message is the kubelet's event.",
            "Create the Secret or claim that the message names, or correct the name. A `ReadWriteOnce` claim is "
            "usable on one node only: `model.cache.accessMode`.",
        ),
        "ImagePullError": Meaning(
            "The image can't be pulled.",
            "Correct the name or tag of the image, or add `imagePullSecrets`.",
        ),
        "ConfigError": Meaning(
            "A Secret or ConfigMap for the container's environment does not exist, or lacks the entry.",
            "Create the Secret or ConfigMap, or correct `model.secretRef` or `engine.env`.",
        ),
        "CrashLoop": Meaning(
            "The engine fails repeatedly; the message is its error.",
            "`kubectl logs POD --previous` shows more. The cause is often an unknown flag in `engine.extraArgs`.",
        ),
        "OOMKilled": Meaning(
            "The engine needed more memory than its limit.",
            "Raise `resources.limits.memory`, or lower `engine.kvCacheMemory`.",
        ),
        "StartFailed": Meaning(
            "The container runtime can't start the container; the message is the runtime's.",
            "Check that `engine.image` is an engine image, and that `runtimeClassName` can run it.",
        ),
        "NodeLost": Meaning(
            "The node of the pods reports nothing: it is down, or its kubelet or network is.",
            "`kubectl get nodes` shows it. Kubernetes replaces the pods after some minutes, or at once when the node "
            "is deleted. It replaces the pods of a replica with several pods only when the node is deleted or back.",
        ),
    },
    "RouterReady": {
        "RouterServes": Meaning("All routers are ready."),
        "RouterDegraded": Meaning(
            "Some routers are ready, but another router does not start. The ready ones may have an older spec.",
            "The message has the error. The cause is often that the Secret of API keys is missing.",
        ),
        "RouterStarting": Meaning("Routers are starting."),
        "RouterFailed": Meaning(
            "No router starts; the message has the error.",
            "The cause is often that the Secret of `auth.apiKeysSecretRef` or the image is missing.",
        ),
    },
    "ReplicasAdmitted": {
        "AllAdmitted": Meaning("Every router has the KV snapshot of every replica and sends it requests."),
        "Idle": Meaning("`autoscaling.scaleToZero` removed all replicas; the next request starts one."),
        "WaitingForRouter": Meaning(
            "A replica is ready, but not every router has its KV snapshot yet.",
            "Routers need a second or two for the snapshot. If this lasts, a NetworkPolicy may block the connection.",
        ),
        "NoReplicas": Meaning("`spec.replicas` is 0."),
    },
    "Progressing": {
        "Complete": Meaning("Only the wanted revision exists, and it is complete."),
        "RollingOut": Meaning("A new revision replaces the old one, replica by replica."),
        "Paused": Meaning(
            "`rollout.paused` is true: no further replica of the new revision starts.",
            "Set `rollout.paused` to false, or leave it out.",
        ),
        "NoRoomToSurge": Meaning(
            "A replica of the new revision has found no node for `rollout.surgePatienceSeconds`, and there is no "
            "second replica whose place it could take.",
            "Make room for one replica more, or set `rollout.strategy` to InPlace: then nothing serves while the "
            "replica is replaced.",
        ),
        "DeadlineExceeded": Meaning(
            "A replica of the new revision did not serve within `rollout.progressDeadlineSeconds` of having its node. "
            "The rollout is stopped, and the old revision serves with all replicas.",
            "Correct the spec as the message says: another revision starts another rollout.",
        ),
        "UpgradeWaits": Meaning(
            "The operator has another default image or setting of pods, and as many services as `operator.maxRollouts` "
            "are being rolled out to it. The old revision serves."
        ),
        "UpgradeStopped": Meaning(
            "The operator has another default image or setting of pods, and the service in the message has exceeded "
            "its deadline in the rollout to it. No further service is rolled out; the old revision serves.",
            "Give the operator a working image or setting, or correct or delete that service.",
        ),
    },
    "ScalingReady": {
        "Active": Meaning("The number of replicas follows the load."),
        "AtMax": Meaning(
            "The load asks for more replicas than `autoscaling.maxReplicas`.", "Raise it, if the nodes have room."
        ),
        "ScaledToZero": Meaning("No replica runs without requests."),
        "External": Meaning("`autoscaling.provider` is `External`: another autoscaler sets `spec.replicas`."),
        "MetricsUnavailable": Meaning(
            "The load is unknown, as a router does not report or the metrics API does not answer. The number of "
            "replicas stays.",
            "If this lasts, look at the routers' pods, at `kubectl describe hpa NAME`, and at the APIService "
            "v1beta2.custom.metrics.k8s.io.",
        ),
        "ScaledByOthers": Meaning(
            "Another client or HorizontalPodAutoscaler changes the replicas. The operator leaves them as they are for "
            "five minutes.",
            "Remove the other autoscaler, or set `autoscaling.provider` to `External`.",
        ),
        "Disabled": Meaning(
            "`spec.replicas` is 0 without `autoscaling.scaleToZero`, which switches autoscaling off.",
            "Start a replica: `kubectl scale infsvc NAME --replicas 1`.",
        ),
    },
    "Ready": {
        "Serving": Meaning("The current revision serves requests through the router."),
        "Idle": Meaning("No replica runs, and the next request starts one."),
    },
}
