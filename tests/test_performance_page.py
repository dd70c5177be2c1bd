"""docs/performance.md and its figures: what the CSV files give, byte for byte."""

import re
import xml.etree.ElementTree as ET

import pytest
from linear_cases import quick_compiles  # noqa: F401 -- for every test here

from benchmarks import cases, linear, plots, record, run, svg, tables

PLAIN, FEATURE = str(cases.GRID[0]), str(cases.FEATURES[0])


@pytest.fixture(scope="module")
def report():
    return tables.report(tables.PAGE.read_text(encoding="utf-8"))


def attention_row(shape=PLAIN, of="fwd", name="jattn", ms=1.0, date="2000-01-01", **times):
    peers = {f"times_{x}": str(times.get(x, "")) for x in (*tables.PEERS, "flex", "causal", "full")}
    known = dict(date=date, device="a GPU", jax="0", shape=shape, implementation=name, ms=str(ms), longest_ms=str(ms))
    return known | {"pass": of, "tflops": "700", "percent_of_matmul": "90"} | peers


def decode_row(call, times="", shape="B8 S8192 32/8 H128"):
    known = dict(date="2000-01-01", device="a GPU", jax="0", shape=shape, call=call, ms="0.1", merge_ms="")
    return known | dict(tb_per_s="4.0", times_cudnn=str(times))


def sequence_row(share, of="fwd", name="ring", layout="zigzag    "):
    known = dict(date="2000-01-01", device="a GPU", jax="0", devices="2", shape="B1 S8", implementation=name)
    return known | {"pass": of, "layout": layout, "percent_of_ideal": str(share)}


def test_the_page_is_that_of_the_rows(report):
    assert report[0] == tables.PAGE.read_text(encoding="utf-8"), "run python -m benchmarks.tables"


def test_the_figures_are_those_of_the_rows_and_on_the_page(report):
    page, figures = report
    for name, text in figures.items():
        assert text == (tables.PAGE.parent / name).read_text(encoding="utf-8"), "run python -m benchmarks.tables"
        assert f"]({name})" in page
    assert {path.name for path in tables.PAGE.parent.glob("performance_*.svg")} == set(figures)


def test_figures_are_legible(report):
    """Everything lies on the paper, in both schemes, with labels on the axes, a device and a date."""
    for text in report[1].values():
        root = ET.fromstring(text)
        width, height = (float(x) for x in root.get("viewBox").split()[2:])
        told = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
        assert any(re.match(r"Measured on .+, jax [\d.]+, \d{4}-\d\d-\d\d", line) for line in told)
        assert "prefers-color-scheme:dark" in text and "nan" not in text
        for x, y in re.findall(r"translate\(([-\d.]+) ([-\d.]+)\)", text):
            assert 0 <= float(x) <= width and 0 <= float(y) <= height
        for line in root.findall("{http://www.w3.org/2000/svg}text"):  # 6.7: of a letter of 12 px
            x, y, kind = float(line.get("x")), float(line.get("y")), line.get("class")
            length = 6.7 * len(line.text or "")
            left = x - length * ("end" in kind.split()) - length / 2 * ("mid" in kind.split())
            assert left >= 0 and left + length <= width and 0 <= y <= height, line.text


def test_losses_are_listed_worst_first():
    attention = [
        attention_row(fa3=1.1, cudnn=0.9),
        attention_row(of="fwd+bwd", fa3=1.3),
        attention_row(FEATURE, flex=1.2),
    ]
    decode = [
        decode_row("jattn contiguous", 1.25),
        decode_row("jattn page of 16", 0.9),
        decode_row("cudnn contiguous", 1.0),
    ]
    lines = tables.losses(attention, decode, [sequence_row(80.0), sequence_row(85.0), sequence_row(99.0, "fwd+bwd")])
    assert lines[0] == "Slower than a peer in 4 of 6 comparisons, worst first:"
    assert [line.split(" | ")[2] for line in lines[4:8]] == [
        "FlashAttention-3",
        "cuDNN",
        "FlexAttention",
        "FlashAttention-3",
    ]
    assert lines[-1] == "Over several devices the best strategy is below 90% of ideal in 1 of 2: B1 S8 fwd (85.0%)."


