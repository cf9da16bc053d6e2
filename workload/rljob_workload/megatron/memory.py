"""The most memory that a rank took, by what it was doing.

On a GPU: bytes of its tensors, as torch's allocator counts them. On a CPU: the resident size of the process, whose high-water
mark Linux resets on demand, so a peak belongs to its phase. What was resident before a phase began counts for it too.
"""

from __future__ import annotations

from pathlib import Path

import torch

from rljob_workload.megatron import device

_STATUS = Path("/proc/self/status")
#: Writing 5 here sets the high-water mark to what is resident now. It costs microseconds: no page is looked at.
_RESET = Path("/proc/self/clear_refs")
_MARK = b"VmHWM:"


class PeakMemory:
    """Bytes by phase. `enter` ends a phase and begins the next; `take` hands over what has ended since the last time."""

    def __init__(self) -> None:
        self._phase = ""
        self._peaks: dict[str, int] = {}
        #: False where the mark cannot be reset (another kernel): peaks are then those of the process's whole life.
        self.by_phase = self._reset()

    def enter(self, phase: str) -> None:
        """From here on this phase."""
        if self._phase:
            self._peaks[self._phase] = max(self._peaks.get(self._phase, 0), self._peak())
        self._phase = phase
        self._reset()

    def take(self) -> dict[str, int]:
        """Peaks of the phases that have ended since the last call, in bytes."""
        taken, self._peaks = self._peaks, {}
        return taken

    def _peak(self) -> int:
        if device.kind() == "cuda":
            return torch.cuda.max_memory_allocated(device.current())
        # Without layers of text and paths: this stands between generation and training, twice a step.
        with _STATUS.open("rb", buffering=0) as file:
            status = file.read()
        return 1024 * int(status[status.index(_MARK) + len(_MARK) :].split(maxsplit=1)[0])

    def _reset(self) -> bool:
        if device.kind() == "cuda":
            torch.cuda.reset_peak_memory_stats(device.current())
            return True
        try:
            with _RESET.open("wb", buffering=0) as file:
                file.write(b"5")
        except OSError:
            return False
        return True
