"""Signals end a run between steps: the first is kept, a second Ctrl-C ends the process at once."""

import os
import signal

import pytest
import torch

from headstart.signals import Stopped, terminable
from headstart.train.backends import make_parallel
from headstart.train.config import ParallelConfig, TrainConfig
from headstart.train.parallel import Parallel
from headstart.train.stopping import Stop


@pytest.fixture
def alone() -> Parallel:
    return make_parallel(ParallelConfig(), TrainConfig(precision="fp32"), torch.device("cpu"))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_kept_until_it_is_asked_for(alone, number, status):
    before = signal.getsignal(number)

    def run() -> None:
        with Stop(alone) as stop:
            assert not stop.asked()
            os.kill(os.getpid(), number)
            assert stop.asked()
            raise stop.error()

    with pytest.raises(Stopped) as stopped:
        run()
    assert stopped.value.exit_code == status
    assert signal.getsignal(number) is before


def test_more_sigterms_change_nothing(alone):
    def run() -> None:
        with Stop(alone) as stop:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
            assert stop.asked()
            raise stop.error()

    with pytest.raises(Stopped):
        run()


def test_a_signal_after_the_last_step_ends_the_run_when_its_work_is_done(alone):
    done = []

    def run() -> None:
        with Stop(alone):
            os.kill(os.getpid(), signal.SIGTERM)
            done.append("evaluation")

    with pytest.raises(Stopped) as stopped:
        run()
    assert done == ["evaluation"]
    assert stopped.value.exit_code == 143


def test_a_second_ctrl_c_ends_the_process_at_once(alone):
    child = os.fork()
    if child == 0:
        with Stop(alone):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 130


def test_a_signal_that_the_process_ignores_stays_ignored(alone):
    """As of what a shell starts in the background, or under nohup."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Stop(alone) as stop:
            os.kill(os.getpid(), signal.SIGINT)
            assert not stop.asked()
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_loop_sigterm_is_raised_so_that_what_is_open_is_closed():
    closed = []

    def run() -> None:
        with terminable():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
            finally:
                closed.append(True)

    with pytest.raises(Stopped):
        run()
    assert closed
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
