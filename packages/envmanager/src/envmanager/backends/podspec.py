"""What is asked of Kubernetes: the manifest of one environment's pod, and of the set that pulls its image beforehand.

Invariants:
- every object has the labels of its owner and of its run, by which it is found and removed
  (test_envmanager_podspec.py::test_every_object_says_whose_it_is);
- every container has requests and limits, and no way up: no privileges, no service account
  (test_envmanager_podspec.py::test_limits_and_no_privileges).
"""

import re
import secrets
from typing import Any, Literal

import msgspec

OWNER = "envmanager/owner"
RUN = "envmanager/run"
ROLE = "envmanager/role"
CONTAINER = "environment"
LABEL = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")
SLEEP = "import signal; signal.signal(signal.SIGTERM, lambda *_: exit()); signal.pause()"

Manifest = dict[str, Any]
Role = Literal["environment", "prefetch"]


class PodTemplate(msgspec.Struct, frozen=True, kw_only=True):
    """A pod that serves environments named `env`, from an image that has envmanager installed with what `env` needs.

    `cpu` and `memory` are both request and limit. `pull` is the image pull policy. A pod ends by itself after
    `lifetime_s`, whatever became of whoever made it. `spec` is merged over the pod's spec: node selectors,
    tolerations, runtime class, further security.
    """

    image: str
    env: str
    cpu: str = "500m"
    memory: str = "512Mi"
    port: int = 8800
    pull: str = "IfNotPresent"
    lifetime_s: int = 6 * 3600
    grace_s: int = 5
    spec: dict[str, Any] = {}

    def __post_init__(self) -> None:
        if not self.image or not self.env:
            raise ValueError(f"image is {self.image!r} and env is {self.env!r}; name both")
        if self.lifetime_s < 1 or self.grace_s < 0:
            raise ValueError(f"lifetime_s is {self.lifetime_s} and grace_s is {self.grace_s}; use at least 1 and 0")


class Owner(msgspec.Struct, frozen=True):
    """Whose objects these are: `name` outlives a run, so that the next one finds what this one left."""

    name: str
    run: str

    @classmethod
    def new(cls, name: str) -> "Owner":
        if not LABEL.fullmatch(name):
            raise ValueError(f"owner is {name!r}; use at most 40 lowercase letters, digits and inner hyphens")
        return cls(name, secrets.token_hex(8))

    def labels(self, role: Role) -> dict[str, str]:
        return {OWNER: self.name, RUN: self.run, ROLE: role}

    def mine(self, role: Role) -> str:
        """Selects this run's objects of a role."""
        return f"{OWNER}={self.name},{RUN}={self.run},{ROLE}={role}"

    @property
    def orphans(self) -> str:
        """Selects what earlier runs left."""
        return f"{OWNER}={self.name},{RUN}!={self.run}"


def merged(base: Any, over: Any) -> Any:
    """Dictionaries key by key; anything else is replaced."""
    if isinstance(base, dict) and isinstance(over, dict):
        return base | {key: merged(base.get(key), value) for key, value in over.items()}
    return over


def _container(template: PodTemplate, command: list[str], cpu: str, memory: str) -> Manifest:
    amounts = {"cpu": cpu, "memory": memory}
    return {
        "name": CONTAINER,
        "image": template.image,
        "imagePullPolicy": template.pull,
        "command": command,
        "resources": {"requests": amounts, "limits": amounts},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }


def _spec(template: PodTemplate, container: Manifest) -> Manifest:
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": template.grace_s,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
    }


def pod(template: PodTemplate, owner: Owner, token: str) -> Manifest:
    """One environment's pod, under a name of its own; its server answers only to the token."""
    serve = ["envmanager", "serve-env", template.env, "--host", "$(POD_IP)", "--port", str(template.port)]
    container = _container(template, serve, template.cpu, template.memory) | {
        "ports": [{"containerPort": template.port}],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "ENVMANAGER_TOKEN", "value": token},
        ],
        "readinessProbe": {"httpGet": {"path": "/health", "port": template.port}, "periodSeconds": 1},
    }
    spec = _spec(template, container) | {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": template.lifetime_s,
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"{owner.name}-{secrets.token_hex(6)}", "labels": owner.labels("environment")},
        "spec": merged(spec, template.spec),
    }


def prefetch(template: PodTemplate, owner: Owner) -> Manifest:
    """A DaemonSet that holds the image on every node where the pods may run, and does nothing."""
    labels = owner.labels("prefetch")
    spec = _spec(template, _container(template, ["python", "-c", SLEEP], "10m", "32Mi"))
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": f"{owner.name}-prefetch-{owner.run}", "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": merged(spec, {key: value for key, value in template.spec.items() if key != "nodeName"}),
            },
        },
    }
