"""The figures of docs/performance.md: recorded rows -> SVG text. `python -m benchmarks.tables` writes them."""

from benchmarks import caches, cases, svg

PEERS = {"fa3": "FlashAttention-3", "cudnn": "cuDNN", "tokamax": "tokamax", "jla": "jla", "xla": "jax.nn (XLA)"}
PASSES = {"fwd": "forward", "fwd+bwd": "forward and backward"}
KERNEL = "jattn mosaic"  # over caches
DECODE = "![bandwidth of decoding against the page size](performance_decode.svg)"


def caption(rows, *lines):
    """When and where the rows were measured, and what else there is to say."""
    dates = sorted({row["date"] for row in rows})
    versions = ", ".join(sorted({row["jax"] for row in rows}))
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return [f"Measured on {rows[-1]['device']}, jax {versions}, {when}.", *lines]


def short(length):
    return f"{length // 1024}k" if length % 1024 == 0 else str(length)


def speed(rows):
    """TFLOP/s of plain causal calls of each implementation against the length."""
    names, panels, used = ["jattn", *PEERS], [], []
    for H in (128, 64):
        wanted = {str(c): c.shape for c in cases.GRID if (c.shape.H, c.shape.D, c.shape.K) == (H, H, c.shape.N)}
        wanted = {name: shape for name, shape in wanted.items() if shape.causal}
        for of, told in PASSES.items():
            found = {}
            for row in rows:
                if row["shape"] in wanted and row["pass"] == of and row["implementation"] in names:
                    point = wanted[row["shape"]].S, float(row["tflops"])
                    found.setdefault(names.index(row["implementation"]), []).append(point)
                    used.append(row)
            if found:
                ticks = {S: short(S) for S in sorted({S for points in found.values() for S, _ in points})}
                found = {i: sorted(points) for i, points in found.items()}
                title = f"head dim {H}, {told}"
                panels.append(svg.lines(title, "sequence length (tokens)", "TFLOP/s", found, ticks))
    told = caption(used, "bfloat16, causal, as many key heads as query heads; kernel times, each of its latest run.")
    return svg.figure("Speed against the sequence length", told, ["jattn", *PEERS.values()], panels)


def ratios(merged):
    """jattn's time over each peer's."""
    names, panels = list(PEERS), []
    for of, told in PASSES.items():
        table = {row["shape"]: row for row in merged if row["pass"] == of}
        found = [
            (str(case), {i + 1: float(x) for i, peer in enumerate(names) if (x := table[str(case)][f"times_{peer}"])})
            for case in cases.GRID
            if str(case) in table
        ]
        if found:
            panels.append(svg.dots(told, "jattn's time / the other's", found, 1))
    told = caption(merged, "bfloat16; kernel times, both in one run. Right of 1 jattn is slower.")
    return svg.figure("Time beside other implementations", told, ["", *PEERS.values()], panels, 1, 350)


def features(merged):
    """Time of a feature over that of the plain causal kernel, and over FlexAttention's."""
    wanted = {str(case): str(case).partition("H128 ")[2] for case in cases.FEATURES}
    names, panels = list(PASSES), []
    for column, told in (("causal", "the plain causal call"), ("flex", "compiled PyTorch FlexAttention")):
        found = {}
        for row in merged:
            if row["shape"] in wanted and row[f"times_{column}"] and row["pass"] in names:
                values = found.setdefault(wanted[row["shape"]], {})
                values[names.index(row["pass"])] = float(row[f"times_{column}"])
        if found:
            panels.append(svg.dots(f"beside {told}", "jattn's time / the other's", list(found.items()), 1, 175))
    told = caption(merged, "B4 S4096 N16 H128, bfloat16; times of all kernels of a call, both in one run.")
    return svg.figure("What a feature costs", told, list(PASSES.values()), panels, height=320)


