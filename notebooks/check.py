"""Checks the notebooks: each pair is one notebook, stored with its outputs, and runs from top to bottom.

python notebooks/check.py             compares the pairs and executes copies of them
python notebooks/check.py --update    writes each .ipynb anew from its .py, with the outputs of a run
"""

import argparse
import pathlib
import sys
import time

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = pathlib.Path(__file__).parent
LARGEST_BYTES = 300_000
CELL_TIMEOUT_S = 180


def read_script(script: pathlib.Path) -> nbformat.NotebookNode:
    return jupytext.read(script, fmt="py:percent")


def stored_faults(script: pathlib.Path) -> list[str]:
    """What is wrong with the .ipynb of a script, as it stands."""
    path = script.with_suffix(".ipynb")
    if not path.exists():
        return [f"{path.name} is missing"]
    stored, faults = nbformat.read(path, as_version=4), []
    nbformat.validate(stored)
    if [(c.cell_type, c.source) for c in stored.cells] != [(c.cell_type, c.source) for c in read_script(script).cells]:
        faults.append(f"{path.name} and {script.name} differ")
    code = [c for c in stored.cells if c.cell_type == "code"]
    if [c.execution_count for c in code] != list(range(1, len(code) + 1)):
        faults.append(f"{path.name} is not stored as one run from top to bottom left it")
    if any(o.output_type == "error" for c in code for o in c.outputs):
        faults.append(f"{path.name} is stored with an error")
    if path.stat().st_size > LARGEST_BYTES:
        faults.append(f"{path.name} has {path.stat().st_size} bytes, more than {LARGEST_BYTES}")
    return faults


def execute(script: pathlib.Path, target: pathlib.Path) -> None:
    """Runs the notebook in its own directory and writes it with outputs to `target`."""
    notebook = read_script(script)
    for i, cell in enumerate(notebook.cells):  # random otherwise, and new in every run
        cell.id = f"{script.stem[:2]}-{i:02d}"
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(script.parent)}},
    )
    client.execute()
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of the names to take; default: all")
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--output-dir", type=pathlib.Path, default=HERE.parent / "build" / "notebooks")
    options = parser.parse_args()

    scripts = [s for s in sorted(HERE.glob("[0-9]*.py")) if s.name.startswith(tuple(options.names) or "")]
    faults = [] if scripts else ["no notebook has such a name"]
    faults += [f"{p.name} has no .py" for p in sorted(HERE.glob("*.ipynb")) if not p.with_suffix(".py").exists()]
    for script in scripts:
        target = script.with_suffix(".ipynb")
        start = time.monotonic()
        try:
            execute(script, target if options.update else options.output_dir / target.name)
        except CellExecutionError as error:
            faults.append(f"{script.name} fails: {error}")
        print(f"{script.stem}: {time.monotonic() - start:.1f} s", flush=True)
        faults += stored_faults(script)
    print("\n".join(faults), file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
