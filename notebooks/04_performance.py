# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Performance: the result files as tables and plots
#
# `python -m benchmarks` measures on the GPU it finds and writes `benchmarks/results/<gpu>.json`; `benchmarks/results`
# also holds a comparison on a CPU. This notebook measures nothing. It reads every file that is there, so each number
# below stands in one of them; the command shown is that of the run with most of its records.

# %%
import json
import pathlib
import sys

import matplotlib.pyplot as plt
import numpy as np

root = next(d for d in [pathlib.Path.cwd(), *pathlib.Path.cwd().parents] if (d / "benchmarks" / "results").is_dir())
sys.path.insert(0, str(root))
from benchmarks import cases  # noqa: E402

plt.rcParams["figure.dpi"] = 72
# What the files call this package: its own choice, or an implementation by name.
OWN = ("gdn_jax", "xla", "gdn_jax_triton")
PEERS = {"fla": "flash-linear-attention", "jla": "jax-linear-attention", "max": "MAX"}

files = {path.stem: json.loads(path.read_text()) for path in sorted((root / "benchmarks" / "results").glob("*.json"))}
for name, content in files.items():
    print(f"{name}: {content['device']}, {content['date']}, {len(content['records'])} records")
    print("   ", content["command"])
    print("   ", ", ".join(f"{package} {version}" for package, version in content["versions"].items()))
    for key, unit in (("copy_gbps", "GB/s copied, read + written"), ("matmul_tflops", "TFLOP/s in a bfloat16 product")):
        if content.get(key):
            print(f"    {content[key]:.0f} {unit}, measured in the same run")

# %% [markdown]
# ## Every time
#
# Microseconds, the median over repeats; the crossover cases are in the last plot. The floor is the least that the case
# can take on the device: the larger of its bytes over the copy bandwidth and its operations over the device's rate.


# %%
def by_case(content):
    """`{case: {implementation: record}}`, of what was timed."""
    table = {}
    for record in content["records"]:
        if record.get("median_us"):
            table.setdefault(record["case"], {})[record["impl"]] = record
    return table


def own(records):
    return next((records[impl] for impl in OWN if impl in records), None)


for name, content in files.items():
    table = by_case(content)
    impls = sorted({impl for records in table.values() for impl in records}, key=lambda x: (x not in OWN, x))
    print(f"{name}\n{'':30}" + "".join(f"{impl:>14}" for impl in [*impls, "floor"]))
    for case, records in table.items():
        if case.startswith("crossover"):
            continue
        floor = (own(records) or {}).get("floor_us")
        cells = [records[impl]["median_us"] if impl in records else None for impl in impls] + [floor]
        print(f"{case:30}" + "".join(f"{'' if cell is None else f'{cell:.1f}':>14}" for cell in cells))
    for record in [r for r in content["records"] if not r.get("median_us")] + content.get("skipped", []):
        print("not timed:", record.get("case", ""), record["impl"], record.get("failed", record.get("reason", "")))
    print()

# %% [markdown]
# ## Roofline
#
# Operations per byte moved against operations per second, for the cases whose work `benchmarks/cases.py` defines. The
# slope is the measured copy bandwidth, the plateaus are the measured rate of a bfloat16 matrix product and the rate of
# float32 arithmetic from the data sheet. Decode, verify and fold do few operations per byte, so the slope is what
# bounds them.

# %%
work = {case.name: (cases.work(case), case.operation, case.algorithm) for case in cases.CASES}
KINDS = {
    "decode": lambda name: name.startswith("decode"),
    "verify and fold": lambda name: name.startswith(("verify", "fold")),
    "convolution": lambda name: name.startswith("conv"),
    "prefill, recurrent": lambda name: name.startswith("recurrent"),
    "prefill, chunked": lambda name: name.startswith("prefill"),
}

