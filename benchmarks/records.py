"""Lines between the process that measures and the one that writes `results/<gpu>.json`, and that file."""

import datetime
import json
import os
import pathlib

RESULTS = pathlib.Path(__file__).parent / "results"
_MARK = "@record "


def emit(kind: str, **fields) -> None:
    """One message to the parent: `environment`, `record` or `skipped`."""
    print(_MARK + json.dumps({"kind": kind, **fields}), flush=True)


def parse(line: str) -> dict | None:
    """The message in a line of a child's output; None if it is ordinary output."""
    return json.loads(line[len(_MARK) :]) if line.startswith(_MARK) else None


def result_name(device: str) -> str:
    """`NVIDIA H200` is kept in `h200.json`."""
    return device.lower().replace("nvidia", "").strip().replace(" ", "_")


class ResultFile:
    """The results of one device, written anew at every record: a run that is cut short leaves what it measured."""

    def __init__(self, path: pathlib.Path | None, command: str, merge: bool, keep: bool = True):
        """`path` None is the usual place of the device; nothing is written unless `keep`."""
        self.path = path
        self._command = command
        self._merge = merge
        self._keep = keep
        self._content: dict = {}
        self._found: tuple[str, dict] | None = None

    def environment(self, impl: str, fields: dict) -> None:
        """What a process found before it measures. The package's own process decides the head of the file.

        A merged run that measures nothing must not stand as the one that the results are of: it is entered with
        its first record.
        """
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        if not self._content:
            path = self.path = self.path or RESULTS / f"{result_name(fields['device'])}.json"
            old = json.loads(path.read_text()) if self._merge and path.exists() else {}
            if old.get("device", fields["device"]) != fields["device"]:
                raise ValueError(f"{path} is of {old['device']}, and this is {fields['device']}")
            self._content = {"device": fields["device"], "versions": {}, "date": today, "command": self._command}
            self._content |= {"copy_gbps": None, "matmul_tflops": None, "runs": {}, "records": [], "skipped": []} | old
        self._found = impl, {"date": today, "command": self._command, **fields}
        if impl not in self._content["runs"]:
            self._enter()

    def _enter(self) -> None:
        if self._found is None:
            return
        (impl, fields), self._found = self._found, None
        content = self._content
        content["runs"][impl] = fields
        content["skipped"] = [x for x in content["skipped"] if x["impl"] != impl]
        content["versions"] |= fields["versions"]
        if impl == "gdn_jax" or content["copy_gbps"] is None:
            rates = {name: fields.get(name) for name in ("copy_gbps", "matmul_tflops")}
            content.update(date=fields["date"], command=self._command, **rates)
        self._write()

    def record(self, fields: dict) -> None:
        self._enter()
        self._replace("records", fields)

    def skipped(self, fields: dict) -> None:
        if self._content:
            self._replace("skipped", fields)

    def _replace(self, where: str, fields: dict) -> None:
        content = self._content

        def key(x):
            return x.get("case"), x["impl"]

        content[where] = [x for x in content[where] if key(x) != key(fields)] + [fields]
        if where == "records":
            content["skipped"] = [x for x in content["skipped"] if key(x) != key(fields)]
        self._write()

    def _write(self) -> None:
        if not self._keep:
            return
        assert self.path is not None
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
