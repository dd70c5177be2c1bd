"""docs/performance.md and its figures: what the CSV files give, byte for byte."""

import re
import types
import xml.etree.ElementTree as ET

import pytest
from linear_cases import quick_compiles  # noqa: F401 -- for every test here

from benchmarks import caches, cases, decode, gpu, linear, plots, record, run, svg, tables

PLAIN, FEATURE = str(cases.GRID[0]), str(cases.FEATURES[0])


@pytest.fixture(scope="module")
def report():
    return tables.report(tables.PAGE.read_text(encoding="utf-8"))


def attention_row(shape=PLAIN, of="fwd", name="jattn", ms=1.0, date="2000-01-01", **times):
    peers = {f"times_{x}": str(times.get(x, "")) for x in (*tables.PEERS, "flex", "causal", "full")}
    known = dict(date=date, device="a GPU", jax="0", shape=shape, implementation=name, ms=str(ms), longest_ms=str(ms))
    return known | {"pass": of, "tflops": "700", "percent_of_matmul": "90"} | peers


def cache_row(shape="B8 S8192 N32/8 H128", name="jattn mosaic", **columns):
    known = dict(date="2000-01-01", device="a GPU", jax="0", shape=shape, tokens="equal", cache="bfloat16")
    numbers = dict(us="100.0", launches="2", gbytes_per_s="4000", percent_of_read="80.0", times_unquantised="")
    peers = {f"times_{peer}": "" for peer in tables.CACHE_PEERS}
    return known | numbers | peers | {"percent_of_equal": "", "pass": "decode", "implementation": name} | columns


def training_row(name, ms, tokens, attention, kernels, loss):
    known = dict(date="2000-01-01", device="a GPU", jax="0", shape="12 layers of 1024", million_parameters="200")
    times = dict(ms=str(ms), tokens_per_s=str(tokens), attention_ms=str(attention), kernel_ms=str(kernels))
    rest = dict(steps="200", attention_percent="1", peak_gib="9.5", mean_of_the_last_20="4.5", implementation=name)
    return known | times | rest | {"pass": "train", "losses_1_2_5_10": f"8.0000 {loss} 6.0 5.0"}


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A copy of the CSV files, which the report reads instead."""
    for path in record.RESULTS.glob("*.csv"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return tmp_path


def between(page, name):
    return page.split(f"<!-- {name} -->")[1].split(f"<!-- end {name} -->")[0]


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
    for text in report[1].values():
        assert_legible(text)


def assert_legible(text):
    """Everything lies on the paper, in both schemes, with labels on the axes, a device and a date."""
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
    over_caches = [
        cache_row(times_cudnn="1.25", times_triton="0.3"),
        cache_row("B8 S8192 N32/8 H128 p16", times_cudnn="0.9"),
        cache_row(name="cudnn", times_cudnn="1.0"),
        cache_row(name="jattn xla", times_cudnn="9.0"),
    ]
    lines = tables.losses(
        attention, over_caches, [sequence_row(80.0), sequence_row(85.0), sequence_row(99.0, "fwd+bwd")]
    )
    assert lines[0] == "Slower than a peer in 4 of 7 comparisons, worst first:"
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


def test_new_rows_change_what_they_measure(results, report):
    """Rows are appended; nothing else is needed."""
    rows = [row for row in record.load(results / "attention.csv") if row["shape"] == PLAIN and row["pass"] == "fwd"]
    changed = [row | {"ms": "0.1", "tflops": "790.0"} for row in record.latest(rows)]
    record.append(results / "attention.csv", changed)
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
    for text in (plots.speed(rows), plots.decode([cache_row()]), plots.sequence([sequence_row(90)])):
        ET.fromstring(text)


def test_the_scaling_suite_times_three_of_each_length(monkeypatch):
    monkeypatch.setattr(linear, "SCALING_CPU", (linear.Shape("kda", 1, 32, 2, 16),))
    rows = list(linear.scaling(run.parser().parse_args(["scaling", "--repeats", "1"])))
    names = ["kda", "gated_delta_rule", "attention"]
    assert [(row["pass"], row["implementation"]) for row in rows] == [(of, x) for of in plots.PASSES for x in names]
    assert all(row["length"] == 32 and row["ms"] > 0 for row in rows)


def test_a_suite_with_rows_gets_its_section(results, report):
    for name, (_, columns) in tables.SECTIONS.items():
        (results / f"{name}.csv").unlink(missing_ok=True)
        row = {"date": "2000-01-01", "device": "a GPU", "jax": "0", "pass": "", "implementation": "x"}
        record.append(results / f"{name}.csv", [row | dict.fromkeys(columns, "1") | {"shape": f"of {name}"}])
    page, _ = tables.report(report[0])
    for name, (title, columns) in tables.SECTIONS.items():
        assert f"<!-- {name} -->\n## {title}\n" in page and f"| of {name} |{' 1 |' * (len(columns) - 1)}\n" in page
    assert tables.report(page)[0] == page


def test_goals_of_linear_attention_are_those_of_clipped_decays_too():
    shapes = [str(shape) for shape in linear.GPU]
    clipped = [shape for shape in shapes if shape.endswith(" clipped")]
    assert len(set(shapes)) == len(shapes) and {*tables.LINEAR_GOALS} <= {*shapes} and len(clipped) == 3
    for shape in clipped:
        row = {"shape": shape, "pass": "fwd", "implementation": "jattn", "times_jla": "0.57"}
        assert tables._of_goals(row)["verdict"] == "not met"
        assert tables._of_goals(row | {"pass": "fwd+bwd", "times_jla": "0.5"})["verdict"] == "met"


def suite_rows(suite, monkeypatch):
    """What `./run bench` would record of the targets, as text: of jattn each with its own time, beside cuDNN's."""
    monkeypatch.setattr(decode.jax, "devices", lambda: [types.SimpleNamespace(device_kind="NVIDIA H200")])
    found = []
    for case in caches.table(suite, "targets"):
        ms = case.bytes("bfloat16") / (2.2e9 if case.stored else 4e9)
        times = {"jattn mosaic": ms, "cudnn": 0.96 * ms, "triton": 3 * ms}
        times |= {} if case.tokens == "equal" else {"jattn mosaic, equal": 2 * ms}
        times |= {"jattn mosaic, plain": ms / 0.57} if case.stored else {}
        times = {name: gpu.Time(x, x, x) for name, x in times.items() if not case.stored or "jattn" in name}
        counts = {"jattn mosaic": 3 if case.B == 128 else 2, "cudnn": 1, "triton": 2}
        found += decode.rows(case, "bfloat16", times, counts, ceiling=4.6e12)
    return [{"date": "2001-01-01", "device": "a GPU", "jax": "0"} | row for row in found]


