"""The operator's log: text for people, or one JSON object a line, with the job and the attempt that a record is about."""

from __future__ import annotations

import contextvars
import datetime
import json
import logging

from .world import Key

TEXT = "Text"
JSON = "Json"

_SUBJECT: contextvars.ContextVar[tuple[Key, int] | None] = contextvars.ContextVar("subject", default=None)


def about(key: Key, attempt: int) -> None:
    """From here on, records of this task are about that job and attempt."""
    _SUBJECT.set((key, attempt))


class JsonFormatter(logging.Formatter):
    """One object a line: time, level, logger, message; namespace, job, attempt where it is about one; traceback of an error."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        fields: dict[str, object] = {
            "time": time,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (subject := _SUBJECT.get()) is not None:
            (namespace, name), attempt = subject
            fields |= {"namespace": namespace, "job": name, "attempt": attempt}
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """A line for people; the attempt is added where there is one (the job stands in the messages)."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s%(attempt)s", datefmt="%Y-%m-%dT%H:%M:%S%z")

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        subject = _SUBJECT.get()
        record.attempt = f" [attempt {subject[1]}]" if subject is not None and subject[1] else ""
        return super().format(record)


class RetryIsNoError(logging.Filter):
    """kopf calls an error what it asks again for, such as the 429 of an API server that has just learnt of a kind."""

    def __init__(self, least: int) -> None:
        super().__init__("kopf")
        self._least = least

    def filter(self, record: logging.LogRecord) -> bool:
        """Take a request that is repeated for what it is; let everything else through."""
        if record.levelno == logging.ERROR and super().filter(record) and "; will retry: " in record.getMessage():
            record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
        return record.levelno >= self._least


def configure(level: str, form: str) -> None:
    """Log to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if form == JSON else TextFormatter())
    logging.basicConfig(level=level, handlers=[handler])
    handler.addFilter(RetryIsNoError(logging.getLogger().level))
