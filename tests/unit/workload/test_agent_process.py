"""The agent's process: it is started again, it ends with the trainer, and nothing that it started stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from rljob_api import names
from rljob_workload.runtime import agent as module
from rljob_workload.runtime import agent_guard
from rljob_workload.runtime.agent import AgentError, AgentProcess

#: Writes its process and two children's, and waits; SIGTERM is not heeded.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
daemon = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
with open("{file}.new", "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}} {{daemon.pid}} {{os.getppid()}}")
os.rename("{file}.new", "{file}")
time.sleep(600)
"""


@dataclass
class Seen:
    """What the collector was told."""

    ended: list[str] = field(default_factory=list)
    by_itself: list[bool] = field(default_factory=list)
    failed: list[AgentError] = field(default_factory=list)
    reports: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def end(self, why: str, by_itself: bool) -> None:
        self.ended.append(why)
        self.by_itself.append(by_itself)

    def fail(self, error: AgentError) -> None:
        self.failed.append(error)
        self.over.set()

    def process(self, directory: Path, *command: str) -> AgentProcess:
        return AgentProcess(
            ["python", *command],
            directory / "agent.log",
            ["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"],
            "/the/token",
            reports=lambda: self.reports,
            ended=self.end,
            failed=self.fail,
        )


def processes(file: Path) -> list[psutil.Process]:
    """Agent, its child, one in a session of its own, and its guard, once they are there."""
    wait_for(file.exists)
    return [psutil.Process(int(number)) for number in file.read_text().split()]


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def all_gone(watched: list[psutil.Process]) -> None:
    psutil.wait_procs(watched, timeout=20)
    assert [one.pid for one in watched if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []


@pytest.fixture
def stubborn(tmp_path: Path) -> Iterator[tuple[Seen, AgentProcess, list[psutil.Process]]]:
    file = tmp_path / "pids"
    seen = Seen()
    agent = seen.process(tmp_path, "-c", STUBBORN.format(file=file))
    agent.start()
    yield seen, agent, processes(file)
    agent.close()


def test_an_agent_that_heeds_nothing_is_killed_with_all_that_it_started(
    stubborn: tuple[Seen, AgentProcess, list[psutil.Process]],
) -> None:
    seen, agent, watched = stubborn
    agent.close()
    all_gone(watched)
    assert seen.ended == []
    assert seen.failed == []


def test_a_killed_guard_takes_all_with_it_and_the_agent_is_started_again(
    stubborn: tuple[Seen, AgentProcess, list[psutil.Process]],
) -> None:
    seen, _, watched = stubborn
    watched[-1].kill()
    all_gone(watched)
    wait_for(lambda: (seen.ended, seen.by_itself) == (["the agent ended with its guard"], [False]))


def test_a_killed_trainer_leaves_nothing(tmp_path: Path) -> None:
    """The guard's standard input closes with whoever held it."""
    file = tmp_path / "pids"
    holder = subprocess.Popen(
        [sys.executable, "-c",
         "import subprocess, sys, time\n"
         "guard = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
         "time.sleep(600)",
         sys.executable, "-I", "-S", agent_guard.__file__, str(tmp_path / "log"),
         sys.executable, "-c", STUBBORN.format(file=file)],
        start_new_session=True,
    )  # fmt: skip
    watched = processes(file)
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    all_gone(watched)


@pytest.mark.parametrize(
    ("end", "by_itself"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", False),
        ("os.kill(os.getpid(), signal.SIGTERM)", False),
        ("sys.exit(137)", False),  # a shell's word for it
        ("os.kill(os.getpid(), signal.SIGSEGV)", True),
        ("sys.exit(3)", True),
    ],
)
def test_an_end_from_outside_is_told_from_one_of_its_own(tmp_path: Path, end: str, by_itself: bool) -> None:
    seen = Seen()
    seen.process(tmp_path, "-c", f"import os, signal, sys; {end}").start()
    assert seen.over.wait(20)
    assert seen.by_itself == [by_itself] * (module.MOST_USELESS_STARTS - 1)


def test_an_agent_that_only_ends_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    seen = Seen()
    seen.process(tmp_path, "-c", "import sys; print('no model here', file=sys.stderr); sys.exit(3)").start()
    assert seen.over.wait(20)
    assert len(seen.ended) == module.MOST_USELESS_STARTS - 1
    text = str(seen.failed[0])
    assert "the agent ended with exit code 3, 3 times without having reported a rollout" in text
    assert "no model here" in text


def test_exit_statuses_are_seen_also_where_the_trainer_ignores_its_childrens_ends(tmp_path: Path) -> None:
    """Ray ignores SIGCHLD in its processes; an agent that runs tests would believe that all of them succeed."""
    script = "import subprocess, sys; print('found', subprocess.run(['false']).returncode); sys.exit(3)"
    ignoring = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "guard = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "print(guard.stdout.read().decode())\n"
    )
    guard = [sys.executable, "-I", "-S", agent_guard.__file__, str(tmp_path / "log"), sys.executable, "-c", script]
    said = subprocess.run([sys.executable, "-c", ignoring, *guard], capture_output=True, text=True, timeout=60, check=True)
    assert '{"exit": 3}' in said.stdout
    assert (tmp_path / "log").read_text() == "found 1\n"


