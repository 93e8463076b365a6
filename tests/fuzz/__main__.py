"""Feed every parser, and a live center, mutated input: ``make fuzz``."""

import argparse
import logging
import sys
import time

from fuzz import live, parsers

# Relative time per input of the slow parsers.
_SLOW = {
    "contribution": 20,
    "description": 4,
    "config": 4,
    "folder": 10,
    "environment": 2,
    "frames": 2,
}


def main():
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10_000, help="inputs of parsers")
    parser.add_argument("--live", type=int, default=200, help="conversations a kind")
    parser.add_argument("--kind", choices=live.KINDS, help="of centers; all of them")
    parser.add_argument("--only", choices=[*parsers.PARSERS, "live"])
    options = parser.parse_args()
    logging.disable()  # journals would report every damaged record
    found = 0
    for name, count in shares(options.count).items():
        if options.only in (None, name):
            found += _parse(name, options.seed, count)
    if options.only in (None, "live") and options.live:
        for kind in live.KINDS if options.kind is None else [options.kind]:
            _fuzz_live(kind, options.seed, options.live)
    return bool(found)


def _fuzz_live(kind, seed, count):
    begin = time.monotonic()
    result = live.fuzz(seed, count, kind=kind)
    _write(
        f"live, {kind}: {count} conversations in {time.monotonic() - begin:.0f} s; "
        f"others had {result.answers} answers meanwhile, the slowest after "
        f"{result.slowest:.2f} s; the center held {result.before}, and then "
        f"{result.after}"
    )


def shares(count):
    """Divide ``count`` inputs among all parsers, fewer for slow ones."""
    weights = {name: 1 / _SLOW.get(name, 1) for name in parsers.PARSERS}
    whole = sum(weights.values())
    return {name: max(1, round(count * w / whole)) for name, w in weights.items()}


def _parse(name, seed, count):
    begin = time.monotonic()
    rejected, found = parsers.fuzz(parsers.PARSERS[name], seed, name, count)
    _write(
        f"{name}: {count} inputs in {time.monotonic() - begin:.0f} s, {rejected} "
        f"rejected, {len(found)} neither read nor rejected"
    )
    for number, data, error in found[:5]:
        _write(f"    input {number} of seed {seed}: {error!r} of {data[:80]!r}")
    return len(found)


def _write(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
