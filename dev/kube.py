"""kubectl and the environment of the cluster that dev/cluster.sh speaks of, for the demo and the tests."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


class CommandError(RuntimeError):
    """A command failed; the message is the command and what it said."""


def cluster_environment() -> dict[str, str]:
    """This process's environment with KUBECONFIG and PATH of the cluster (`dev/cluster.sh env`). Raises CommandError."""
    environment = dict(os.environ)
    for line in run(str(ROOT / "dev/cluster.sh"), "env").splitlines():
        match = re.fullmatch(r"export (\w+)=(.*)", line.strip())
        if match:
            value = os.path.expandvars(" ".join(shlex.split(match[2])))
            environment[match[1]] = value
    environment["PATH"] = f"{ROOT / '.venv/bin'}:{environment['PATH']}"
    return environment


def run(*command: str, environment: dict[str, str] | None = None, given: str | None = None, timeout: float = 120) -> str:
    """Output of a command. Raises CommandError with its error output."""
    try:
        done = subprocess.run(
            command, env=environment, input=given, capture_output=True, text=True, check=False, timeout=timeout, cwd=ROOT
        )
    except subprocess.TimeoutExpired:
        raise CommandError(f"{shlex.join(command)}: no end after {timeout:g} s") from None
    except FileNotFoundError:
        raise CommandError(f"{command[0]}: no such command") from None
    if done.returncode:
        raise CommandError(
            f"{shlex.join(command)}: exit status {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout


class Kubectl:
    """kubectl in one namespace."""

    def __init__(self, environment: dict[str, str], namespace: str = "default") -> None:
        self.environment = environment
        self.namespace = namespace

    def __call__(self, *arguments: str, given: str | None = None, timeout: float = 120) -> str:
        return run("kubectl", "-n", self.namespace, *arguments, environment=self.environment, given=given, timeout=timeout)

    def json(self, *arguments: str) -> Any:
        """Parsed output of a command with `-o json`."""
        return json.loads(self(*arguments, "-o", "json"))

    def find(self, kind: str, name: str) -> dict[str, Any] | None:
        """One object, or None."""
        text = self("get", kind, name, "--ignore-not-found", "-o", "json")
        return json.loads(text) if text.strip() else None

    def pods(self, selector: str) -> list[dict[str, Any]]:
        """Pods by label selector."""
        return list(self.json("get", "pods", "-l", selector)["items"])
