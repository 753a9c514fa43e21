"""A signal to stop, wherever it comes: neither lost, nor told as another error."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.server.signals import STOP_SIGNALS, Interrupt, blocked_stop_signals, stop_signals

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 60


class Finalized:
    """Takes a signal where nothing that a handler raises gets out."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Iterator[Interrupt]:
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    interrupt = Interrupt()
    with stop_signals(interrupt):
        yield interrupt


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_while_held_ends_the_program_after(interrupt: Interrupt, number: signal.Signals) -> None:
    steps: list[str] = []

    def program() -> None:
        with interrupt.held():
            Finalized(number)
            steps.append("held")
        steps.append("after")

    with pytest.raises(SystemExit) as caught:
        program()
    assert steps == ["held"] and caught.value.code == 0


def test_a_signal_ends_the_program_where_it_waits(interrupt: Interrupt) -> None:
    with interrupt.held():
        pass
    with pytest.raises(SystemExit) as caught:
        signal.raise_signal(signal.SIGINT)
    assert caught.value.code == 0


def test_control_what_a_handler_raises_can_be_lost(interrupt: Interrupt) -> None:
    Finalized(signal.SIGINT)
    with pytest.raises(SystemExit):
        signal.raise_signal(signal.SIGINT)


def test_a_blocked_signal_comes_after(interrupt: Interrupt) -> None:
    steps: list[str] = []

    def program() -> None:
        with blocked_stop_signals():
            # One to the process could go to any of its threads.
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
            steps.append("blocked")
        steps.append("after")

    with pytest.raises(SystemExit):
        program()
    assert steps == ["blocked"]


@pytest.mark.parametrize(("ignores", "code"), [(True, 0), (False, -signal.SIGTERM)])
def test_a_process_that_is_started_blocked_decides_for_itself(ignores: bool, code: int) -> None:
    """One that waits when it is told to ignore both is dropped, and those that come later; a process that only lets both through is ended."""
    decision = "ignore_stop_signals()" if ignores else "signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)"
    program = "\n".join(
        (
            "import os, signal",
            "from atoll.server.signals import STOP_SIGNALS, ignore_stop_signals",
            "os.kill(os.getpid(), signal.SIGTERM)",
            decision,
            "os.kill(os.getpid(), signal.SIGTERM)",
        )
    )
    with blocked_stop_signals():
        process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, start_new_session=True)
    assert process.wait(WAIT_S) == code