rooflines = [content for content in files.values() if content.get("copy_gbps")]
for content in rooflines:
    table, copy = by_case(content), content["copy_gbps"] * 1e9
    intensity = np.logspace(-1, 3, 200)
    figure, axes = plt.subplots(figsize=(7.5, 4))
    matmul = (content.get("matmul_tflops") or np.inf) * 1e12
    axes.loglog(intensity, np.minimum(intensity * copy, matmul) / 1e12, color="0.4", label="copy, matrix product")
    vector = next((rate for kind, rate in cases.VECTOR_FLOPS.items() if kind in content["device"]), None)
    if vector:
        axes.axhline(vector / 1e12, color="0.7", linestyle="--", label="float32 arithmetic")
    for label, belongs in KINDS.items():
        points = []
        for case, records in table.items():
            record = own(records)
            if belongs(case) and case in work and record:
                flops = work[case][0].tensor_flops + work[case][0].vector_flops
                points.append((flops / work[case][0].bytes, flops / record["median_us"] * 1e-6))
        if points:
            axes.loglog(*np.transpose(points), "o", markersize=5, label=label)
    axes.set(xlabel="operations per byte", ylabel="TFLOP/s", title=f"Roofline on {content['device']}")
    axes.legend(fontsize=8)
    plt.show()
if not rooflines:
    print("No file has a copy bandwidth: a roofline needs results of `python -m benchmarks` on a GPU.")

# %% [markdown]
# How much of the floor each case reaches:

# %%
for content in rooflines:
    table = by_case(content)
    shares = [
        (case, record["floor_us"] / record["median_us"])
        for case, record in ((case, own(records)) for case, records in table.items())
        if record and record.get("floor_us") and not case.startswith("crossover")
    ]
    if shares:
        figure, axes = plt.subplots(figsize=(7.5, 0.22 * len(shares) + 0.8))
        axes.barh([case for case, _ in shares], [share for _, share in shares])
        axes.axvline(1.0, color="0.6", linestyle="--")
        axes.invert_yaxis()
        axes.tick_params(axis="y", labelsize=8)
        axes.set(xlabel="floor / measured time", title=f"Share of the floor on {content['device']}")
        plt.show()

# %% [markdown]
# ## Peers
#
# Time of the peer over the time of this package, each measured in a process of its own on the same inputs (MAX on
# another machine, with float32 tokens): right of the line this package is faster, left of it the peer is. The cases it
# loses are listed by name.

# %%
for name, content in files.items():
    ratios = {}
    for case, records in by_case(content).items():
        record = own(records)
        for impl, peer in records.items():
            if record and impl not in OWN and not case.startswith("crossover"):
                ratios.setdefault(case, {})[impl] = peer["median_us"] / record["median_us"]
    if not ratios:
        continue
    impls = sorted({impl for peers in ratios.values() for impl in peers})
    height = 0.8 / len(impls)
    figure, axes = plt.subplots(figsize=(7.5, 0.2 * len(ratios) * max(len(impls), 2) + 0.9))
    for i, impl in enumerate(impls):
        at = [(y + i * height - 0.4, peers[impl]) for y, peers in enumerate(ratios.values()) if impl in peers]
        axes.barh(*np.transpose(at), height=height, align="edge", label=PEERS.get(impl, impl))
    axes.set_yticks(range(len(ratios)), list(ratios), fontsize=8)
    axes.axvline(1.0, color="0.3")
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="time of the peer / time of gdn_jax", title=f"Peers on {content['device']}")
    axes.legend(fontsize=8)
    plt.show()
    lost = [f"{case} ({impl}: {r:.2f})" for case, peers in ratios.items() for impl, r in peers.items() if r < 1]
    print(f"{name}: slower than a peer in", ", ".join(lost) or "no case that was measured")

# %% [markdown]
# ## Recurrent or chunked
#
# The recurrent form goes token by token, the chunked one has its work in matrix products. `algorithm="auto"` decides by
# shapes alone; where the files have both, this is what it decides between.

# %%
for content in rooflines:
    curves = {}
    for case, records in by_case(content).items():
        parts, record = case.split("/"), own(records)
        if parts[0] == "crossover" and record:
            _, batch, length, form = parts
            curves.setdefault(int(batch[1:]), {}).setdefault(form, []).append((int(length[1:]), record["median_us"]))
    if not curves:
        continue
    figure, panels = plt.subplots(1, len(curves), figsize=(3 * len(curves), 2.8), squeeze=False, sharey=True)
    for axes, (batch, forms) in zip(panels[0], sorted(curves.items()), strict=True):
        for form, points in forms.items():
            axes.loglog(*np.transpose(sorted(points)), ".-", label=form)
        axes.set(xlabel="tokens of a row", title=f"{batch} row{'s' if batch > 1 else ''}")
    panels[0][0].set_ylabel("microseconds")
    panels[0][-1].legend(fontsize=8)
    plt.show()
