"""The performance tables of the README and the plots under `docs/`, from `benchmarks/results/*.json`.

    python -m benchmarks.tables            # rewrites what stands between the markers, and the plots
    python -m benchmarks.tables --check    # exit status 1 if any of them is stale

A table `NAME` of `TABLES` stands between `<!-- benchmarks:begin NAME -->` and `<!-- benchmarks:end NAME -->`.
"""

import argparse
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable

from benchmarks.cases import CASES

ROOT = pathlib.Path(__file__).parent.parent
OURS = "gdn_jax"
PEERS = {
    "gdn_jax_triton": "`triton`",
    "fla": "FLA",
    "jla": "jla",
    "max": "MAX",
    "flashinfer": "FlashInfer",
    "flashqla": "FlashQLA",
}
MARKED = re.compile(r"(<!-- benchmarks:begin ([\w-]+) -->\n).*?(<!-- benchmarks:end \2 -->)", re.DOTALL)


class Results:
    """The records of one device by case and implementation; those of several of them, if there are any."""

    def __init__(self, content: dict, many_devices: dict | None = None):
        self.content = content
        self.many_devices = many_devices
        self._records = {(x["case"], x["impl"]): x for x in content["records"]}

    def record(self, case: str, impl: str = OURS) -> dict | None:
        """The record of a case that was timed."""
        record = self._records.get((case, impl))
        return record if record and record["median_us"] is not None else None

    def cases(self, prefix: str) -> list[str]:
        """Names that begin so, in the order of the benchmark's cases."""
        place = {case.name: n for n, case in enumerate(CASES)}
        found = dict.fromkeys(case for case, _ in self._records if case.startswith(prefix))
        return sorted(found, key=lambda case: place.get(case, len(place)))

    def peers(self, prefix: str) -> list[str]:
        """Peers with a time for a case that begins so."""
        have = {impl for (case, impl) in self._records if case.startswith(prefix) and self.record(case, impl)}
        return [impl for impl in PEERS if impl in have]


# Tables


def table(header: list[str], rows: list[list[str]]) -> str:
    rule = [":---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *rows)) + "\n"


def microseconds(record: dict | None, unit: float = 1.0) -> str:
    """Three significant digits, or none where nothing was measured."""
    if record is None:
        return ""
    value = record["median_us"] / unit
    decimals = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{decimals}f}"


def percent(record: dict | None, name: str) -> str:
    return "" if record is None or record.get(name) is None else f"{100 * record[name]:.0f}%"


def error(record: dict | None) -> str:
    if record is None:
        return ""
    known = [record[name] for name in ("rel_err", "state_rel_err") if record.get(name) is not None]
    return f"{max(known):.1e}" if known else ""


def seconds(record: dict | None) -> str:
    return "" if record is None or "first_call_s" not in record else f"{record['first_call_s']:.1f}"


def timed(results: Results, prefixes: list[str], share: str, unit: float = 1.0) -> str:
    """One line a case: our time, its floor and share of the copy bandwidth, our error, and the times of the peers."""
    name = {1.0: "us", 1000.0: "ms"}[unit]
    peers = [impl for impl in PEERS if any(impl in results.peers(prefix) for prefix in prefixes)]
    header = ["case", f"gdn_jax, {name}", f"floor, {name}", "of copy", "error"]
    rows = []
    for case in (case for prefix in prefixes for case in results.cases(prefix)):
        ours = results.record(case)
        floor = {"median_us": ours["floor_us"]} if ours else None
        row = [f"`{case}`", microseconds(ours, unit), microseconds(floor, unit), percent(ours, share), error(ours)]
        rows.append(row + [microseconds(results.record(case, impl), unit) for impl in peers])
    return table(header + [f"{PEERS[impl]}, {name}" for impl in peers], rows)


def decode(results: Results) -> str:
    return timed(results, ["decode/"], "state_share_of_copy")


def speculation(results: Results) -> str:
    return timed(results, ["verify4/", "fold4/"], "state_share_of_copy")


def conv(results: Results) -> str:
    return timed(results, ["conv/"], "share_of_copy")


def prefill(results: Results) -> str:
    return timed(results, ["prefill/", "recurrent/"], "share_of_copy", 1000.0)


CROSSOVER_CURVES = ("recurrent", "chunked", "xla")


def crossover_points(results: Results) -> dict[int, dict[str, dict[int, float]]]:
    """Batch size -> curve -> row length -> microseconds."""
    points: dict[int, dict[str, dict[int, float]]] = {}
    for case in results.cases("crossover/"):
        record = results.record(case)
        if record:
            _, batch, length, curve = case.split("/")
            of_batch = points.setdefault(int(batch[1:]), {name: {} for name in CROSSOVER_CURVES})
            of_batch[curve][int(length[1:])] = record["median_us"]
    return points


