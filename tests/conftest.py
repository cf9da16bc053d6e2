"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# The same examples in every run, so that a change that broke nothing fails nothing; HYPOTHESIS_PROFILE=search draws new ones.
settings.register_profile("steady", derandomize=True)
settings.register_profile("search", derandomize=False, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))
