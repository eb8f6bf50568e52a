"""Modular MAX. There is no measurement for it here yet; the results say so."""

import importlib.util

from benchmarks.records import emit

IMPL = "max"


def main() -> None:
    if importlib.util.find_spec("max") is None:
        emit("skipped", impl=IMPL, reason="not installed: its wheels are hundreds of megabytes")
    else:
        emit("skipped", impl=IMPL, reason="not run: this version has no measurement for it")


if __name__ == "__main__":
    main()
