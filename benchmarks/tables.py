"""Rewrites the measured tables of docs/performance.md, and its figures beside it, from the CSV files in results/:
`python -m benchmarks.tables`.

A table stands between `<!-- NAME -->` and `<!-- end NAME -->`; one that is not there yet is put at the end. A suite
without a CSV file leaves nothing between them.
"""

import argparse
import pathlib

from benchmarks import caches, cases, decode, plots, record

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
# Relative to cuDNN on contiguous caches: contiguous, and in pages.
DECODE_GOALS = {
    "B64 S8192 N32/8 H128": (1.03, 1.08),
    "B8 S8192 N32/8 H128": (1.00, 1.05),
    "B1 S131072 N32/8 H128": (1.00, 1.05),
    "B128 S1024 N64/8 H128": (1.00, 1.05),
}
QUANTISED_GOAL = 0.56  # of the time over the same cache in bfloat16
LENGTHS_GOAL = 90  # % of the bandwidth over equal lengths, where they are uniform in 1 to S
LAUNCHES = 2  # of a call
CACHE_PEERS = {name.replace(".", "_"): plots.PEERS.get(name, name) for name in decode.PEERS} | {
    "triton": "jax's Triton kernel"
}
# Suites with a section of their own at the end of the page, once they have rows: title, column -> heading.
SECTIONS = {
    "linear": ("Linear attention", {
        "shape": "shape", "pass": "pass", "implementation": "", "ms": "ms", "percent_of_plan": "% of the plan's limit",
        "percent_of_fused": "% of one kernel's limit", "times_jla": "× jla", "goal": "goal", "verdict": "",
    }),
}  # fmt: skip
# Relative to jla, forward, then forward and backward; of clipped decays too.
LINEAR_GOALS = {
    "kda B1 T8192 N32 H128": (0.50, 0.60), "kda B4 T4096 N32 H128": (0.56, 0.60),
    "kda B1 T65536 N16 H128": (0.42, 0.55),
    "gated_delta_rule B1 T8192 N32 H128": (0.75, 0.75), "gated_delta_rule B4 T4096 N32 H128": (0.90, 0.85),
}  # fmt: skip
SHARE_GOAL = 90  # % of ideal, sequence parallelism
SAME = 0.05  # cards, and runs on one, differ by less
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
        "| shape | jattn ms | longest kernel | × causal | × full | rule ms | | × Flex | goal | |",
        "|---|---|---|---|---|---|---|---|---|---|",
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
        lines.append(f"| {case} | {ms:.3f} | {float(row['longest_ms']):.3f} | {plain} | {held} | {beside} |")
    return lines


def on_last_device(rows):
    return [row for row in rows if row["device"] == rows[-1]["device"]]


def merged(rows):
    """jattn's latest row of each shape and pass; what that run did not measure is of the latest one that did, if jattn
    took the same time there: a ratio of another kernel says nothing about this one."""
    found = {}
    for row in on_last_device(rows):
        if row["implementation"] == "jattn":
            before = found.get((row["shape"], row["pass"]), row)
            same = abs(float(before["ms"]) / float(row["ms"]) - 1) <= SAME
            kept = {name: value for name, value in row.items() if value or not same}
            found[row["shape"], row["pass"]] = before | kept
    return list(found.values())


def tables(rows):
    """name -> lines, of jattn's latest rows on the device of the last one; only tables that have rows."""
    last, mine = rows[-1], merged(rows)
    note = (
        f"Measured on {last['device']}, jax {last['jax']}, {last['date']}; × is jattn's time over the other's, "
        "in the latest run that had both."
    )
    found = {
        f"{kind} {of}": writer(mine, of)
        for kind, writer in (("attention", grid_table), ("features", feature_table))
        for of in ("fwd", "fwd+bwd")
    }
    fewest = {"attention": 3, "features": 4}  # the features' cost is beside the plain kernel's
    return {name: [note, "", *lines] for name, lines in found.items() if len(lines) >= fewest[name.split()[0]]}


def cache_rows(suite):
    """The latest rows of "decode" or "paged", if that suite has a file."""
    path = record.RESULTS / f"{suite}.csv"
    return record.latest(on_last_device(record.load(path))) if path.exists() else []


