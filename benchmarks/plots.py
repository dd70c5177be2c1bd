"""Drawings of recorded results."""

import matplotlib

matplotlib.use("Agg")  # files only, no display
from matplotlib import pyplot as plt  # noqa: E402

from benchmarks import cases, record  # noqa: E402


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


def against_fa3(rows, axes):
    """Bars of time relative to FlashAttention-3's, by cell; forward where a cell has both passes."""
    grid = {str(case) for case in cases.GRID}
    mine = [row for row in rows if row["shape"] in grid and row["pass"] == "fwd" and row["times_fa3"]]
    _bars(axes, mine, "implementation", "times_fa3", limit=2.0)
    axes.set(xlabel="forward time relative to FlashAttention-3 (left is faster)")


def feature_cost(rows, axes):
    """jattn's time with a feature relative to the plain causal and full kernels of the same run."""
    mine = [row for row in rows if row["implementation"] == "jattn" and row["pass"] == "fwd" and row["times_causal"]]
    both = [row | {"relative to": name, "cost": row[f"times_{name}"]} for row in mine for name in ("causal", "full")]
    _bars(axes, both, "relative to", "cost")
    axes.set(xlabel="jattn forward, relative to the plain kernel")


def _bars(axes, rows, label, value, limit=None):
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    names = list(dict.fromkeys(row[label] for row in rows))
    for number, name in enumerate(names):
        mine = [row for row in rows if row[label] == name]
        places = [shapes.index(row["shape"]) + 0.8 * number / len(names) for row in mine]
        axes.barh(places, [float(row[value]) for row in mine], height=0.8 / len(names), label=name, align="edge")
    axes.axvline(1, color="k", linestyle="--")
    axes.set_yticks([number + 0.4 for number in range(len(shapes))], shapes, fontsize="x-small")
    axes.invert_yaxis()
    if limit:
        axes.set_xlim(right=limit)


#: What a suite's picture shows, side by side.
DRAWINGS = {"cpu": (cpu,), "memory": (memory,), "attention": (against_fa3, feature_cost)}


def draw(suite):
    """Draws the suite's latest rows on the device of the last one; returns the path of the picture."""
    rows = record.load(record.RESULTS / f"{suite}.csv")
    last = rows[-1]
    panels = [panel for panel in DRAWINGS[suite] if panel is not feature_cost or any(r["times_full"] for r in rows)]
    figure, _ = plt.subplots(1, len(panels), figsize=(7 * len(panels), 4 * len(panels)), layout="constrained")
    mine = record.latest([row for row in rows if row["device"] == last["device"]])
    for panel, place in zip(panels, figure.axes, strict=True):
        panel(mine, place)
        place.set_title(f"{last['device']}, jax {last['jax']}, {last['date']}", fontsize="small")
        if place.get_legend_handles_labels()[0]:
            place.legend(fontsize="small", framealpha=1)
    path = record.RESULTS / f"{suite}.png"
    figure.savefig(path, dpi=150)
    return path
