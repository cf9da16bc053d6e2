"""Every name that two parts of the system must agree on: labels, environment variables, ports, paths, derived names."""

from __future__ import annotations

GROUP = "rljob.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "RLJob"
PLURAL = "rljobs"
SINGULAR = "rljob"
SHORT = "rlj"
RESOURCE = f"{PLURAL}.{GROUP}"
"""For kubectl, and the CRD's name: another group may have a kind of that name too."""

# A RayCluster's name may have 53 characters (KubeRay refuses longer ones without a status), and KubeRay appends to it.
MAX_NAME_LENGTH = 40

LABEL_JOB = f"{GROUP}/job"
LABEL_ATTEMPT = f"{GROUP}/attempt"
LABEL_UID = f"{GROUP}/uid"
LABEL_MANAGED_BY = "app.kubernetes.io/managed-by"
MANAGED_BY = "rljob-operator"
LABEL_APP_COMPONENT = "app.kubernetes.io/component"
OPERATOR_COMPONENT = "operator"
# The attempt's spec as JSON, on its RayCluster: an edit of the RLJob does not change an attempt that runs.
ANNOTATION_SPEC = f"{GROUP}/spec"
# On a preflight pod: `preflight`. KubeRay's pods have no such label.
LABEL_COMPONENT = f"{GROUP}/component"
COMPONENT_PREFLIGHT = "preflight"
# The preflight's report as JSON, on the RayCluster that was made because of it: the preflight's pod goes then.
ANNOTATION_PREFLIGHT = f"{GROUP}/preflight"
# KubeRay's own label on the pods of a cluster, and its role label.
LABEL_RAY_CLUSTER = "ray.io/cluster"
LABEL_RAY_NODE_TYPE = "ray.io/node-type"
# KubeRay >= 1.6: without it a lost head comes back as an empty Ray that knows no job.
ANNOTATION_NO_HEAD_RESTART = "ray.io/disable-provisioned-head-restart"

GCS_PORT = 6379
DASHBOARD_PORT = 8265
# Ray's agent in each pod says there how its node is.
RAY_AGENT_PORT = 52365
RAY_HEALTH_PATH = "/api/healthz"
CLIENT_PORT = 10001
PROGRESS_PORT = 8090
PROGRESS_PORT_NAME = "progress"
PROGRESS_PATH = "/progress"
# POST, with the run's token as a bearer; answered while a step is under way.
CONTROL_SAVE_PATH = "/control/save"
CONTROL_STOP_PATH = "/control/stop"
# The driver's last log line is this and the final report as one line of JSON: Ray keeps it when the endpoint is gone.
REPORT_LINE_PREFIX = "RLJOB-REPORT "

ENV_SPEC = "RLJOB_SPEC"
ENV_NAME = "RLJOB_NAME"
ENV_NAMESPACE = "RLJOB_NAMESPACE"
ENV_UID = "RLJOB_UID"
ENV_ATTEMPT = "RLJOB_ATTEMPT"
ENV_VOLUME = "RLJOB_VOLUME"
# The preflight's report as JSON: which checkpoint to load, which token to write with. Unset: the driver asks the volume itself.
ENV_PREFLIGHT = "RLJOB_PREFLIGHT"
# The token's header where the API server's proxy carries the request: that takes Authorization for itself. Ray reads it too.
HEADER_PROXIED_TOKEN = "x-ray-authorization"  # noqa: S105 - the name of a header
# A file that holds the token of the driver's control endpoints. Unset: they are closed.
ENV_CONTROL_TOKEN_FILE = "RLJOB_CONTROL_TOKEN_FILE"  # noqa: S105 - the name of a variable
# Runs in the operator's image (no torch there); writes a PreflightReport to the file of ENV_TERMINATION_LOG.
PREFLIGHT_COMMAND = ("python", "-m", "rljob_workload.preflight")
ENV_TERMINATION_LOG = "RLJOB_TERMINATION_LOG"
TERMINATION_LOG = "/dev/termination-log"
# For agents: base URLs of the replicas' OpenAI servers (`dp_openai_server_base_urls`), separated by commas.
ENV_SERVER_URLS = "RLJOB_DP_OPENAI_SERVER_BASE_URLS"
# Directories of checkpoints that earlier attempts could not load, separated by commas: the preflight passes them over.
ENV_UNLOADABLE = "RLJOB_UNLOADABLE"
# Where the volume of checkpoint.from is mounted (that of the checkpoints where both are the same claim). Unset without it.
ENV_SOURCE = "RLJOB_SOURCE"
# Seconds of deadlines.activeSeconds that are left when the driver is submitted; earlier attempts are counted. Unset without it.
ENV_ACTIVE_SECONDS_LEFT = "RLJOB_ACTIVE_SECONDS_LEFT"
# Runs in every pod before it is stopped: asks the driver to save and end, and waits for it.
PRESTOP_COMMAND = ("python", "-m", "rljob_workload.runtime.prestop")
# For it: the driver's host, and how long a save may take.
ENV_DRIVER_HOST = "RLJOB_DRIVER_HOST"
ENV_SAVE_SECONDS = "RLJOB_SAVE_SECONDS"

