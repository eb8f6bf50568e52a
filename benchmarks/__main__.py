"""Measures everything on the GPU it finds and writes `benchmarks/results/<gpu>.json`.

    python -m benchmarks                                     # this package, then every peer that is installed
    python -m benchmarks decode verify --impl gdn_jax        # the cases whose names begin so, this package alone
    python -m benchmarks --impl fla jla --merge              # adds two peers to the results that are there

Every implementation runs in a process of its own. The file is written anew after each case.
"""

import argparse
import os
import pathlib
import shlex
import subprocess
import sys
import threading
import time

from benchmarks.records import ResultFile, parse

MODULES = {
    "gdn_jax": "benchmarks.own",
    "gdn_jax_triton": "benchmarks.own",
    "fla": "benchmarks.peers.fla",
    "jla": "benchmarks.peers.jla",
    "max": "benchmarks.peers.max",
}
ARGUMENTS = {"gdn_jax_triton": ["--implementation", "triton"]}
GRACE_S = 30
ROOT = pathlib.Path(__file__).parent.parent


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prefixes", nargs="*", metavar="PREFIX", help="beginnings of the names of the cases to measure")
    parser.add_argument("--impl", nargs="+", choices=list(MODULES), default=list(MODULES), help="default: all")
    parser.add_argument("--budget-s", type=float, default=None, help="of each implementation; later cases are skipped")
    parser.add_argument("--merge", action="store_true", help="keep what the result file has and is not measured now")
    parser.add_argument("--output", type=pathlib.Path, help="default: benchmarks/results/<gpu>.json")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on any device; writes --output or nothing")
    parser.add_argument("--lower", action="store_true", help="lower every program for a GPU, anywhere; run nothing")
    options = parser.parse_args(argv)

    arguments = [*options.prefixes]
    if options.budget_s is not None:
        arguments += ["--budget-s", str(options.budget_s)]
    if options.lower:
        return subprocess.call([sys.executable, "-m", MODULES["gdn_jax"], *options.prefixes, "--lower"], cwd=ROOT)
    if options.dry_run:
        arguments.append("--tiny")
    command = shlex.join(["python", "-m", "benchmarks", *without_output(sys.argv[1:] if argv is None else argv)])
    keep = not options.dry_run or options.output is not None
    results = ResultFile(options.output, command, options.merge, keep)
    # A process that does not come back to its own clock (tuning, compiling) is ended.
    limit = None if options.budget_s is None else options.budget_s + GRACE_S
    failed = [impl for impl in options.impl if not measure(impl, arguments, results, limit)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


def without_output(argv: list[str]) -> list[str]:
    """The arguments less `--output`: where a run wrote its file does not say how to repeat it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--output")
    return parser.parse_known_args(argv)[1]


def measure(impl: str, arguments: list[str], results: ResultFile, limit_s: float | None) -> bool:
    """Runs one implementation and writes down what it reports; whether it ended well."""
    start = time.monotonic()
    environment = dict(os.environ, PYTHONUNBUFFERED="1")
    command = [sys.executable, "-m", MODULES[impl], *arguments, *ARGUMENTS.get(impl, [])]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        ending = threading.Timer(limit_s or 0, child.kill)
        if limit_s is not None:
            ending.start()
        for line in child.stdout:
            message = parse(line)
            if message is None:
                print(line, end="", flush=True)
                continue
            kind = message.pop("kind")
            if kind == "environment":
                results.environment(impl, message)
            elif kind == "record":
                message = results.record(message)
            elif kind == "copy":
                results.copy(message)
            else:
                results.skipped(message)
            print(f"[{time.monotonic() - start:5.1f} s] {summary(kind, impl, message)}", flush=True)
        ending.cancel()
    print(f"{impl}: {time.monotonic() - start:.0f} s", flush=True)
    return child.returncode == 0


def summary(kind: str, impl: str, message: dict) -> str:
    if kind == "environment":
        return f"{impl} on {message['device']}, copy {message['copy_gbps']} GB/s"
    if kind == "copy":
        return f"copy {message['copy_gbps']} GB/s"
    if kind == "skipped":
        return f"{message.get('case', 'everything'):28s} {impl:8s} skipped: {message['reason']}"
    time_us = message["median_us"]
    measured = f"{time_us:10.2f} us" if time_us is not None else f"{message['failed']:>13s}"
    return (
        f"{message['case']:28s} {impl:8s} {measured}  floor {message['floor_us']:8.2f}  "
        f"err {message['rel_err']:.1e} {message['state_rel_err']:.1e}  {message.get('implementation', '')}  "
        f"share {message.get('state_share_of_copy', '')}  first {message.get('first_call_s', '')} s"
    )


if __name__ == "__main__":
    raise SystemExit(main())
