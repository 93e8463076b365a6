"""A rule's fingerprint in the form that is sent to workers."""

from __future__ import annotations

from typing import Any

from agn_optax import errors, rules
from agn_optax.rules import Rule
from agn_optax.service import center_pb2 as pb


def fingerprint(rule: Rule) -> tuple[pb.Print, ...]:
    """Return the fingerprint of ``rule`` as protobuf messages."""
    return tuple(
        pb.Print(part=part, setting=print_)
        if part in rules.SETTINGS
        else pb.Print(part=part, numbers=print_)
        for part, print_ in rules.fingerprint(rule).items()
    )


def compare(theirs: Any, rule: Rule, address: str) -> None:
    """Check that the rule of a center is ``rule``.

    Args:
      theirs: the fingerprint of the center's rule.
      rule: the rule of this process.
      address: the center's address, for the error message.

    Raises:
      RuleMismatchError: the rules differ; the message names the parts that differ.
    """
    others = {
        each.part: each.setting if each.part in rules.SETTINGS else tuple(each.numbers)
        for each in theirs
    }
    if other := rules.difference(others, rule):
        raise errors.RuleMismatchError(
            f"the center at {address} runs another rule: {other}. Give both the same "
            "optimizers and settings"
        )
