"""Rewrites the measured tables of docs/performance.md from results/attention.csv and sequence.csv:
`python -m benchmarks.tables`.

A table stands between `<!-- NAME -->` and `<!-- end NAME -->`; one that is not there yet is put at the end.
"""

import pathlib

from benchmarks import cases, record

PAGE = pathlib.Path(__file__).parents[1] / "docs" / "performance.md"
PEERS = ("fa3", "cudnn", "tokamax", "jla", "xla")

# Goals: time relative to FlashAttention-3's, forward and forward + backward.
GOALS = {
    "B4 S4096 N16 H128 causal": (1.00, 1.00),
    "B1 S16384 N16 H128 causal": (1.00, 1.01),
    "B4 S4096 N16 H128 full": (1.01, 1.02),
    "B1 S16384 N16 H128 full": (1.01, 1.02),
    "B16 S1024 N16 H128 causal": (0.95, 1.00),
    "B4 S4096 N32/8 H128 causal": (1.00, 0.98),
    "B4 S4096 N32 H64 causal": (0.95, 0.97),
    "B4 S4096 N32 H64 full": (0.95, 0.98),
    "B16 S1024 N32 H64 causal": (0.82, None),
    "B1 S16384 N32 H64 causal": (0.96, None),
    "B4 S4096 N8 H256 causal": (0.97, 1.10),
    "B1 S65536 N8 H128 causal": (1.00, 1.01),
}
BEST_PEER_GOALS = {"B4 S4096 N16 H192 D128 causal": (0.90, 0.90)}
# Relative to compiled PyTorch FlexAttention, forward, then forward and backward.
FLEX_GOALS = {
    "B4 S4096 N16 H128 causal": (0.54, 0.57),
    "B4 S4096 N16 H128 causal window(511,0)": (0.47, 0.45),
    "B4 S4096 N16 H128 causal documents 1024": (0.45, 0.45),
    "B4 S4096 N16 H128 causal soft cap 20": (0.40, 0.42),
    "B4 S4096 N16 H128 causal ALiBi": (0.60, 0.65),
}
_SKIPPING = ("documents 1024", "prefix 512", "blocks 25%", "key lengths")


def ratio(row, name):
    return float(row[f"times_{name}"]) if row[f"times_{name}"] else None


def goal(row):
    """(the goal, what it is held against) of a plain cell; None where there is none."""
    backward = row["pass"] == "fwd+bwd"
    if row["shape"] in BEST_PEER_GOALS:
        found = [r for peer in PEERS if (r := ratio(row, peer)) is not None]
        return BEST_PEER_GOALS[row["shape"]][backward], max(found, default=None)
    return GOALS.get(row["shape"], (None, None))[backward], ratio(row, "fa3")


def verdict(wanted, found):
    return "–" if wanted is None or found is None else "met" if found <= wanted else "not met"


def rule(case, row):
    """Milliseconds that a mask may take: its share of tiles of the full kernel's time, 15% and 10 µs more; or None."""
    if (case.feature not in _SKIPPING and not case.shape.window) or not row["times_full"]:
        return None
    return 1.15 * case.tiles * float(row["ms"]) / float(row["times_full"]) + 0.010


def number(x, digits=3):
    return "–" if x is None else f"{x:.{digits}f}"