def test_an_agent_begins_with_no_signal_ignored_or_blocked(tmp_path: Path) -> None:
    parent = (
        "import signal, subprocess, sys\n"
        "for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGPIPE, signal.SIGHUP, signal.SIGINT):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])\n"
        "guard = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE, restore_signals=False)\n"
        "guard.stdout.read()\n"
    )
    agent = ["grep", "-E", "^Sig(Ign|Blk)", "/proc/self/status"]
    guard = [sys.executable, "-I", "-S", agent_guard.__file__, str(tmp_path / "log"), *agent]
    subprocess.run([sys.executable, "-c", parent, *guard], timeout=60, check=True)
    # The C library keeps two signals to itself: nobody can set them, whatever the environment has made of them.
    settable = sum(1 << number - 1 for number in signal.valid_signals())
    assert [int(line.split()[1], 16) & settable for line in (tmp_path / "log").read_text().splitlines()] == [0, 0]


def test_an_agent_that_prints_without_end_leaves_a_bounded_log_with_its_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = (
        f"print('first')\nfor _ in range({3 * agent_guard.LOG_BYTES // 2**20}): print('x' * (2**20 - 1))\nprint('last', end='')"
    )
    guard = [sys.executable, "-I", "-S", agent_guard.__file__, str(log), sys.executable, "-c", script]
    with subprocess.Popen(guard, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert b'{"exit": 0}' in running.stdout.read()
    assert log.read_bytes()[-5:] == b"\nlast"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["log", "log.1"]
    assert all(one.stat().st_size <= agent_guard.LOG_BYTES for one in tmp_path.iterdir())


def test_an_agent_that_gets_something_done_between_its_ends_is_started_again_and_again(tmp_path: Path) -> None:
    seen, lives = Seen(), 5
    agent = seen.process(tmp_path, "-c", "print('one more')")
    agent._reports = lambda: min(lives, (tmp_path / "agent.log").read_text().count("\n") if agent._guard else 0)
    agent.start()
    assert seen.over.wait(30)
    assert len(seen.ended) == lives + module.MOST_USELESS_STARTS - 1


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    seen = Seen()
    agent = seen.process(tmp_path)
    agent._command = ["/no/such/agent"]
    agent.start()
    assert seen.over.wait(20)
    assert "no start" in str(seen.failed[0])
    assert "/no/such/agent" in str(seen.failed[0])


def test_what_no_process_can_be_started_with_and_whatever_else_goes_wrong_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that keeps the agent does not just end: an agent would be waited for that is not there."""
    seen = Seen()
    seen.process(tmp_path, "-c", "nul\0byte").start()
    assert seen.over.wait(20)
    assert "the agent cannot be started: embedded null byte" in str(seen.failed[0])
    odd = Seen()
    agent = odd.process(tmp_path, "-c", "")
    monkeypatch.setattr(agent, "_run", lambda *_: 1 / 0)
    agent.start()
    assert odd.over.wait(20)
    assert "the agent cannot be kept: ZeroDivisionError" in str(odd.failed[0])


def test_addresses_and_the_tokens_file_come_by_environment(tmp_path: Path) -> None:
    seen = Seen()
    wanted = (names.ENV_SERVER_URLS, names.ENV_CONTROL_TOKEN_FILE)
    script = f"import os, sys; print(*map(os.environ.get, {wanted})); sys.exit(1)"
    seen.process(tmp_path, "-c", script).start()
    assert seen.over.wait(20)
    line = (tmp_path / "agent.log").read_text().splitlines()[0]
    assert line == "http://127.0.0.1:1/v1,http://127.0.0.1:2/v1 /the/token"


def test_a_log_that_cannot_be_written_ends_the_attempt_and_not_only_a_thread(tmp_path: Path) -> None:
    seen = Seen()
    agent = seen.process(tmp_path, "-c", "")
    agent._log_file = tmp_path / "no such directory" / "agent.log"
    agent.start()
    assert seen.over.wait(20)
    assert "no such directory" in str(seen.failed[0])
