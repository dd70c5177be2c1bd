"""Executes notebooks into demo-output/, outputs with them: `./run notebook [NUMBER ...]`, all of them without one."""

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

HERE = Path(__file__).resolve().parent
OUT = HERE.parent / "demo-output"
QUIET = ["--IPKernelApp.log_level=ERROR"]  # every kernel warns that its local sockets are not encrypted


def picked(numbers):
    for number in numbers or [""]:
        found = sorted(HERE.glob(f"{number}*.ipynb"))
        if not found:
            sys.exit(f"no such notebook: {number}")
        yield from found


def main(numbers):
    OUT.mkdir(exist_ok=True)
    for path in list(picked(numbers)):
        print(f"{path.name} ..", flush=True)
        begin, notebook = time.perf_counter(), nbformat.read(path, as_version=4)
        client = NotebookClient(notebook, resources={"metadata": {"path": HERE}}, extra_arguments=QUIET)
        try:
            client.execute()
        except CellExecutionError as error:
            sys.exit(str(error))
        nbformat.write(notebook, OUT / path.name)
        print(f"  executed in {time.perf_counter() - begin:.0f} s: {OUT.name}/{path.name}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