def crossover(results: Results) -> str:
    rows = []
    for batch, curves in sorted(crossover_points(results).items()):
        for length in sorted({length for curve in curves.values() for length in curve}):
            times = [curves[name].get(length) for name in CROSSOVER_CURVES]
            cells = [microseconds(None if t is None else {"median_us": t}) for t in times]
            rows.append([f"{batch} x {length}", *cells])
    return table(["rows x tokens", *(f"{name}, us" for name in CROSSOVER_CURVES)], rows)


def first_calls(results: Results) -> str:
    """Seconds to trace, lower and compile."""
    cases = [case for case in results.cases("") if seconds(results.record(case))]
    peers = [impl for impl in PEERS if any(seconds(results.record(case, impl)) for case in cases)]
    rows = [[f"`{case}`", *(seconds(results.record(case, impl)) for impl in (OURS, *peers))] for case in cases]
    return table(["case", "gdn_jax, s", *(f"{PEERS[impl]}, s" for impl in peers)], rows)


def many_devices(results: Results) -> str:
    """A layer on all devices of a host against one of them."""
    content = results.many_devices
    if content is None:
        return ""
    rows = [
        [
            f"`{x['case']}`",
            microseconds(x),
            microseconds({"median_us": x["one_device_us"]}),
            f"{x['speed_up']:.2f}",
            f"{x['reduction_share']:.0%}",
        ]
        for x in content["records"]
    ]
    count = content["num_devices"]
    shown = table(["case", f"{count} devices, us", "1 device, us", "speed-up", "sum over devices"], rows)
    return f"{shown}\n`{content['command']}` on {count} x {content['device']}, {content['date']}.\n"


def environment(results: Results) -> str:
    content = results.content
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    lines = [
        f"{content['device']}, {content['date']}; {versions}.",
        "Each run, and the device's copy speed in it, bytes read and written:",
    ]
    measured = {record["run"] for record in content["records"]}
    for run, found in enumerate(content["runs"]):
        if run in measured:
            other = [f", {x} {y}" for x, y in found.get("versions", {}).items() if content["versions"].get(x) != y]
            copies = found.get("copy_samples_gbps", [])
            several = f", of {min(copies):.0f} to {max(copies):.0f}" if len(copies) > 1 else ""
            lines.append(f"`{found['command']}` ({found['copy_gbps']:.0f} GB/s{several}{''.join(other)})")
    return "  \n".join(lines) + "\n"


TABLES: dict[str, Callable[[Results], str]] = {
    "environment": environment,
    "decode": decode,
    "speculation": speculation,
    "conv": conv,
    "prefill": prefill,
    "crossover": crossover,
    "first-calls": first_calls,
    "many-devices": many_devices,
}


def render(text: str, results: Results) -> str:
    """The text with every marked table as the results have it."""

    def replace(match: re.Match) -> str:
        begin, name, end = match.groups()
        if name not in TABLES:
            raise ValueError(f"no table {name!r}: there are {', '.join(TABLES)}")
        return f"{begin}\n{TABLES[name](results)}\n{end}"

    return MARKED.sub(replace, text)


# Plots

COLOURS = ("#1f6feb", "#d4741a", "#4f8a3c", "#8957b8", "#b3404a", "#5b6570")
WIDTH, FONT = 760, 'font-family="sans-serif" font-size="12"'


