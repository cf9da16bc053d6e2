"""What can go wrong on a rank. Apart from the modules that raise it, so that a driver can read it without importing torch."""

from __future__ import annotations


class DeviceError(Exception):
    """This process cannot compute as it was asked to."""


class EngineError(Exception):
    """The engine cannot serve a request."""


class NonFiniteError(Exception):
    """The loss or the gradient is not a number any more."""


class WeightsError(Exception):
    """A checkpoint's weights cannot be written or read."""
