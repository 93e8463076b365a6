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


def compare(prints: Any, rule: Rule, address: str) -> None:
    """Check that the rule of a center is ``rule``.

    Args:
      prints: the fingerprint of the center's rule.
      rule: the rule of this process.
      address: the center's address, for the error message.

    Raises:
      RuleMismatchError: the rules differ; the message names the parts that differ.
    """
    received = {
        print_.part: print_.setting
        if print_.part in rules.SETTINGS
        else tuple(print_.numbers)
        for print_ in prints
    }
    if difference := rules.difference(received, rule):
        raise errors.RuleMismatchError(
            f"the center at {address} runs another rule: {difference}. Give worker "
            "and center the same optimizers and settings"
        )