def test_tables_of_caches_come_from_the_suites(results, report, monkeypatch):
    for suite in ("decode", "paged"):
        (results / f"{suite}.csv").unlink(missing_ok=True)
        record.append(results / f"{suite}.csv", suite_rows(suite, monkeypatch))
    page, figures = tables.report(report[0])
    contiguous, paged = between(page, "decode"), between(page, "paged")
    # 1 / 0.96 = 1.042: within the goal of pages at most sequences only
    lines = {tuple(line.strip("| ").split(" | ")[:2]): line for line in (contiguous + paged).splitlines()}
    first, end = "B64 S8192 N32/8 H128", " × cuDNN | "
    ours = {shape: line for (shape, *name), line in lines.items() if name == ["jattn mosaic"]}
    assert ours[first].endswith(f"| 536.9 | 2 | 4.00 | 87.0 | 1.042 | – | – | ≤ 1.03{end}not met |")
    for base, wanted in tables.DECODE_GOALS.items():
        assert ours[base].endswith(f"≤ {wanted[0]:.2f}{end}not met |")
        assert all(ours[f"{base} p{size}"].endswith(f"≤ {wanted[1]:.2f}{end}met |") for size in caches.PAGES)
        assert ours[f"{base} int8"].endswith("| – | 0.570 | – | ≤ 0.56 × bfloat16 | not met |")
    assert ours[f"{first} p64 uniform"].endswith("≥ 90% of equal | met |")
    assert "not met" not in ours[f"{first} uniform"] and ours["B1 S128 N32/8 H128"].endswith("| – | – |")
    assert (f"{first}", "cudnn") in lines and (f"{first} p16", "cudnn") not in lines
    assert (f"{first} p16", "triton") in lines
    assert "a plain read reaches 4.60 TB/s" in contiguous and "Goals met: 1 of 13." in contiguous
    told = "Of 15 calls of jattn, 3 launch more than 2 kernels: B128 S1024 N64/8 H128 (3); "
    assert told in contiguous and "One sequence alone: S131072 N32/8 H128 134.2 µs (cuDNN 128.8); " in contiguous
    assert "| B8 S8192 N32/8 H128 p16 | pages | cuDNN | 1.042 |" in between(page, "losses")
    assert all(figures[name] == report[1][name] for name in figures if name != "performance_decode.svg")
    assert_legible(figures["performance_decode.svg"])