def cache_goal(row):
    """(the goal as text, whether it is met) of a row over caches; None where there is none."""
    base, page = caches.parts(row["shape"])
    if row["implementation"] == plots.KERNEL and row["cache"] in caches.STORED and row["tokens"] == "equal":
        text, found, wanted = f"≤ {QUANTISED_GOAL} × bfloat16", row["times_unquantised"], QUANTISED_GOAL
    elif row["implementation"] == plots.KERNEL and row["tokens"] == "uniform":
        text, found, wanted = f"≥ {LENGTHS_GOAL}% of equal", row["percent_of_equal"], LENGTHS_GOAL
        return text, verdict(-wanted, -float(found) if found else None)
    elif row["implementation"] == plots.KERNEL and row["tokens"] == "equal" and base in DECODE_GOALS:
        wanted, found = DECODE_GOALS[base][page is not None], row["times_cudnn"]
        text = f"≤ {wanted:.2f} × cuDNN"
    else:
        return None
    return text, verdict(wanted, float(found) if found else None)


def cache_table(rows):
    """Lines of "decode" or "paged": the table, and what it says of goals, launches and latency."""
    if not rows:
        return []
    last = rows[-1]
    fastest = max(rows, key=lambda row: float(row["percent_of_read"] or 0))  # whose share is rounded least
    share = float(fastest["percent_of_read"] or 0)
    read = f"; a plain read reaches {float(fastest['gbytes_per_s']) / share / 10:.2f} TB/s" if share else ""
    lines = [
        f"Measured on {last['device']}, jax {last['jax']}, {last['date']}{read}; × is a call's time over the other's.",
        "",
        "| shape | call | µs | launches | TB/s | % of a read | × cuDNN | × bfloat16 | % of equal lengths | goal | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    goals = []
    for row in rows:
        if caches.parts(row["shape"])[1] and row["implementation"] in decode.CONTIGUOUS:
            continue  # those of contiguous caches have a table of their own
        text, held = cache_goal(row) or ("–", "–")
        goals += [held] if held != "–" else []
        columns = "launches", "percent_of_read", "times_cudnn", "times_unquantised", "percent_of_equal"
        launches, share, *relative, equal = (row[name] for name in columns)
        relative = " | ".join(number(float(x) if x else None) for x in relative)
        measured = (
            f"{float(row['us']):.1f} | {launches or '–'} | {float(row['gbytes_per_s']) / 1e3:.2f} | {share or '–'}"
        )
        lines.append(
            f"| {row['shape']} | {row['implementation']} | {measured} | {relative} | {equal or '–'} | {text} | {held} |"
        )
    told = [f"Goals met: {goals.count('met')} of {len(goals)}."] if goals else []
    return [*lines, "", " ".join([*told, *_launches(rows), *_latencies(rows)])]


def _launches(rows):
    counted = [row for row in rows if row["implementation"] == plots.KERNEL and row["launches"]]
    more = [f"{row['shape']} ({row['launches']})" for row in counted if int(row["launches"]) > LAUNCHES]
    told = f"Of {len(counted)} calls of jattn, {len(more) or 'none'} launch{'es' * (len(more) < 2)} more than"
    return [f"{told} {LAUNCHES} kernels{': ' * bool(more)}{'; '.join(more)}."] if counted else []


def _latencies(rows):
    """A sentence: the time of one sequence alone."""
    peer = {row["shape"]: float(row["us"]) for row in rows if row["implementation"] == "cudnn"}
    found = [
        f"{row['shape'].partition(' ')[2]} {float(row['us']):.1f} µs"
        + (f" (cuDNN {peer[row['shape']]:.1f})" if row["shape"] in peer else "")
        for row in rows
        if row["implementation"] == plots.KERNEL and row["shape"].startswith("B1 ")
    ]
    return [f"One sequence alone: {'; '.join(found)}."] if found else []


def first_row(rows):
    """A sentence on the parts of forward and backward in the first row of the table."""
    shape = str(cases.GRID[0])
    mine = {row["pass"]: row for row in merged(rows) if row["shape"] == shape}
    peer = [r for r in rows if (r["shape"], r["pass"], r["implementation"]) == (shape, "fwd+bwd", "fa3")]
    if set(mine) != {"fwd", "fwd+bwd"}:
        return []
    whole, backward, forward = (
        float(x) for x in (mine["fwd+bwd"]["ms"], mine["fwd+bwd"]["longest_ms"], mine["fwd"]["ms"])
    )
    other = f" (FlashAttention-3's {float(peer[-1]['longest_ms']):.2f} of {float(peer[-1]['ms']):.3f})" if peer else ""
    return [
        f"Of the {whole:.3f} ms of the first row the backward kernel takes {backward:.2f}{other}, the forward "
        f"{forward:.2f}, and what comes before and after the backward kernel (delta, zeros for dq, its conversion) "
        f"{whole - backward - forward:.2f}."
    ]


def training_section(rows):
    """Lines of "training": each model with jattn's attention beside the other's, and what attention's share says."""
    if not rows:
        return []
    last, rows = rows[-1], record.latest(on_last_device(rows))
    names = {
        "shape": "model", "implementation": "attention", "tokens_per_s": "tokens/s", "ms": "ms a step",
        "kernel_ms": "kernels, ms", "attention_ms": "attention's, ms", "attention_percent": "attention, % of kernels",
        "peak_gib": "peak GiB", "losses_1_2_5_10": "losses of steps 1, 2, 5, 10",
        "mean_of_the_last_20": "mean loss of the last 20",
    }  # fmt: skip
    lines = [
        "## Training a model",
        "",
        f"`./run bench training`, measured on {last['device']}, jax {last['jax']}, {last['date']}; "
        f"{last['million_parameters']} million parameters, {last['steps']} steps, bfloat16 products over float32 "
        "parameters, AdamW. Packed documents and windows: to `jax.nn` one dense mask a layer, in which nothing can be "
        "skipped. Memory is that of the compiled step.",
        "",
        f"| {' | '.join(names.values())} |",
        "|---" * len(names) + "|",
    ]
    for row in rows:
        cells = row | {"tokens_per_s": f"{int(row['tokens_per_s']):,}"}
        lines.append(f"| {' | '.join(cells[name] or '–' for name in names)} |")
    for shape in dict.fromkeys(row["shape"] for row in rows):
        mine, *others = sorted((r for r in rows if r["shape"] == shape), key=lambda r: r["implementation"] != "jattn")
        for other in others if mine["implementation"] == "jattn" else ():
            lines += ["", _amdahl(mine, other)]
    return lines


def _amdahl(mine, other):
    """What attention's share of the kernels lets a step gain, what it gained, and how far the losses part."""
    gained, apart = float(other["ms"]) / float(mine["ms"]), _apart(mine, other)
    told = f"With jattn's attention the step is {gained:.2f} times as fast"
    if mine["attention_ms"] and other["attention_ms"]:
        kernels, theirs, ours = (float(x) for x in (other["kernel_ms"], other["attention_ms"], mine["attention_ms"]))
        share = theirs / kernels
        told = (
            f"With {other['implementation']} attention takes {100 * share:.1f}% of the kernels' time. By Amdahl's law "
            f"a step that got it for nothing would be {1 / (1 - share):.2f} times as fast, and one in which it is "
            f"{theirs / ours:.2f} times as fast, as jattn's is, {1 / (1 - share + ours / kernels):.2f} times. "
            f"The step is {gained:.2f} times as fast"
        )
    return f"{told}. The losses of steps 1, 2, 5 and 10 differ by at most {apart:.1g} of their size."


def _apart(mine, other):
    pairs = zip(mine["losses_1_2_5_10"].split(), other["losses_1_2_5_10"].split(), strict=True)
    return max(abs(float(x) / float(y) - 1) for x, y in pairs)


def ordered_table(rows):
    lines = [
        f"Measured on {rows[-1]['device']}, jax {rows[-1]['jax']}, {rows[-1]['date']}.",
        "",
        "| shape | queries a step | in any order, ms | in order, ms | × |",
        "|---|---|---|---|---|",
    ]
    for row in {(row["shape"], row["queries_a_step"]): row for row in rows}.values():
        ms = f"{float(row['any_order_ms']):.3f} | {float(row['in_order_ms']):.3f}"
        lines.append(f"| {row['shape']} | {row['queries_a_step']} | {ms} | {number(float(row['times']))} |")
    return lines


def cpu_table(rows):
    mine = [row for row in record.latest(on_last_device(rows)) if row["implementation"].startswith("jattn")]
    last = mine[-1]
    lines = [
        f"Measured on {last['device']}, jax {last['jax']}, {last['date']}; {last['dtype']}, {last['pass']}.",
        "",
        "| shape | jattn ms | % of matmul | times faster than jax.nn |",
        "|---|---|---|---|",
    ]
    for row in mine:
        lines.append(f"| {row['shape']} | {row['ms']} | {row['percent_of_matmul']} | {row['times_jax_nn']} |")
    return lines


def section(name, rows):
    """Lines of a suite of `SECTIONS`: its latest rows as they are recorded."""
    title, columns = SECTIONS[name]
    last, rows = rows[-1], [row | _of_goals(row) for row in record.latest(on_last_device(rows))]
    return [
        f"## {title}",
        "",
        f"`./run bench {name}`, measured on {last['device']}, jax {last['jax']}, {last['date']}.",
        "",
        f"| {' | '.join(columns.values())} |",
        "|---" * len(columns) + "|",
        *(f"| {' | '.join(row[column] or '–' for column in columns)} |" for row in rows),
    ]


def _of_goals(row):
    """The columns of `SECTIONS` that are not recorded."""
    wanted = LINEAR_GOALS.get(row["shape"].removesuffix(" clipped"), (None, None))[row["pass"] == "fwd+bwd"]
    if wanted is None or row["implementation"] != "jattn" or not row.get("times_jla"):
        return {"goal": row.get("goal", ""), "verdict": row.get("verdict", "")}
    return {"goal": f"≤ {wanted:.2f}", "verdict": verdict(wanted, float(row["times_jla"]))}


def sequence_rows(rows):
    names = "shape", "pass", "implementation", "layout"
    return list({tuple(map(row.get, names)): row for row in rows if row["dtype"] == "bfloat16"}.values())


def sequence_table(rows):
    """Lines of sequence parallelism on GPUs; the ideal is the time of one device over the number of devices."""
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


def losses(attention, over_caches, sequence):
    """Lines: every measured call in which a peer was faster, worst first, and strategies that miss their share."""
    compared = [(row["shape"], row["pass"], peer, ratio(row, peer)) for row in attention for peer in (*PEERS, "flex")]
    compared += [
        (row["shape"], "pages" if caches.parts(row["shape"])[1] else "contiguous", peer, float(x))
        for row in over_caches
        if row["implementation"] == plots.KERNEL
        for peer in CACHE_PEERS
        if (x := row.get(f"times_{peer}"))
    ]
    compared = [found for found in compared if found[-1] is not None]
    lost = sorted((found for found in compared if found[-1] > 1), key=lambda found: -found[-1])
    names = CACHE_PEERS | plots.PEERS | {"flex": "FlexAttention"}
    lines = [
        f"Slower than a peer in {len(lost)} of {len(compared)} comparisons, worst first:",
        "",
        "| shape | call | slower than | × its time |",
        "|---|---|---|---|",
        *(f"| {shape} | {call} | {names[peer]} | {times:.3f} |" for shape, call, peer, times in lost),
    ]
    best = {}
    for row in sequence:
        if row["percent_of_ideal"]:
            call = f"{row['shape']} {row['pass']}"
            best[call] = max(best.get(call, 0.0), float(row["percent_of_ideal"]))
    short = [f"{call} ({share:.1f}%)" for call, share in sorted(best.items(), key=lambda x: x[1]) if share < SHARE_GOAL]
    told = f"Over several devices the best strategy is below {SHARE_GOAL}% of ideal in {len(short)} of {len(best)}"
    return [*lines, "", f"{told}: {'; '.join(short)}." if short else f"{told}."]


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


def report(page):
    """(the page with its tables, file name -> figure), as the CSV files give them."""
    names = "attention", "h200_ordered_sums", "sequence", "cpu", "memory", "scaling"
    attention, ordered, sequence, cpu, memory, scaling = (record.load(record.RESULTS / f"{x}.csv") for x in names)
    mine, sequence = merged(attention), sequence_rows(sequence)
    contiguous, paged = cache_rows("decode"), cache_rows("paged")
    over_caches = contiguous + paged
    found = tables(attention) | {
        "losses": losses(mine, over_caches, sequence),
        "first row": first_row(attention),
        "decode": cache_table(contiguous),
        "paged": cache_table(paged),
        "decode figure": [plots.DECODE] if over_caches else [],
        "ordered sums": ordered_table(ordered),
        "sequence": sequence_table(sequence),
        "training": training_section(_recorded("training")),
        "cpu": cpu_table(cpu),
    }
    found |= {name: section(name, rows) for name in SECTIONS if (rows := _recorded(name))}
    for name, lines in found.items():
        if lines or f"<!-- {name} -->" in page:
            page = replaced(page, name, lines)
    figures = {
        "speed": plots.speed(record.latest(on_last_device(attention))),
        "ratios": plots.ratios(mine),
        "features": plots.features(mine),
        "sequence": plots.sequence(sequence),
        "memory": plots.memory(record.latest(on_last_device(memory))),
        "linear": plots.linear(record.latest(on_last_device(scaling))),
    } | ({"decode": plots.decode(over_caches)} if over_caches else {})
    return page, {f"performance_{name}.svg": figure for name, figure in figures.items()}


def _recorded(suite):
    path = record.RESULTS / f"{suite}.csv"
    return record.load(path) if path.exists() else []


def main(argv=None):
    argparse.ArgumentParser(prog="python -m benchmarks.tables", description=__doc__).parse_args(argv)
    page, figures = report(PAGE.read_text(encoding="utf-8"))
    for path, text in {PAGE: page, **{PAGE.parent / name: figure for name, figure in figures.items()}}.items():
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
