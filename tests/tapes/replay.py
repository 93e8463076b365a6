"""Replay the golden tapes in this process: run by tests/center/test_golden_tapes.py."""

import json
import pathlib
import runpy

import jax
import numpy as np

from agn_optax.center import Store
from agn_optax.center.durability._directory import Files
from agn_optax.center.durability._replay import apply_record, state_in
from agn_optax.center.durability._stack import stack

FOLDER = pathlib.Path(__file__).parent
RULES = runpy.run_path(str(FOLDER / "make.py"))["RULES"]


def records(name):
    files = Files(FOLDER / name)
    return [
        each for segment in files.segments() for each in files.read_segment(segment)
    ]


def compared(name):
    """Yield the states of a replay, each with that of a snapshot on the way."""
    rule, files = RULES[name](), Files(FOLDER / name)
    saved = {
        number: state_in(files.read_snapshot(number), rule, None, None, "the tape")
        for number in files.numbers("snapshot")
    }
    store = Store.restore(rule, saved.pop(0))
    for record in records(name):
        apply_record(record, store)
        assert store.current.number == record.about["version"]
        if record.number + 1 in saved:
            yield store.save(), saved.pop(record.number + 1)
    assert not saved


def made_on(name):
    """Return the stack in the header of a tape."""
    return Files(FOLDER / name).read_snapshot(0).about["stack"]


def is_equal(found, expected):
    """Return whether all bits of two states are equal."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


if __name__ == "__main__":
    for name in RULES:
        equal = [is_equal(*pair) for pair in compared(name)]
        result = {"name": name, "stack": stack(), "equal": equal}
        print(json.dumps(result))  # noqa: T201 read by the test