def test_the_rate_of_a_read_is_that_of_the_row_with_the_largest_share():
    rows = [
        cache_row(gbytes_per_s="155", percent_of_read="3.3"),
        cache_row(gbytes_per_s="4400", percent_of_read="96.5"),
    ]
    assert "; a plain read reaches 4.56 TB/s; " in tables.cache_table(rows)[0]
    assert "a plain read" not in tables.cache_table([cache_row(percent_of_read="")])[0]


def test_the_figure_of_caches_has_a_curve_for_each_dtype():
    rows = [cache_row(), cache_row(name="cudnn"), cache_row("B8 S8192 N32/8 H128 p16 int8", cache="int8")]
    rows += [cache_row("B8 S8192 N32/8 H128 p16"), cache_row("B8 S8192 N32/8 H128 int8", cache="int8")]
    outside = [
        cache_row(name="triton"),
        cache_row("B8 S8192 N32/8 H128 uniform", tokens="uniform"),
        cache_row("B2 S64"),
    ]
    figure = plots.decode(rows + outside)
    marks = [len(re.findall(rf'class="mark c{i}"', figure)) - 1 for i in range(4)]  # one is the legend's
    assert marks == [2, 2, 0, 1] and figure.count("no pages") == 1


def test_a_missing_file_leaves_its_section_out(results, report):
    for name in ("decode", "paged", "training"):
        (results / f"{name}.csv").unlink(missing_ok=True)
    page, figures = tables.report(report[0])
    assert {between(page, name) for name in ("decode", "paged", "decode figure", "training")} == {"\n"}
    assert "performance_decode.svg" not in figures and "performance_decode.svg" not in page
    assert "contiguous" not in between(page, "losses")
    (results / "decode.csv").write_text("")
    record.append(results / "decode.csv", [cache_row()])
    assert "| B8 S8192 N32/8 H128 | jattn mosaic | 100.0 | 2 | 4.00 |" in between(tables.report(page)[0], "decode")


def test_training_is_told_with_what_attention_s_share_explains(results, report):
    rows = [
        training_row("jattn", 44.7, 366625, 13.4, 40.0, 7.0),
        training_row("jax.nn cudnn", 116.5, 140614, 88.3, 114.3, 7.0007),
    ]
    (results / "training.csv").unlink(missing_ok=True)
    record.append(results / "training.csv", rows)
    page, _ = tables.report(report[0])
    found = between(page, "training")
    assert found.startswith("\n## Training a model\n") and "200 million parameters, 200 steps" in found
    assert "| jattn | 366,625 | 44.7 | 40.0 | 13.4 | 1 | 9.5 | 8.0000 7.0 6.0 5.0 | 4.5 |" in found
    # 88.3 / 114.3 of the kernels' time is 77.3%: at most 114.3 / 26; with 13.4 ms in its place 114.3 / 39.4
    assert "With jax.nn cudnn attention takes 77.3% of the kernels' time." in found
    assert (
        "for nothing would be 4.40 times as fast, and one in which it is 6.59 times as fast, as jattn's is, 2.90"
        in found
    )
    assert "The step is 2.61 times as fast." in found and "differ by at most 0.0001 of their size." in found
    assert tables.report(page)[0] == page
    bare = [row | {"attention_ms": "", "kernel_ms": "", "attention_percent": ""} for row in rows]
    *_, told = tables.training_section(bare)
    assert told.startswith("With jattn's attention the step is 2.61 times as fast. The losses")
    assert tables.training_section(rows[:1])[-1].startswith("| 12 layers of 1024 | jattn |")


def test_the_first_row_is_told_by_its_parts():
    rows = [
        attention_row(ms=0.4),
        attention_row(of="fwd+bwd", ms=2.0) | {"longest_ms": "1.25"},
        attention_row(of="fwd+bwd", name="fa3", ms=1.9) | {"longest_ms": "1.2"},
    ]
    (told,) = tables.first_row(rows)
    assert "Of the 2.000 ms of the first row the backward kernel takes 1.25 (FlashAttention-3's 1.20 of 1.900)" in told
    assert "the forward 0.40" in told and told.endswith("its conversion) 0.35.")
    assert tables.first_row(rows[:1]) == []
