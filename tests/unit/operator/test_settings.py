"""Settings from the environment: every bad value is named with what would do."""

from __future__ import annotations

import pytest

from rljob_operator.settings import Settings, SettingsError, describe, from_environment


def test_defaults() -> None:
    assert from_environment({}) == Settings()


def test_all_are_read() -> None:
    environment = {
        "RLJOB_NAMESPACES": "a, b,",
        "RLJOB_RAY_ACCESS": "http://127.0.0.1:1/{namespace}/{service}/{port}",
        "RLJOB_STATUS_SECONDS": "5",
        "RLJOB_POLL_SECONDS": "0.5",
        "RLJOB_WORKERS": "2",
        "RLJOB_HEALTH_PORT": "0",
        "RLJOB_LOG_LEVEL": "debug",
    }
    settings = from_environment(environment)
    assert settings.namespaces == ("a", "b")
    assert (settings.status_seconds, settings.poll_seconds, settings.workers, settings.health_port) == (5.0, 0.5, 2, 0)
    assert settings.log_level == "DEBUG"


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RLJOB_RAY_ACCESS", "proxy"),
        ("RLJOB_POLL_SECONDS", "soon"),
        ("RLJOB_POLL_SECONDS", "0"),
        ("RLJOB_POLL_SECONDS", "nan"),
        ("RLJOB_WORKERS", "0"),
        ("RLJOB_HEALTH_PORT", "99999"),
        ("RLJOB_LOG_LEVEL", "loud"),
    ],
)
def test_a_bad_value_is_named(variable: str, value: str) -> None:
    with pytest.raises(SettingsError) as error:
        from_environment({variable: value})
    assert f"{variable}={value!r}" in str(error.value)
    assert "would do" in str(error.value)


def test_help_names_every_variable() -> None:
    text = describe()
    for variable in ("RLJOB_NAMESPACES", "RLJOB_RAY_ACCESS", "RLJOB_STATUS_SECONDS", "RLJOB_RESYNC_SECONDS"):
        assert variable in text