def memory(rows):
    """Temporary bytes of forward and backward against the length."""
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    found = {i: [] for i in range(len(names))}
    for row in rows:
        found[names.index(row["implementation"])].append((int(row["length"]), int(row["temporary_bytes"]) / 2**30))
    inputs = sorted({(int(row["length"]), int(row["qkvo_bytes"]) / 2**30) for row in rows})
    series = {i: sorted(points) for i, points in found.items()}
    ticks = {S: short(S) for S, _ in inputs}
    panel = svg.lines("", "sequence length (tokens)", "temporary memory (GiB)", series, ticks, (True, True), inputs)
    heads = rows[-1]["shape"].partition(f"S{rows[-1]['length']} ")[2]
    told = f"{heads}, {rows[-1]['dtype']}, one sequence, forward and backward, as XLA compiles it."
    told = caption(rows, told, "Dashed: the bytes of q, k, v and out.")
    return svg.figure("Memory against the sequence length", told, names, [panel], 1, 320, 620)


def decode(rows):
    """Bandwidth of decoding against the page size, a panel a shape, a curve a dtype of the cache."""
    sizes = sorted({page for row in rows if (page := caches.parts(row["shape"])[1])})
    ticks = dict(enumerate([*map(str, sizes), "no pages"]))
    names, peer = ["jattn", *(f"jattn, {x}" for x in caches.STORED), "cuDNN"], len(caches.STORED) + 1
    wanted = dict.fromkeys(caches.parts(str(case))[0] for case in caches.table("decode", "targets"))
    found, used = {}, []
    for row in rows:
        base, page = caches.parts(row["shape"])
        if (row["implementation"], page) == ("cudnn", None):
            curve = peer
        elif row["implementation"] == KERNEL:
            curve = [*caches.STORED].index(row["cache"]) + 1 if row["cache"] in caches.STORED else 0
        else:
            continue
        if base in wanted and row["tokens"] == "equal":
            point = sizes.index(page) if page else len(sizes), float(row["gbytes_per_s"]) / 1e3
            found.setdefault(base, {}).setdefault(curve, []).append(point)
            used.append(row)
    panels = [
        svg.lines(
            base, "page size (tokens)", "TB/s", {i: sorted(x) for i, x in found[base].items()}, ticks, (False, False),
            high=5,
        )
        for base in wanted
        if base in found
    ]  # fmt: skip
    told = caption(used, "One new token a sequence; bytes of all keys, values and scales over kernel times.")
    return svg.figure("Decoding: bandwidth against the page size", told, names, panels, 3, 220)


def linear(rows):
    """Milliseconds of linear and softmax attention against the length."""
    names, panels = {"kda": "KDA", "gated_delta_rule": "gated delta rule", "attention": "softmax, causal"}, []
    for of, told in PASSES.items():
        found = {}
        for row in rows:
            if row["pass"] == of:
                point = int(row["length"]), float(row["ms"])
                found.setdefault(list(names).index(row["implementation"]), []).append(point)
        if found:
            ticks = {T: short(T) for T in sorted({T for points in found.values() for T, _ in points})}
            found = {i: sorted(points) for i, points in found.items()}
            panels.append(svg.lines(told, "sequence length (tokens)", "time (ms)", found, ticks, (True, True)))
    heads = " ".join(rows[-1]["shape"].split()[2:])
    told = caption(rows, f"One sequence, {heads}, {rows[-1]['dtype']}; both are jattn's.")
    return svg.figure("Linear attention against the sequence length", told, list(names.values()), panels, height=280)


def sequence(rows):
    """Speed of each strategy over several devices, % of that many times one device."""
    panels, strategies = [], []
    for of, told in PASSES.items():
        found = {}
        for row in rows:
            if row["pass"] == of and row["percent_of_ideal"]:
                strategy = f"{row['implementation']} {row['layout'].strip()}"
                strategies += [] if strategy in strategies else [strategy]
                found.setdefault(row["shape"], {})[strategies.index(strategy)] = float(row["percent_of_ideal"])
        if found:
            panels.append(svg.dots(told, "% of ideal", list(found.items()), 100))
    number = max(int(row["devices"]) for row in rows)
    told = caption(rows, f"{number} devices of one host, bfloat16; the ideal is 1/{number} of the time of one device.")
    return svg.figure("A sequence over several devices", told, strategies, panels, 1, 210)
