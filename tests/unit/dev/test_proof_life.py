"""How a life of the proof is ended, on real processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from dev.proof import life as module
from dev.proof.life import Life, size

#: A child in a process group of its own, as Ray's daemons start their workers, that goes on and on.
CHILD = """
import os, sys
os.setpgid(0, 0)
while True:
    with open(sys.argv[1], "ab", buffering=0) as file:
        file.write(b".")
"""
#: SIGHUP is ignored, as under nohup, and children inherit that.
DRIVER = """
import signal, subprocess, sys
signal.signal(signal.SIGHUP, signal.SIG_IGN)
subprocess.run([sys.executable, "-c", sys.argv[2], sys.argv[1]])
"""


def test_a_process_that_is_held_does_nothing_more_when_the_life_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel continues stopped processes whose parent dies; a collector would commit what the kill was to catch."""
    written = tmp_path / "written"
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(written), CHILD], start_new_session=True)
    life = Life(tmp_path, 1, driver, 0, 0)
    try:
        assert life.wait_until(lambda: size(written) > 0, "the child writes", seconds=30)
        (child,) = psutil.Process(driver.pid).children()
        child.suspend()
        assert life.wait_until(lambda: child.status() == psutil.STATUS_STOPPED, "the child is held", seconds=30)
        before = size(written)
        kill = module._kill

        def killed_late(process: psutil.Process) -> None:
            time.sleep(0.2)  # a busy machine
            kill(process)

        monkeypatch.setattr(module, "_kill", killed_late)
    finally:
        life.kill()
    assert size(written) == before
