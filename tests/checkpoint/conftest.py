"""Fixtures of the tests with workers of several processes."""

import contextlib

import pytest
from helpers import resumed_pod

from agn_optax import service
from agn_optax.center import Journal


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def served(stack, tmp_path):
    """Return a function that serves a center of a rule, with a journal."""

    def serve(rule):
        kept = Journal(tmp_path / "center")
        rule = resumed_pod.RULES[rule]
        return stack.enter_context(service.serve(rule, durability=kept))

    return serve
