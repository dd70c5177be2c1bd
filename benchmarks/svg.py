"""Figures of recorded results for docs/, as SVG text: the same bytes from the same rows, and legible on any page.

A figure is panels with one legend above and a caption below. Colours follow the reader's scheme, light or dark; marks
differ in form too.
"""

import html
import math

STYLE = """
text{font:12px system-ui,sans-serif;fill:#24292f}.end{text-anchor:end}.mid{text-anchor:middle}.small{font-size:11px}
.bold{font-weight:600}.paper{fill:#fff}.grid{stroke:#d8dee4}.frame,.rule{stroke:#57606a;fill:none}
.rule{stroke-dasharray:5 4}.line{fill:none;stroke-width:1.6}.first{stroke-width:3}.mark{stroke-width:1.6}
"""
LIGHT = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#57606a")
DARK = ("#58a6ff", "#f0883e", "#3fb950", "#bc8cff", "#f778ba", "#8b949e")
DARK_STYLE = "text{fill:#e6edf3}.paper{fill:#0d1117}.grid{stroke:#30363d}.frame,.rule{stroke:#8b949e}"
MARKS = (
    "M-4,0a4,4 0 1,0 8,0a4,4 0 1,0 -8,0z", "M-4,-4h8v8h-8z", "M0,-5l5,9h-10z", "M0,-5l5,5l-5,5l-5,-5z",
    "M-4,-4l8,8M-4,4l8,-8", "M0,-5v10M-5,0h10",
)  # fmt: skip


def _colors(colors):
    return "".join(f".c{i}{{stroke:{color};fill:{color}}}.line.c{i}{{fill:none}}" for i, color in enumerate(colors))


def figure(title, caption, names, panels, columns=2, height=250, width=900):
    """The SVG text of `panels`, functions of a box (x, y, width, height), `columns` a row; `names` are the legend."""
    wide, rows = width / columns, math.ceil(len(panels) / columns)
    total = 48 + rows * height + 18 * len(caption) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" width="{width}" height="{total}">',
        f"<title>{html.escape(title)}</title>",
        f"<style>{STYLE}{_colors(LIGHT)}\n@media(prefers-color-scheme:dark){{{DARK_STYLE}{_colors(DARK)}}}</style>",
        f'<rect class="paper" width="{width}" height="{total}"/>',
        text(width / 2, 20, title, "mid bold"),
    ]
    x = width / 2 - sum(map(_room, names)) / 2
    for i, name in enumerate(names):
        parts += [mark(x + 6, 38, i), text(x + 16, 42, name)] if name else []
        x += _room(name)
    for i, panel in enumerate(panels):
        parts += panel((i % columns * wide, 48 + i // columns * height, wide, height))
    parts += [text(12, 48 + rows * height + 16 + 18 * i, line, "small") for i, line in enumerate(caption)]
    return "\n".join([*parts, "</svg>\n"])


def _room(name):
    return 7 * len(name) + 34 if name else 0


def text(x, y, content, kind=""):
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{html.escape(content)}</text>'


def mark(x, y, i):
    return f'<path d="{MARKS[i]}" transform="translate({x:.1f} {y:.1f})" class="mark c{i}"/>'


def line(x0, y0, x1, y1, kind):
    return f'<path d="M{x0:.1f},{y0:.1f}L{x1:.1f},{y1:.1f}" class="{kind}"/>'


def scale(low, high, start, end, log):
    """Numbers from `low` to `high` as coordinates from `start` to `end`."""
    turn = math.log if log else float
    span = turn(high) - turn(low) or 1.0  # of a single number
    return lambda v: start + (turn(v) - turn(low)) / span * (end - start)


def steps(high):
    """Round numbers from 0 on, the last of them at `high` or just above."""
    size = 10 ** math.floor(math.log10(high))
    step = next(s * size for s in (0.1, 0.2, 0.25, 0.5, 1, 2) if high / (s * size) <= 6)
    return [step * i for i in range(math.ceil(high / step - 1e-9) + 1)]


def powers(low, high):
    """Powers of ten around the numbers from `low` to `high`."""
    return [10.0**i for i in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]


def _number(tick):
    return f"{tick:,.0f}" if tick >= 1000 else f"{tick:g}"


def lines(title, xlabel, ylabel, series, xticks, log=(True, False), rule=None, high=0.0):
    """A panel of curves: `series` is name index -> [(x, y)]; `xticks` {x: label} has every x; `high`: least top."""
    values = [y for points in [*series.values(), rule or []] for _, y in points]
    yticks = powers(min(values), max(values)) if log[1] else steps(max([high, *values]))

    def draw(box):
        left, top, width, height = box
        x0, x1, y0, y1 = left + 66, left + width - 24, top + height - 46, top + 30
        margin = 20
        x = scale(min(xticks), max(xticks), x0 + margin, x1 - margin, log[0])
        y = scale(yticks[0], yticks[-1], y0, y1, log[1])
        found = [text((x0 + x1) / 2, top + 22, title, "mid bold small")]
        for tick in yticks:
            found += [line(x0, y(tick), x1, y(tick), "grid"), text(x0 - 6, y(tick) + 4, _number(tick), "end small")]
        for tick, label in xticks.items():
            found += [line(x(tick), y0, x(tick), y0 + 4, "frame"), text(x(tick), y0 + 17, label, "mid small")]
        found += [line(x0, y0, x1, y0, "frame"), text((x0 + x1) / 2, y0 + 35, xlabel, "mid small")]
        turned = f"translate({left + 16:.1f} {(y0 + y1) / 2:.1f}) rotate(-90)"
        found.append(f'<g transform="{turned}">{text(0, 0, ylabel, "mid small")}</g>')
        for i, points in sorted(series.items(), reverse=True):  # the first name on top
            path = "L".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
            found += [f'<path d="M{path}" class="line c{i}{"" if i else " first"}"/>'] * (len(points) > 1)
            found += [mark(x(a), y(b), i) for a, b in points]
        if rule is not None:
            found.append(f'<path d="M{"L".join(f"{x(a):.1f},{y(b):.1f}" for a, b in rule)}" class="rule"/>')
        return found

    return draw


def dots(title, xlabel, rows, rule=None, label_width=300):
    """A panel with a row of marks for each (label, {name index: x}); a line at `rule`."""
    ticks = steps(max([x for _, found in rows for x in found.values()] + ([] if rule is None else [rule])))

    def draw(box):
        left, top, width, height = box
        x0, x1, y0, y1 = left + label_width, left + width - 24, top + height - 46, top + 30
        x, room = scale(0, ticks[-1], x0, x1, False), (y0 - y1) / len(rows)
        found = [text((x0 + x1) / 2, top + 22, title, "mid bold small")]
        for tick in ticks:
            found += [line(x(tick), y0, x(tick), y1, "grid"), text(x(tick), y0 + 17, _number(tick), "mid small")]
        found += [line(x0, y0, x1, y0, "frame"), text((x0 + x1) / 2, y0 + 35, xlabel, "mid small")]
        if rule is not None:
            found.append(line(x(rule), y0, x(rule), y1, "rule"))
        for number, (label, values) in enumerate(rows):
            y = y1 + room * (number + 0.5)
            found.append(text(x0 - 8, y + 4, label, "end small"))
            found += [mark(x(value), y, i) for i, value in sorted(values.items(), reverse=True)]
        return found

    return draw