def svg(height: int, parts: list[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>"]) + "\n"


def label(x: float, y: float, words: str, anchor: str = "start", colour: str = "#24292f") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}" {FONT}>{words}</text>'


def legend(names: list[str], y: float) -> list[str]:
    parts = []
    for i, name in enumerate(names):
        x = 150 + 110 * i
        parts.append(f'<rect x="{x}" y="{y - 10:.1f}" width="12" height="12" fill="{COLOURS[i]}"/>')
        parts.append(label(x + 18, y, name))
    return parts


def bars(title: str, unit: str, groups: dict[str, dict[str, float]], names: list[str]) -> str:
    """Horizontal bars, one group a case and one bar an implementation, on one scale from zero."""
    if not groups:
        return svg(60, [label(20, 30, f"{title}: nothing measured yet")])
    left, right, bar = 190, 70, 13
    top = max(value for group in groups.values() for value in group.values())
    parts, y = [label(20, 24, title), *legend(names, 48)], 66.0
    for case, group in groups.items():
        parts.append(label(left - 8, y + bar * len(group) / 2 + 4, case, "end"))
        for name, value in group.items():
            width = value / top * (WIDTH - left - right)
            colour = COLOURS[names.index(name)]
            parts.append(f'<rect x="{left}" y="{y:.1f}" width="{width:.1f}" height="{bar - 2}" fill="{colour}"/>')
            parts.append(label(left + width + 5, y + bar - 3, f"{value:.3g} {unit}"))
            y += bar
        y += 9
    return svg(round(y) + 8, parts)


def lines(title: str, panels: dict[str, dict[str, dict[int, float]]]) -> str:
    """Curves over row length, both axes logarithmic, one panel beside another."""
    values = [v for curves in panels.values() for curve in curves.values() for v in curve.values()]
    if not values:
        return svg(60, [label(20, 30, f"{title}: nothing measured yet")])
    lengths = sorted({x for curves in panels.values() for curve in curves.values() for x in curve})
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    last = max(math.log2(lengths[-1]), 1.0)
    top, bottom, left = 84, 300, 64
    step = (WIDTH - left - 16) / len(panels)
    parts = [label(20, 24, title), *legend(list(CROSSOVER_CURVES), 48)]

    def y_of(value: float) -> float:
        return bottom - (math.log10(value) - low) / (high - low) * (bottom - top)

    for decade in range(low, high + 1):
        y = y_of(10.0**decade)
        parts.append(f'<line x1="{left}" y1="{y:.1f}" x2="{WIDTH - 16}" y2="{y:.1f}" stroke="#d8dee4"/>')
        parts.append(label(left - 6, y + 4, f"{10.0**decade:g} us", "end"))
    for i, (panel, curves) in enumerate(panels.items()):
        x0, width = left + i * step + 12, step - 30
        parts.append(label(x0, top - 8, panel))
        for length in lengths:
            parts.append(label(x0 + math.log2(length) / last * width, bottom + 18, str(length), "middle"))
        for colour, curve in zip(COLOURS, curves.values(), strict=False):
            points = [(x0 + math.log2(x) / last * width, y_of(y)) for x, y in sorted(curve.items())]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    parts.append(label(WIDTH / 2, bottom + 38, "tokens a row", "middle"))
    return svg(bottom + 48, parts)


def bar_groups(results: Results, prefix: str, unit: float) -> tuple[dict[str, dict[str, float]], list[str]]:
    impls = [OURS, *results.peers(prefix)]
    groups = {}
    for case in results.cases(prefix):
        records = {PEERS.get(impl, impl): results.record(case, impl) for impl in impls}
        times = {name: record["median_us"] / unit for name, record in records.items() if record}
        if times:
            groups[case[prefix.rindex("/") + 1 :]] = times
    return groups, [PEERS.get(impl, impl) for impl in impls]


def plots(results: Results) -> dict[str, str]:
    """File name -> SVG."""
    device = results.content["device"]
    panels = {f"{batch} rows": curves for batch, curves in sorted(crossover_points(results).items())}
    return {
        "decode-f32.svg": bars(
            f"Decode, float32 states, {device}: less is better", "us", *bar_groups(results, "decode/f32/B", 1.0)
        ),
        "prefill.svg": bars(
            f"Prefill, bfloat16, {device}: less is better", "ms", *bar_groups(results, "prefill/bf16/", 1000.0)
        ),
        "crossover.svg": lines(f"Time of a call by row length, 32 value heads, {device}", panels),
    }


def outputs(results: Results, readme: pathlib.Path, docs: pathlib.Path) -> dict[pathlib.Path, str]:
    """Every generated file with its contents. Plots belong to the tables: without a marked one there are none."""
    text = readme.read_text()
    files = {readme: render(text, results)}
    if MARKED.search(text):
        files |= {docs / name: drawing for name, drawing in plots(results).items()}
    return files


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tables", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing, fail if anything is stale")
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "benchmarks/results/h200.json")
    parser.add_argument("--readme", type=pathlib.Path, default=ROOT / "README.md")
    parser.add_argument("--docs", type=pathlib.Path, default=ROOT / "docs")
    options = parser.parse_args(argv)
    if not MARKED.search(options.readme.read_text()):
        print(f"{options.readme} has no marked tables")
        return 0
    several = options.results.with_name(f"{options.results.stem}x2.json")
    results = Results(
        json.loads(options.results.read_text()), json.loads(several.read_text()) if several.exists() else None
    )
    stale = []
    for path, text in outputs(results, options.readme, options.docs).items():
        if not path.exists() or path.read_text() != text:
            stale.append(path)
            if not options.check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
    for path in stale:
        print(f"{path}: {'stale; run python -m benchmarks.tables' if options.check else 'written'}")
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
