"""What the processes of the peers share."""

import argparse
import time
import traceback
from collections.abc import Callable

from benchmarks import cases, checks
from benchmarks.cases import Case
from benchmarks.records import emit

# A peer is timed when it computes the same function; how exact it is stands beside its time.
WRONG = 2e-2


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("prefixes", nargs="*")
    parser.add_argument("--budget-s", type=float, default=float("inf"))
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.deadline = time.monotonic() + options.budget_s
    return options


def select(prefixes, names) -> list[Case]:
    """The selected cases among those that the peer has, in the peer's order."""
    by_name = {case.name: case for case in cases.CASES}
    return [by_name[name] for name in names if not prefixes or name.startswith(tuple(prefixes))]


def run(
    impl: str,
    selected: list[Case],
    measure: Callable,
    deadline: float,
    copy_rate: Callable[[], float],
    device: str,
) -> None:
    """`measure(case, inputs)` gives the results, then (after the check) the time: a generator of these two things.

    The second is a dict with `median_us` and whatever else is worth keeping. The copy bandwidth is measured after every
    case.
    """
    slowest = 0.0
    for case in selected:
        start = time.monotonic()
        if start + slowest > deadline:
            emit("skipped", case=case.name, impl=impl, reason="time budget")
            continue
        try:
            inputs = cases.make_inputs(case)
            steps = measure(case, inputs)
            rel_err, state_rel_err = checks.sampled(case, inputs, next(steps))()
            record = {
                "case": case.name,
                "impl": impl,
                "median_us": None,
                **cases.work(case).facts(None, device),
                "rel_err": rel_err,
                "state_rel_err": state_rel_err,
            }
            if not (rel_err <= WRONG and state_rel_err <= WRONG):
                emit("record", **record, failed=f"error over {WRONG:g}: not timed")
                continue
            emit("record", **{**record, **next(steps)})
            emit("copy", copy_gbps=round(copy_rate(), 1))
        except Exception as error:  # the other cases are still worth their time
            traceback.print_exc()
            emit("skipped", case=case.name, impl=impl, reason=f"{type(error).__name__}: {str(error)[:300]}")
        slowest = max(0.5 * slowest, time.monotonic() - start)
