"""Rows of results: printed aligned, appended to benchmarks/results/SUITE.csv, drawn from there."""

import csv
import datetime
import importlib.metadata
import os
import pathlib
import subprocess

import jax

import jattn

RESULTS = pathlib.Path(__file__).parent / "results"
WIDTHS = {"shape": 40, "implementation": 14}


def device_name():
    """A GPU's name, or the CPU's model and the number of cores this process may use."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    info = pathlib.Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")
    return f"{model}, {len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores"


def commit():
    """The checked-out commit, with a + when files differ from it; empty outside a git checkout."""
    command = ["git", "describe", "--always", "--dirty=+"]
    try:
        found = subprocess.run(command, cwd=RESULTS.parent, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return found.stdout.strip()


def environment():
    return {
        "date": datetime.date.today().isoformat(),
        "device": device_name(),
        "jax": jax.__version__,
        "jaxlib": importlib.metadata.version("jaxlib"),
        "jattn": jattn.__version__,
        "commit": commit(),
    }


def append(path, rows):
    """Adds dicts with equal keys to the CSV file at `path`; its header never changes under old rows."""
    fields = list(rows[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = not path.exists() or not path.stat().st_size
    if not fresh:
        with path.open(newline="") as file:
            header = next(csv.reader(file))
        if header != fields:
            raise ValueError(f"{path.name} has columns {header}, the new rows have {fields}")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields)
        if fresh:
            writer.writeheader()
        writer.writerows(rows)


def load(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def latest(rows):
    """The last row of each shape, pass and implementation, in order of first appearance."""
    return list({(row["shape"], row.get("pass"), row["implementation"]): row for row in rows}.values())


def line(row, header=False):
    """The row, or the names of its columns, aligned: text to the left, numbers to the right."""
    cells = []
    for name, value in row.items():
        shown = name if header else str(value)
        width = WIDTHS.get(name, max(len(name), 8))
        cells.append(shown.ljust(width) if isinstance(value, str) else shown.rjust(width))
    return "  ".join(cells)
