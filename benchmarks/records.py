"""Lines between the process that measures and the one that writes `results/<gpu>.json`, and that file."""

import collections
import datetime
import json
import os
import pathlib
import statistics

RESULTS = pathlib.Path(__file__).parent / "results"
_MARK = "@record "


def emit(kind: str, **fields) -> None:
    """One message to the parent: `environment`, `record`, `copy` or `skipped`."""
    print(_MARK + json.dumps({"kind": kind, **fields}), flush=True)


def parse(line: str) -> dict | None:
    """The message in a line of a child's output; None if it is ordinary output."""
    return json.loads(line[len(_MARK) :]) if line.startswith(_MARK) else None


def result_name(device: str) -> str:
    """`NVIDIA H200` is kept in `h200.json`."""
    return device.lower().replace("nvidia", "").strip().replace(" ", "_")


def of_copy(record: dict, copy_gbps: float) -> dict:
    """Floor of a case, and what its bytes over its time are as a share of the copy bandwidth."""
    floor_us = max(record["bytes"] / copy_gbps * 1e-3, record["operations_us"])
    found = {"floor_us": round(floor_us, 3)}
    if record["median_us"] is not None:
        for share, moved in (("share_of_copy", "bytes"), ("state_share_of_copy", "state_bytes")):
            found[share] = round(record[moved] / record["median_us"] * 1e-3 / copy_gbps, 4)
    return found


class ResultFile:
    """The results of one device, written anew at every record: a run that is cut short leaves what it measured.

    `runs` has what each process found beside its cases; a record's `run` is its place there. The copy bandwidth of a
    run is the median of what it measured before, between and after them. The head of the file is that of the run with
    the most records, of this package if it has any.
    """

    def __init__(self, path: pathlib.Path | None, command: str, merge: bool, keep: bool = True):
        """`path` None is the usual place of the device; nothing is written unless `keep`."""
        self.path = path
        self._command = command
        self._merge = merge
        self._keep = keep
        self._content: dict = {}
        self._run: dict = {}

    def environment(self, impl: str, fields: dict) -> None:
        """What a process found before it measures.

        A run that measures nothing is entered only if the implementation has no other: else with its first record.
        """
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        if not self._content:
            path = self.path = self.path or RESULTS / f"{result_name(fields['device'])}.json"
            old = json.loads(path.read_text()) if self._merge and path.exists() else {}
            if old.get("device", fields["device"]) != fields["device"]:
                raise ValueError(f"{path} is of {old['device']}, and this is {fields['device']}")
            self._content = {"device": fields["device"], "versions": {}, "date": today, "command": self._command}
            self._content |= {"copy_gbps": None, "copy_spread_gbps": None, "matmul_tflops": None}
            self._content |= {"runs": [], "records": [], "skipped": []} | old
        copy_gbps = fields["copy_gbps"]
        self._run = {"impl": impl, "date": today, "command": self._command, **fields, "copy_samples_gbps": [copy_gbps]}
        if impl not in [run["impl"] for run in self._content["runs"]]:
            self._enter()

    def _enter(self) -> None:
        content = self._content
        if any(run is self._run for run in content["runs"]):
            return
        content["runs"].append(self._run)
        content["versions"] |= self._run["versions"]
        self._write()

    def record(self, fields: dict) -> dict:
        """Writes down what a process measured, and returns it with what follows from the copy bandwidth."""
        self._enter()
        record = {**fields, **of_copy(fields, self._run["copy_gbps"]), "run": len(self._content["runs"]) - 1}
        self._replace("records", record)
        return record

    def copy(self, fields: dict) -> None:
        """One more measurement of the copy bandwidth, for all records of the run."""
        run = self._run
        samples = run["copy_samples_gbps"]
        samples.append(fields["copy_gbps"])
        low, _, high = statistics.quantiles(samples, n=4)
        run |= {"copy_gbps": round(statistics.median(samples), 1), "copy_spread_gbps": round(high - low, 1)}
        for record in self._content["records"]:
            if self._content["runs"][record["run"]] is run:
                record |= of_copy(record, run["copy_gbps"])
        self._write()

    def skipped(self, fields: dict) -> None:
        measured = [(x["case"], x["impl"]) for x in self._content.get("records", [])]
        if self._content and (fields.get("case"), fields["impl"]) not in measured:
            self._replace("skipped", fields)

    def _replace(self, where: str, fields: dict) -> None:
        content = self._content

        def key(x):
            return x.get("case"), x["impl"]

        places = [key(x) for x in content[where]]
        if key(fields) in places:
            content[where][places.index(key(fields))] = fields
        else:
            content[where].append(fields)
        if where == "records":
            content["skipped"] = [x for x in content["skipped"] if key(x) != key(fields)]
        self._write()

    def _write(self) -> None:
        if not self._keep:
            return
        assert self.path is not None
        counts = collections.Counter(x["run"] for x in self._content["records"])
        runs = list(enumerate(self._content["runs"]))
        _, main = max(runs, key=lambda run: (run[1]["impl"] == "gdn_jax" and counts[run[0]] > 0, counts[run[0]]))
        head = "date", "command", "copy_gbps", "copy_spread_gbps", "matmul_tflops"
        self._content |= {name: main.get(name) for name in head}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = {name: value for name, value in self._content.items() if name not in ("records", "skipped")}
        # One record a line, so that a change of one number is a change of one line.
        text = json.dumps(lines, indent=1)[:-2]
        for name in ("records", "skipped"):
            entries = ",\n  ".join(json.dumps(x) for x in self._content[name])
            text += f',\n "{name}": [\n  {entries}\n ]' if entries else f',\n "{name}": []'
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(text + "\n}\n")
        os.replace(temporary, self.path)
