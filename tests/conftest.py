"""Fixtures that many tests share; the builders are in models.py."""

import signal

import pytest
from models import target_of, tiny_model

from headstart.heads.target import Target

# A shell lets what it starts in the background ignore Ctrl-C, and children inherit that: the tests
# that interrupt a command would wait for nothing.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny() -> Target:
    """TINY, wrapped: frozen, so one serves all tests."""
    return target_of(tiny_model())


@pytest.fixture(scope="session")
def tied() -> Target:
    """TINY-TIED, wrapped."""
    return target_of(tiny_model(tied=True), name="tiny-tied")
