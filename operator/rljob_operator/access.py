"""Who may speak to a run: a token for each attempt, the Secret that brings it to the pods, and the run's NetworkPolicy. Pure.

The token is derived (HMAC) from a key that only the operator holds, the job's uid and the attempt's number. So the operator
needs no right to read Secrets, keeps nothing, derives the same token after a restart, and what leaks from one attempt
opens no other.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from pathlib import Path
from typing import Any

from rljob_api import names

from .render import owner
from .world import Job

LEAST_KEY_BYTES = 32

_DNS_PORT = 53


class KeyFileError(Exception):
    """The file with the operator's key is unusable; the message says which and what would do."""


def read_key(path: str) -> bytes:
    """The operator's key. Raises KeyFileError."""
    would_do = f"at least {LEAST_KEY_BYTES} random bytes would do: head -c 48 /dev/urandom | base64 > FILE"
    if not path:
        raise KeyFileError(
            f"RLJOB_KEY_FILE is not set: it names the file of the key that the runs' tokens come from; {would_do}"
        )
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise KeyFileError(f"RLJOB_KEY_FILE={path!r}: {error.strerror or error}; {would_do}") from None
    if len(key) < LEAST_KEY_BYTES:
        raise KeyFileError(f"RLJOB_KEY_FILE={path!r}: the key has {len(key)} bytes; {would_do}")
    return key


class Access:
    """Tokens of attempts, and the objects that guard a run."""

    def __init__(self, key: bytes, operator_namespace: str = "") -> None:
        """`operator_namespace`: where the operator's pods are; empty where it comes from outside the cluster's pods."""
        self._key = key
        self._operator_namespace = operator_namespace

    def token(self, job: Job) -> str:
        """The token of the job's current attempt: 64 hexadecimal digits."""
        text = f"{job.uid}/{job.status.attempt}".encode()
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()

    def secret(self, job: Job) -> dict[str, Any]:
        """The Secret of the job's current attempt."""
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": _metadata(job, names.access_secret(job.cluster_name, job.uid)),
            "type": "Opaque",
            "immutable": True,
            "data": {names.ACCESS_KEY: base64.b64encode(self.token(job).encode()).decode()},
        }

    def network_policy(self, job: Job) -> dict[str, Any]:
        """Pods of the run speak to each other and to DNS; the operator may ask Ray's dashboard and the driver.

        Policies add up, so a run that needs more (a reward service, say) gets it from another policy on the same label.
        """
        run = {"matchLabels": {names.LABEL_UID: job.uid}}
        asked = [{"port": names.DASHBOARD_PORT, "protocol": "TCP"}, {"port": names.PROGRESS_PORT, "protocol": "TCP"}]
        from_operator: dict[str, Any] = {"ports": asked}
        if self._operator_namespace:
            from_operator["from"] = [
                {
                    "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": self._operator_namespace}},
                    "podSelector": {"matchLabels": {names.LABEL_APP_COMPONENT: names.OPERATOR_COMPONENT}},
                }
            ]
        return {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": _metadata(job, names.network_policy(job.name, job.uid)),
            "spec": {
                "podSelector": run,
                "policyTypes": ["Ingress", "Egress"],
                "ingress": [{"from": [{"podSelector": run}]}, from_operator],
                "egress": [
                    {"to": [{"podSelector": run}]},
                    {"ports": [{"port": _DNS_PORT, "protocol": protocol} for protocol in ("UDP", "TCP")]},
                ],
            },
        }


def _metadata(job: Job, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": {names.LABEL_JOB: job.name, names.LABEL_UID: job.uid, names.LABEL_MANAGED_BY: names.MANAGED_BY},
        "ownerReferences": [owner(job)],
    }