def test_a_run_without_a_peer_keeps_its_ratio_while_jattn_takes_the_same_time():
    first, again, faster = (attention_row(ms=1.0, fa3=1.1), attention_row(ms=1.03, flex=0.5), attention_row(ms=0.8))
    (row,) = tables.merged([first, again])
    assert (row["ms"], row["times_fa3"], row["times_flex"]) == ("1.03", "1.1", "0.5")
    (row,) = tables.merged([first, again, faster])
    assert (row["ms"], row["times_fa3"], row["times_flex"]) == ("0.8", "", "")


def test_new_rows_change_what_they_measure(tmp_path, monkeypatch, report):
    """Rows are appended; nothing else is needed."""
    for path in record.RESULTS.glob("*.csv"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    rows = [row for row in record.load(tmp_path / "attention.csv") if row["shape"] == PLAIN and row["pass"] == "fwd"]
    changed = [row | {"ms": "0.1", "tflops": "790.0"} for row in record.latest(rows)]
    record.append(tmp_path / "attention.csv", changed)
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    page, figures = tables.report(report[0])
    assert f"| {PLAIN} | 0.100 | 790 |" in page
    assert {name for name, text in figures.items() if text != report[1][name]} == {"performance_speed.svg"}


def test_marks_stand_where_the_numbers_are():
    panel = svg.dots("", "", [("a", {0: 0.5, 1: 2.0})], 1)((0, 0, 500, 200))
    at = {i: float(re.search(r"translate\(([\d.]+)", line)[1]) for line in panel for i in (0, 1) if f" c{i}" in line}
    assert at == pytest.approx({0: 300 + (500 - 24 - 300) / 4, 1: 500 - 24}, abs=0.1)
    panel = svg.lines("", "", "", {0: [(1, 1.0), (100, 1000.0)]}, {1: "1", 100: "100"}, (True, True))((0, 0, 500, 200))
    places = [re.search(r"translate\(([\d.]+) ([\d.]+)\)", line).groups() for line in panel if 'class="mark' in line]
    assert places == [("86.0", "154.0"), ("456.0", "30.0")]


@pytest.mark.parametrize(
    ("high", "wanted"), [(0.9, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (100, [0, 20, 40, 60, 80, 100]), (5, 5)]
)
def test_steps_are_round_and_reach_the_top(high, wanted):
    found = svg.steps(high)
    assert found[-1] >= high and (found == pytest.approx(wanted) if isinstance(wanted, list) else found[-1] == wanted)


def test_a_figure_of_one_row_is_one():
    rows = [attention_row(name=name) for name in ("jattn", "fa3")]
    for text in (plots.speed(rows), plots.decode([decode_row("jattn contiguous")]), plots.sequence([sequence_row(90)])):
        ET.fromstring(text)


def test_the_scaling_suite_times_three_of_each_length(monkeypatch):
    monkeypatch.setattr(linear, "SCALING_CPU", (linear.Shape("kda", 1, 32, 2, 16),))
    rows = list(linear.scaling(run.parser().parse_args(["scaling", "--repeats", "1"])))
    names = ["kda", "gated_delta_rule", "attention"]
    assert [(row["pass"], row["implementation"]) for row in rows] == [(of, x) for of in plots.PASSES for x in names]
    assert all(row["length"] == 32 and row["ms"] > 0 for row in rows)


def test_a_suite_with_rows_gets_its_section(tmp_path, monkeypatch, report):
    for path in record.RESULTS.glob("*.csv"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    for name, (_, columns) in tables.SECTIONS.items():
        (tmp_path / f"{name.split()[0]}.csv").unlink(missing_ok=True)
        row = {"date": "2000-01-01", "device": "a GPU", "jax": "0", "pass": "", "implementation": "x"}
        record.append(
            tmp_path / f"{name.split()[0]}.csv", [row | dict.fromkeys(columns, "1") | {"shape": f"of {name}"}]
        )
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    page, _ = tables.report(report[0])
    for name, (title, columns) in tables.SECTIONS.items():
        assert f"<!-- {name} -->\n## {title}\n" in page and f"| of {name} |{' 1 |' * (len(columns) - 1)}\n" in page
    assert tables.report(page)[0] == page
