"""Drawings of recorded results."""

import matplotlib

matplotlib.use("Agg")  # files only, no display
from matplotlib import pyplot as plt  # noqa: E402

from benchmarks import record  # noqa: E402


def memory(rows, axes):
    for name in dict.fromkeys(row["implementation"] for row in rows):
        mine = [row for row in rows if row["implementation"] == name]
        axes.plot([int(r["length"]) for r in mine], [int(r["temporary_bytes"]) / 2**20 for r in mine], "o-", label=name)
    inputs = {int(row["length"]): int(row["qkvo_bytes"]) / 2**20 for row in rows}
    axes.plot(inputs.keys(), inputs.values(), "k--", label="q, k, v and out")
    axes.set(xscale="log", yscale="log", xlabel="sequence length", ylabel="temporary MiB, forward + backward")
    axes.set_xticks(list(inputs), [str(length) for length in inputs], minor=False)
    axes.minorticks_off()


def cpu(rows, axes):
    mine = [row for row in rows if row["implementation"].startswith("jattn")]
    axes.barh([row["shape"] for row in mine], [float(row["times_jax_nn"]) for row in mine], label="jattn")
    axes.axvline(1, color="k", linestyle="--", label="jax.nn xla")
    axes.invert_yaxis()
    axes.set(xlabel="speed, forward + backward, relative to jax.nn")


DRAWINGS = {"cpu": cpu, "memory": memory}


def draw(suite):
    """Draws the suite's latest rows on the device of the last one; returns the path of the picture."""
    rows = record.load(record.RESULTS / f"{suite}.csv")
    last = rows[-1]
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    DRAWINGS[suite](record.latest([row for row in rows if row["device"] == last["device"]]), axes)
    axes.set_title(f"{last['device']}, jax {last['jax']}, {last['date']}", fontsize="small")
    axes.legend()
    path = record.RESULTS / f"{suite}.png"
    figure.savefig(path, dpi=150)
    return path
