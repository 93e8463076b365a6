"""Run scenarios of a simulated center, and print those that fail: ``make faults``."""

import argparse
import itertools
import sys
import time

from faults import scenario
from faults.run import Runner, describe

_INTERVAL = 2.0  # s between two lines
_MOST = 3  # failures, after which a run ends


def main():
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first scenario")
    parser.add_argument("--count", type=int, help="of scenarios")
    parser.add_argument("--seconds", type=float, default=60.0, help="without a count")
    parser.add_argument("--show", action="store_true", help="print each scenario")
    parser.add_argument(
        "--first", action="store_true", help="end at a failure, as it is"
    )
    options = parser.parse_args()
    runner, broken, printed = Runner(), [], -_INTERVAL
    begin, cpu = time.monotonic(), time.process_time()
    numbers = range(options.count) if options.count else itertools.count()
    try:
        for number in numbers:
            seconds = time.monotonic() - begin
            if options.count is None and seconds >= options.seconds:
                break
            if sys.stdout.isatty() and seconds >= printed + _INTERVAL:
                printed = seconds
                _write(f"\r{number} scenarios, {len(broken)} broken ")
            each = scenario.drawn(options.seed + number)
            if options.show:
                _write(f"\n{scenario.show(each)}\n")
            if failure := runner.run(each):
                broken.append(each.seed)
                report = describe if options.first else runner.report
                _write(f"{report(each, failure)}\n")
                if options.first or len(broken) == _MOST:
                    break
    finally:
        runner.close()
    seconds, cpu = time.monotonic() - begin, time.process_time() - cpu
    _write("\r" * sys.stdout.isatty())
    _write(
        f"{runner.scenarios} scenarios in {seconds:.0f} s "
        f"({60 * runner.scenarios / cpu:.0f} a minute of one core): "
        f"{runner.events} events, {runner.processes} processes of centers; "
        f"broken: {broken or 'none'}\n"
    )
    return bool(broken)


def _write(text):
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
