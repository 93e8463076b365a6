"""What must hold, whatever happened. Each law adds a sentence for what broke it."""

import jax
import numpy as np

import agn_optax
from agn_optax.center import Journal


def check_counts(seen, tallies, scenario, broken):
    """Every step that was answered is in the center, and none is twice.

    Args:
      seen: the center, whose elements every step has moved by -1.
      tallies: of the workers.
      scenario: that was run.
      broken: where what is broken is put.
    """
    if scenario.rule != "downpour":
        return
    for number, tally in enumerate(tallies):
        moved = -seen[number]
        least = np.zeros_like(tally.least) if scenario.is_lossy else tally.least
        lost, twice = np.sum(moved < least), np.sum(moved > tally.most)
        if lost or twice or np.any(moved != np.round(moved)):
            broken.append(f"worker {number}: {lost} steps lost, {twice} counted twice")
    rest = np.delete(seen, range(len(tallies)), axis=0)
    if np.any(rest):
        broken.append("the center has moved where nobody has moved it")


def check_conservation(seen, ends, tallies, broken):
    """Of elastic averaging: what centers and workers have is what steps have made.

    Args:
      seen: the center.
      ends: the parameters of the workers when they left.
      tallies: of the workers.
      broken: where what is broken is put.
    """
    if len(ends) < len(tallies):
        return  # said elsewhere
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
    """Versions grow, and a center stays the same one unless it had to forget."""
    for number, tally in enumerate(tallies):
        if tally["backwards"]:
            broken.append(f"worker {number} saw {tally['backwards']} versions go back")
        if tally["lost"] and not scenario.is_lossy:
            broken.append(f"worker {number} lost {tally['lost']} centers")


def check_journal(seen, folder, rule, broken):
    """What is on disk is what a center was, bit for bit."""
    center = agn_optax.LocalCenter(rule, durability=Journal(folder))
    try:
        kept = jax.tree.leaves(center.pull().params)
    finally:
        center.close()
    was = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(seen)]
    if [np.asarray(leaf).tobytes() for leaf in kept] != was:
        broken.append(f"what is kept in {folder.name} is another center")
