"""The meaning and the remedy of each reason: for `octavo explain infsvc` and for docs/reference/conditions.md.

A test keeps the page's table equal to this one, and `pytest --update-golden` writes it there.
"""

from typing import NamedTuple


class Meaning(NamedTuple):
    text: str
    remedy: str = ""  # empty where there is nothing to do


#: condition -> reason
MEANINGS: dict[str, dict[str, Meaning]] = {
    "Accepted": {
        "Valid": Meaning("The spec can be served."),
        "InvalidSpec": Meaning(
            "The operator can't read the spec, though the API server took it. What runs goes on as before.",
            "The message names the field. CRD and operator are of different versions: upgrade both together, or "
            "take the field out.",
        ),
        "RouterNotFound": Meaning(
            "`spec.router.ref` names a service that isn't there, or has no router of its own.",
            "`kubectl get infsvc`. Create that service, or correct the name.",
        ),
        "HostTaken": Meaning(
            "Another service had this host and path first.",
            "Choose others, or share its router: `spec.router.ref.name`.",
        ),
        "NoGatewayApi": Meaning(
            "`spec.exposure.gateway` needs the Gateway API, and the operator was installed without it.",
            "Install the Gateway API's CRDs and set `gatewayApi.enabled` of the chart, or use `exposure.ingress`.",
        ),
    },
    "ChildrenApplied": {
        "Applied": Meaning("All objects of the service are as the spec asks for."),
        "NotTried": Meaning(
            "Nothing is changed while the spec isn't accepted.",
            "See `Accepted`.",
        ),
        "NameTaken": Meaning(
            "An object that the service needs is there already and is another's. It is left as it is.",
            "The message names it and whose it is. Remove it, or give the service another name.",
        ),
        "Refused": Meaning(
            "The API server refuses an object of the service: a quota, an admission webhook, a missing right. Tried "
            "again, each time later, at least once a minute.",
            "The message is the API server's.",
        ),
    },
    "FitsHardware": {
        "Fits": Meaning("The engine has room for weights and KV cache; the message has the sum."),
        "NotChecked": Meaning("No engine has come so far yet. Holds nothing up."),
        "TooLarge": Meaning(
            "It doesn't fit; the message has the sum.",
            "Lower `engine.maxModelLen`, raise `engine.kvCacheMemory`, choose a smaller model, or give `resources` "
            "more.",
        ),
    },
    "ModelReady": {
        "Fetched": Meaning("The weights are where engines find them."),
        "Fetching": Meaning(
            "They are on their way.",
            "`kubectl logs POD -c fetch -f` shows how far.",
        ),
        "FetchFailed": Meaning(
            "They can't be fetched; the message is the source's.",
            "A wrong name, a missing or wrong token (`model.secretRef`), a full disk (`model.cache.size`), no way "
            "to the source.",
        ),
        "NotFound": Meaning(
            "There is no model at that place: no such file, folder or package in the engine's container.",
            "Correct `model.uri`; `file://` needs an image or volume that has it, `pkg://` an image with the package.",
        ),
        "Waiting": Meaning(
            "No pod has begun to fetch.",
            "See `WorkloadReady`.",
        ),
    },
    "WorkloadReady": {
        "PodsReady": Meaning("All replicas answer."),
        "ScaledToZero": Meaning(
            "`spec.replicas` is 0.",
            "`kubectl scale infsvc NAME --replicas 1`",
        ),
        "Starting": Meaning(
            "Pods are starting and nothing is wrong so far.",
            "Large models take minutes: `kubectl logs POD`.",
        ),
        "QuotaExceeded": Meaning(
            "A ResourceQuota of the namespace leaves no room for the pods.",
            "`kubectl describe quota`. Raise it, or lower `resources` or `replicas`.",
        ),
        "PodRefused": Meaning(
            "The API server makes no such pods: Pod Security, a LimitRange, an admission webhook.",
            "The message says which rule.",
        ),
        "Unschedulable": Meaning(
            "No node has room; the message is the scheduler's.",
            "Lower `resources`, or add nodes; look at `nodeSelector`, `tolerations`, and that the claim of a "
            "`pvc://` model exists.",
        ),
        "MountFailed": Meaning(
            "A volume can't be mounted, or the pod's network not be set up; the message is the kubelet's event.",
            "Create the Secret or claim that it names, or correct the name. A `ReadWriteOnce` claim is for one "
            "node: `model.cache.accessMode`.",
        ),
        "ImagePullError": Meaning(
            "The image can't be had.",
            "A wrong name or tag, or missing `imagePullSecrets`.",
        ),
        "ConfigError": Meaning(
            "A Secret or ConfigMap that the container's environment refers to isn't there, or lacks the entry.",
            "Create it, or correct `model.secretRef` or `engine.env`.",
        ),
        "CrashLoop": Meaning(
            "The engine ends again and again; the message is its last line.",
            "`kubectl logs POD --previous`. Often an `engine.extraArgs` that it doesn't know.",
        ),
        "OOMKilled": Meaning(
            "It needed more memory than its limit.",
            "Raise `resources.limits.memory`, or lower `engine.kvCacheMemory`.",
        ),
        "StartFailed": Meaning(
            "The container runtime can't start the container; the message is the runtime's.",
            "An `engine.image` that is not an engine's, or a `runtimeClassName` that can't run it.",
        ),
    },
    "RouterReady": {
        "RouterServes": Meaning("All routers that there are answer."),
        "RouterDegraded": Meaning(
            "Routers answer, but another one doesn't come up: after a change of the spec those that answer may "
            "still be the old ones.",
            "The message says why. Often a Secret of API keys that isn't there.",
        ),
        "RouterStarting": Meaning("Routers are starting."),
        "RouterFailed": Meaning(
            "None comes up; the message says why.",
            "Often the Secret of `auth.apiKeysSecretRef`, or the image.",
        ),
    },
    "ReplicasAdmitted": {
        "AllAdmitted": Meaning("Every router knows what every replica has cached, and sends it requests."),
        "WaitingForRouter": Meaning(
            "A replica answers, but not every router follows it yet.",
            "A second or two, unless a NetworkPolicy is in the way.",
        ),
        "NoReplicas": Meaning("`spec.replicas` is 0."),
    },
    "Progressing": {
        "Complete": Meaning("One revision, the wanted one."),
        "RollingOut": Meaning(
            "A new revision comes up beside the one that serves; that one goes when the new one serves."
        ),
    },
    "Ready": {
        "Serving": Meaning("The current revision answers through the router."),
    },
}