# The attempt's token: Ray and the driver's control endpoints ask for it.
ACCESS_KEY = "auth_token"  # the key of a Secret that KubeRay expects
ACCESS_VOLUME_NAME = "rljob-access"
ACCESS_MOUNT_PATH = "/rljob/access"
ACCESS_TOKEN_FILE = f"{ACCESS_MOUNT_PATH}/{ACCESS_KEY}"

VOLUME_NAME = "rljob-checkpoints"
VOLUME_MOUNT_PATH = "/rljob/volume"
SOURCE_VOLUME_NAME = "rljob-source"
SOURCE_MOUNT_PATH = "/rljob/source"

# Constant: nothing from a spec ever becomes part of a shell string.
DRIVER_ENTRYPOINT = "python -m rljob_workload.runtime.main"

# Ray's custom resources that place actors: the driver's on the head, the ranks' on worker pods.
RESOURCE_HEAD = "rljob_head"
RESOURCE_NODE = "rljob_node"
RESOURCE_AMOUNT = 100

RAY_VERSION = "2.60.0"
WORKER_GROUP = "workers"
# Ray's container in head and worker pods; a container of this name in trainer.template is merged with it.
CONTAINER = "trainer"
PREFLIGHT_CONTAINER = "preflight"


def cluster_name(job: str, attempt: int) -> str:
    """The RayCluster of one attempt; also the Ray submission id, so that a submission is idempotent."""
    return f"{job}-{attempt}"


def submission_id(job: str, attempt: int) -> str:
    """Ray's submission id of one attempt: submitting it twice is refused by Ray itself."""
    return f"{job}-{attempt}"


def access_secret(cluster: str, uid: str) -> str:
    """The Secret with an attempt's token. With a part of the job's uid: a namesake that was deleted may still have its own."""
    return f"{cluster}-{uid[:8]}"


def network_policy(job: str, uid: str) -> str:
    """The NetworkPolicy of a run, all attempts."""
    return f"{job}-{uid[:8]}"


def preflight_pod(job: str, attempt: int) -> str:
    """The pod that looks at the checkpoint volume before the attempt's RayCluster exists."""
    return f"{job}-{attempt}-preflight"


def head_service(cluster: str) -> str:
    """The head Service that KubeRay creates for a RayCluster."""
    return f"{cluster}-head-svc"


def run_directory(namespace: str, name: str) -> str:
    """A job's directory below the volume's subPath."""
    return f"runs/{namespace}/{name}"


def driver_log(attempt: int) -> str:
    """The log of an attempt's driver, below the run directory; it outlives the pods."""
    return f"logs/driver-attempt-{attempt:06d}.log"


def checkpoint_directory(step: int, token: int) -> str:
    """One checkpoint below the run directory: step, then the fencing token that wrote it."""
    return f"step-{step:06d}-t{token:06d}"
