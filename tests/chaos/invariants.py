"""Invariants of every scenario. Each check adds a sentence for each violation."""

import jax
import numpy as np
from chaos import model
from chaos.tally import in_turn

import agn_optax
from agn_optax.center import Journal

_ROUNDING = 1e-3  # tolerance of an element, for codecs whose errors add up


def check_counts(seen, tallies, scenario, broken):
    """Check that every acknowledged step is in the center, and none twice.

    Args:
      seen: the center's elements, each moved by -1 at every step.
      tallies: tallies of the workers.
      scenario: scenario that was run.
      broken: list to which violations are appended.
    """
    if scenario.rule != "downpour":
        return
    for number, tally in enumerate(tallies):
        moved = -seen[number]
        if scenario.codec == "chained":
            whole = np.round(moved)
            moved = np.where(np.abs(moved - whole) < _ROUNDING, whole, moved)
        least = np.zeros_like(tally.least) if scenario.is_lossy else tally.least
        lost, twice = np.sum(moved < least), np.sum(moved > tally.most)
        if lost or twice or np.any(moved != np.round(moved)):
            broken.append(f"worker {number}: {lost} steps lost, {twice} counted twice")
    rest = np.delete(seen, range(len(tallies)), axis=0)
    if np.any(rest):
        broken.append("the center has moved where nobody has moved it")


def check_turns(seen, tallies, scenario, broken):
    """Check that the center has the first steps of resumed workers, each once."""
    if not scenario.resumes:
        return
    for number in range(len(tallies)):
        moved = -seen[number]
        if np.any(moved != in_turn(int(np.sum(moved)), len(moved))):
            broken.append(f"worker {number}: there are steps without those before")


def check_claims(params, tallies, scenario, broken):
    """Check that steps and weights claimed by messages equal those of the moves.

    Args:
      params: the center, whose leaf ``b`` has added up weights and steps.
      tallies: tallies of the workers; a step of worker n weighs n + 1.
      scenario: scenario that was run.
      broken: list to which violations are appended.
    """
    if not scenario.weighs:
        return
    moved = -model.table(params).sum(axis=1)[: len(tallies)]
    weight, steps, _ = np.asarray(params["b"])
    for name, claimed, made in (
        ("weight", weight, moved @ np.arange(1, len(tallies) + 1)),
        ("steps", steps, moved.sum()),
    ):
        if claimed != made:
            broken.append(f"messages claim {name} {claimed:g}, and moved {made:g}")


def check_conservation(seen, ends, tallies, broken):
    """Check that elastic averaging conserves the sum of center and workers.

    Args:
      seen: the center.
      ends: parameters of the workers when they left.
      tallies: tallies of the workers.
      broken: list to which violations are appended.
    """
    if len(ends) < len(tallies):
        return  # a missing worker is reported elsewhere
    made = np.zeros_like(seen, np.float64)
    for number, tally in enumerate(tallies):
        made[number] = -tally.most
    have = seen.astype(np.float64) + sum(
        end.astype(np.float64) for end in ends.values()
    )
    wrong = np.max(np.abs(have - made))
    if wrong > 1e-3 * max(1.0, np.max(np.abs(made))):
        broken.append(f"elastic averaging has lost or made up to {wrong}")


def check_versions(tallies, scenario, broken):
    """Check that versions grow, and that no center is lost unless it may forget."""
    for number, tally in enumerate(tallies):
        if tally["backwards"]:
            broken.append(f"worker {number} saw {tally['backwards']} versions go back")
        if tally["lost"] and not scenario.is_lossy:
            broken.append(f"worker {number} lost {tally['lost']} centers")


def check_journal(seen, folder, rule, broken):
    """Check that the center on disk equals the last one, bit for bit."""
    center = agn_optax.LocalCenter(rule, durability=Journal(folder))
    try:
        kept = jax.tree.leaves(center.pull().params)
    finally:
        center.close()
    was = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(seen)]
    if [np.asarray(leaf).tobytes() for leaf in kept] != was:
        broken.append(f"what is kept in {folder.name} is another center")
