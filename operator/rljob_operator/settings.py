"""The operator's settings, from environment variables (the chart sets them)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DIRECT = "Direct"
API_SERVER_PROXY = "ApiServerProxy"


class SettingsError(ValueError):
    """A setting is unusable; the message names the variable, its value and what would do."""


@dataclass(frozen=True)
class Settings:
    """How the operator runs."""

    namespaces: tuple[str, ...] = ()
    """Namespaces to serve; empty means all."""
    ray_access: str = DIRECT
    """How Ray and the driver are reached: Direct, ApiServerProxy, or a URL with {service}, {namespace} and {port}."""
    key_file: str = ""
    """File of the key that the runs' tokens are derived from."""
    operator_namespace: str = ""
    """Namespace of the operator's pods; empty where it reaches Ray from elsewhere."""
    preflight_image: str = ""
    """Image of the pods that look at checkpoint volumes (the operator's own); empty: drivers look themselves."""
    poll_seconds: float = 2.0
    """Time between two looks at a running driver."""
    status_seconds: float = 15.0
    """Least time between two status writes that bring only new numbers."""
    resync_seconds: float = 300.0
    """Time between two complete listings."""
    workers: int = 8
    """Jobs handled at the same time."""
    health_port: int = 8080
    """Port of /healthz, /readyz and /metrics; 0 serves none."""
    log_format: str = "Text"
    """Text, or Json: one object a line."""
    log_level: str = "INFO"
    """DEBUG, INFO, WARNING or ERROR."""


_HELP = {
    "RLJOB_NAMESPACES": ("namespaces", "namespaces to serve, separated by commas; unset: all"),
    "RLJOB_RAY_ACCESS": ("ray_access", "Direct (in the cluster), ApiServerProxy (outside it) or a URL pattern"),
    "RLJOB_KEY_FILE": ("key_file", "file of the secret key that each run's token is derived from (32 bytes or more); required"),
    "RLJOB_OPERATOR_NAMESPACE": ("operator_namespace", "namespace of the operator's pods, for the runs' network policies"),
    "RLJOB_PREFLIGHT_IMAGE": (
        "preflight_image",
        "image of the pods that look at checkpoint volumes (the operator's own); unset: drivers look themselves",
    ),
    "RLJOB_POLL_SECONDS": ("poll_seconds", "time between two looks at a running driver"),
    "RLJOB_STATUS_SECONDS": ("status_seconds", "least time between two status writes that bring only new numbers"),
    "RLJOB_RESYNC_SECONDS": ("resync_seconds", "time between two complete listings"),
    "RLJOB_WORKERS": ("workers", "jobs handled at the same time"),
    "RLJOB_HEALTH_PORT": ("health_port", "port of /healthz, /readyz and /metrics; 0 serves none"),
    "RLJOB_LOG_FORMAT": ("log_format", "Text, or Json: one object a line, with job and attempt"),
    "RLJOB_LOG_LEVEL": ("log_level", "DEBUG, INFO, WARNING or ERROR"),
}


def from_environment(environment: Mapping[str, str]) -> Settings:
    """The settings; unset variables take the defaults. Raises SettingsError."""
    values: dict[str, object] = {}
    for variable, (name, _) in _HELP.items():
        text = environment.get(variable, "").strip()
        if text:
            values[name] = _read(variable, name, text)
    return Settings(**values)  # type: ignore[arg-type]


def describe() -> str:
    """The variables with their defaults, for --help."""
    defaults = Settings()
    lines = []
    for variable, (name, text) in _HELP.items():
        value = getattr(defaults, name)
        shown = "" if value in ((), "") else f" (default {value:g})" if isinstance(value, float) else f" (default {value})"
        lines.append(f"  {variable:<22} {text}{shown}")
    return "\n".join(lines)


def _read(variable: str, name: str, text: str) -> object:
    match name:
        case "namespaces":
            return tuple(part for one in text.split(",") if (part := one.strip()))
        case "key_file" | "operator_namespace" | "preflight_image":
            return text
        case "ray_access":
            if text in {DIRECT, API_SERVER_PROXY} or ("://" in text and "{service}" in text):
                return text
            raise SettingsError(f"{variable}={text!r}; {DIRECT}, {API_SERVER_PROXY} or a URL with {{service}} would do")
        case "log_format":
            if text.capitalize() in {"Text", "Json"}:
                return text.capitalize()
            raise SettingsError(f"{variable}={text!r}; Text or Json would do")
        case "log_level":
            if text.upper() in {"DEBUG", "INFO", "WARNING", "ERROR"}:
                return text.upper()
            raise SettingsError(f"{variable}={text!r}; DEBUG, INFO, WARNING or ERROR would do")
        case "workers" | "health_port":
            least = 1 if name == "workers" else 0
            if text.isdecimal() and least <= int(text) <= 65535:
                return int(text)
            raise SettingsError(f"{variable}={text!r}; an integer from {least} to 65535 would do")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.05 <= seconds <= 86_400:
        raise SettingsError(f"{variable}={text!r}; a number of seconds from 0.05 to 86400 would do")
    return seconds
