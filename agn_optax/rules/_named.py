"""Rules, codecs and center optimizers, made from names and settings."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import optax

from agn_optax import errors
from agn_optax._internal import check, find_object
from agn_optax.rules import _rule, center_optimizers, codecs, robust
from agn_optax.rules._rule import Rule

# Optimizers of optax. The signature of an optimizer defines its settings, here and in
# CENTER_OPTIMIZERS.
OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    name: getattr(optax, name)
    for name in (
        *("adabelief", "adagrad", "adam", "adamw", "lamb", "lion"),
        *("nadam", "nadamw", "rmsprop", "sgd", "yogi"),
    )
}
CENTER_OPTIMIZERS = OPTIMIZERS | {
    make.__name__: make
    for make in (
        center_optimizers.delayed_nesterov,
        center_optimizers.heloco,
        center_optimizers.isoloco,
        center_optimizers.momentum_lookahead,
        center_optimizers.ordered_momentum,
    )
}
# All functions of `_rule` that return a Rule, so that new rules are found by name.
RULES: dict[str, Callable[..., Rule]] = {
    name: make
    for name, make in sorted(vars(_rule).items())
    if getattr(make, "__annotations__", {}).get("return") == Rule.__name__
}
_DTYPES = ("bfloat16", "float16")
_LOSSY = {
    **{f"int{bits}": codecs.quantize(bits) for bits in (8, 4, 2)},
    "e3m0": codecs.quantize(4, format="e3m0"),
    "sign": codecs.sign(),
    # The settings of SparseLoCo: 64 of 4096 elements, in 2 bits.
    "top_k": codecs.chain_codecs(
        codecs.top_k(64), codecs.quantize(2, format="codebook")
    ),
}
CODECS = {
    **{name: codecs.cast(name) for name in _DTYPES},
    **{name: codecs.error_feedback(codec) for name, codec in _LOSSY.items()},
    "top_k": codecs.error_feedback(_LOSSY["top_k"], decay=0.95),
}
DOWNLINK_DTYPES = {name: name for name in _DTYPES}
COMBINE_METHODS: dict[str, Any] = {
    "sum": "sum",
    "mean": "mean",
    "median": robust.median(),
    "krum": robust.krum(),
    "radial": robust.radial(),
}
# The largest valid value of each setting of an optimizer; the smallest is 0.
_UPPER_BOUNDS = {
    **dict.fromkeys(("learning_rate", "eps", "weight_decay"), math.inf),
    **dict.fromkeys(("momentum", "b1", "b2", "decay"), 1.0),
}
OPTIMIZER_SETTINGS = (*_UPPER_BOUNDS, "nesterov", "delay", "messages")


def rule_from_settings(
    given: Mapping[str, Any], label: Callable[[str], str] = str
) -> Rule:
    """Return the rule that the settings describe.

    Args:
      given: the settings by name: ``rule``, the name of a rule; the settings of that
        rule; ``codec`` and ``answers``, see `_codec_from_settings`;
        ``combine``, the name of a combination; and ``center_optimizer``, the name of an
        optimizer, with the settings of that optimizer. Or only ``rule_from``,
        "module:object": a rule, or a function without arguments that returns one;
        modules in the current directory are found.
      label: function from the name of a setting to the name that the user knows, for
        errors.

    Raises:
      InvalidArgumentError: the settings describe no rule, or a setting is missing, out
        of range, or unknown to this rule or optimizer.
      InvalidTypeError: ``rule_from`` is not a rule.
    """
    if "rule_from" in given:
        if others := [name for name in given if name != "rule_from"]:
            raise errors.InvalidArgumentError(
                f"{label(others[0])} does not go with {label('rule_from')}: the object "
                "has all settings"
            )
        return _load(given["rule_from"], label("rule_from"))
    if "rule" not in given:
        raise errors.InvalidArgumentError(
            f"no rule: give {label('rule')} NAME ({', '.join(RULES)}), or "
            f"{label('rule_from')} MODULE:OBJECT, on the command line or in a file "
            "with --config"
        )
    name = given["rule"]
    what = f"rule {name}"
    factory = check.choose(name, RULES, label("rule"))
    settings = _settings(given, factory, what, label)
    used = {"rule", "codec", "answers", "combine", *settings}
    center = inspect.signature(factory).parameters.get("center")
    if center and "center_optimizer" in given:
        optimizer = given["center_optimizer"]
        what += f" with center optimizer {optimizer}"
        make = check.choose(optimizer, CENTER_OPTIMIZERS, label("center_optimizer"))
        of_optimizer = _settings(given, make, f"center optimizer {optimizer}", label)
        settings["center"] = make(**of_optimizer)
        used |= {"center_optimizer", *of_optimizer}
    elif center and center.default is center.empty:
        raise errors.InvalidArgumentError(
            f"rule {name} needs {label('center_optimizer')}, one of "
            f"{', '.join(CENTER_OPTIMIZERS)}"
        )
    if unused := [setting for setting in given if setting not in used]:
        raise errors.InvalidArgumentError(
            f"{label(unused[0])} does not apply to {what}"
        )
    rule = factory(**settings, codec=_codec_from_settings(given, label))
    if "combine" in given:
        combine = check.choose(given["combine"], COMBINE_METHODS, label("combine"))
        rule = dataclasses.replace(rule, combine=combine)
    return rule


def _codec_from_settings(
    given: Mapping[str, Any], label: Callable[[str], str] = str
) -> codecs.Codec:
    """Return the codec that the settings describe.

    Args:
      given: the settings by name: ``codec``, the name of a codec for the uplink, and
        ``answers``, a dtype for the downlink; both are optional.
      label: function from the name of a setting to the name that the user knows, for
        errors.

    Raises:
      InvalidArgumentError: no codec or dtype has that name.
    """
    codec = codecs.identity()
    if "codec" in given:
        codec = check.choose(given["codec"], CODECS, label("codec"))
    if "answers" in given:
        answers = check.choose(given["answers"], DOWNLINK_DTYPES, label("answers"))
        codec = codecs.two_way(codec, answers)
    return codec


def _settings(
    given: Mapping[str, Any],
    factory: Callable[..., Any],
    what: str,
    label: Callable[[str], str],
) -> dict[str, Any]:
    """Return the given settings that are arguments of ``factory``.

    Raises:
      InvalidArgumentError: a required setting is missing, or one is out of range.
    """
    settings = {}
    for name, parameter in settings_of(factory).items():
        if name in given:
            settings[name] = given[name]
        elif parameter.default is parameter.empty:
            raise errors.InvalidArgumentError(f"{what} needs {label(name)}")
        if name in settings and name in _UPPER_BOUNDS:
            check.rate(settings[name], label(name), low=0.0, high=_UPPER_BOUNDS[name])
    return settings


def settings_of(factory: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of ``factory`` that can be given as settings."""
    return {
        name: parameter
        for name, parameter in inspect.signature(factory).parameters.items()
        if name in (*OPTIMIZER_SETTINGS, "moving_rate", "rho", "record_dtype")
    }


def _load(name: str, label: str) -> Rule:
    found = find_object(name, label)
    rule = found
    if callable(found) and not isinstance(found, Rule):
        try:
            inspect.signature(found).bind()
        except (TypeError, ValueError):  # needs arguments, or has no signature
            pass
        else:
            rule = found()
    if not isinstance(rule, Rule):
        raise errors.InvalidTypeError(
            f"{label} {name} must be an agn_optax.rules.Rule, or a function "
            f"without arguments that returns one, got {check.show(rule)}"
        )
    return rule
