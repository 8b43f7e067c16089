"""Reading ahead: the same order, errors at their turn, and an end."""

import os
import signal
import subprocess
import sys
import threading
import time
from itertools import count, islice

import pytest

from headstart.data.ahead import read_ahead


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_loads_come_in_the_order_of_the_jobs(workers):
    def load(job: int) -> int:
        time.sleep(0.002 * (job % 3))
        return job * job

    assert list(read_ahead(iter(range(12)), load, workers)) == [(i, i * i) for i in range(12)]


def test_endless_jobs_are_not_read_far_ahead():
    asked = []
    loads = read_ahead(iter(count()), asked.append, 2)
    list(islice(loads, 3))
    loads.close()
    assert len(asked) <= 3 + 2


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_is_raised_at_the_turn_of_its_job(workers):
    def load(job: int) -> int:
        if job == 2:
            raise ValueError("job 2 is damaged")
        return job

    loads = read_ahead(iter(range(5)), load, workers)
    assert [job for job, _ in islice(loads, 2)] == [0, 1]
    with pytest.raises(ValueError, match="job 2 is damaged"):
        next(loads)


def test_closing_ends_the_threads():
    loads = read_ahead(iter(count()), lambda job: job, 3)
    next(loads)
    loads.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("read-ahead")]


WAITING = """
import itertools, time
from headstart.data.ahead import read_ahead
def load(job):
    if job == 0:
        print("reading", flush=True)
    time.sleep(0.3)
for _ in read_ahead(itertools.count(), load, 4):
    pass
"""


def test_ctrl_c_ends_a_process_that_waits_for_its_readers():
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING],
        env=dict(os.environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "reading\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