def grid_table(rows, of):
    lines = [
        "| shape | jattn ms | TFLOP/s | % of matmul | × FA3 | × cuDNN | × tokamax | × jla | × xla | goal | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    known = {row["shape"]: row for row in rows if row["pass"] == of}
    for case in cases.GRID:
        if (row := known.get(str(case))) is None:
            continue
        wanted, found = goal(row)
        peers = " | ".join(number(ratio(row, peer)) for peer in PEERS)
        text = "–" if wanted is None else f"≤ {wanted:.2f}" + (" of the best" if str(case) in BEST_PEER_GOALS else "")
        measured = f"{float(row['ms']):.3f} | {float(row['tflops']):.0f} | {float(row['percent_of_matmul']):.0f}"
        lines.append(f"| {case} | {measured} | {peers} | {text} | {verdict(wanted, found)} |")
    return lines


def feature_table(rows, of):
    lines = [
        "| shape | jattn ms | × causal | × full | rule ms | | × Flex | goal | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    known = {row["shape"]: row for row in rows if row["pass"] == of}
    for case in (cases.PLAIN["causal"], *cases.FEATURES):
        if (row := known.get(str(case))) is None:
            continue
        allowed, ms, flex = rule(case, row), float(row["ms"]), ratio(row, "flex")
        wanted = FLEX_GOALS.get(str(case), (None, None))[of == "fwd+bwd"]
        plain = f"{number(ratio(row, 'causal'), 2)} | {number(ratio(row, 'full'), 2)}"
        held = f"{number(allowed)} | {verdict(allowed, ms)}"
        beside = f"{number(flex, 2)} | {'–' if wanted is None else f'≤ {wanted:.2f}'} | {verdict(wanted, flex)}"
        lines.append(f"| {case} | {ms:.3f} | {plain} | {held} | {beside} |")
    return lines


def tables(rows):
    """name -> lines, of jattn's latest rows on the device of the last one; only tables that have rows."""
    last = rows[-1]
    mine = record.latest([r for r in rows if r["device"] == last["device"] and r["implementation"] == "jattn"])
    note = f"Measured on {last['device']}, jax {last['jax']}, {last['date']}; × is jattn's time over the other's."
    found = {
        f"{kind} {of}": writer(mine, of)
        for kind, writer in (("attention", grid_table), ("features", feature_table))
        for of in ("fwd", "fwd+bwd")
    }
    fewest = {"attention": 3, "features": 4}  # the features' cost is beside the plain kernel's
    return {name: [note, "", *lines] for name, lines in found.items() if len(lines) >= fewest[name.split()[0]]}


def sequence_table(rows):
    """Lines of sequence parallelism on GPUs; the ideal is the time of one device over the number of devices."""
    names = "shape", "pass", "implementation", "layout"
    rows = list({tuple(map(row.get, names)): row for row in rows if row["dtype"] == "bfloat16"}.values())
    last = rows[-1]
    lines = [
        f"Measured on {last['device']} × {last['devices']}, jax {last['jax']}, {last['date']}; calls in a row.",
        "",
        "| shape | pass | strategy | ms | in kernels | % of ideal | predicted ms | off |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        strategy = f"{row['implementation']} {row['layout'].strip()}".strip()
        expected = float(row["predicted_ms"]) if row["predicted_ms"] else None
        off = "–" if expected is None else f"{100 * (expected / float(row['ms']) - 1):+.0f}%"
        kernels = float(row["kernel_ms"]) if row["kernel_ms"] else None
        measured = f"{float(row['ms']):.2f} | {number(kernels, 2)} | {row['percent_of_ideal'] or '–'}"
        lines.append(f"| {row['shape']} | {row['pass']} | {strategy} | {measured} | {number(expected, 2)} | {off} |")
    return lines


def replaced(page, name, lines):
    """The page with the lines between the markers of `name`."""
    first, last = f"<!-- {name} -->", f"<!-- end {name} -->"
    text = "\n".join([first, *lines, last])
    if first not in page:
        return f"{page.rstrip()}\n\n{text}\n"
    before, rest = page.split(first, 1)
    if last not in rest:
        raise SystemExit(f"{first} has no {last} after it")
    return before + text + rest.split(last, 1)[1]


def main():
    page = PAGE.read_text()
    for name, lines in tables(record.load(record.RESULTS / "attention.csv")).items():
        page = replaced(page, name, lines)
    page = replaced(page, "sequence", sequence_table(record.load(record.RESULTS / "sequence.csv")))
    PAGE.write_text(page)
    print(PAGE)


if __name__ == "__main__":
    main()
