"""Imported once by the process that ranks are forked from: what takes seconds, and starts no thread."""

from rljob_workload.megatron import device

device.prepare()

import megatron.core.inference.engines.dynamic_engine  # noqa: E402
import megatron.core.parallel_state  # noqa: E402, F401

from rljob_workload.megatron import engine, model, policy, weights  # noqa: E402, F401
