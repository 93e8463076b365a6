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
    """Return a function that serves the shards of a center, each with a journal."""

    def serve(rule, shards=1):
        rule = resumed_pod.RULES[rule]
        kept = [Journal(tmp_path / f"center-{i}") for i in range(shards)]
        return [
            stack.enter_context(service.serve(rule, durability=journal))
            for journal in kept
        ]

    return serve
