"""The arithmetic and the records of the benchmarks; nothing is timed here."""

import argparse
import dataclasses
import itertools
import types

import jax
import jax.numpy as jnp
import pytest

from benchmarks import attention, cases, gpu, providers, record, run, shapes, tables, training, tune


@pytest.mark.parametrize(
    ("T", "S", "causal", "window"),
    list(itertools.product((1, 5), (3, 8), (False, True), (None, (2, 0), (0, 3), (3, 1)))),
)
def test_pairs_counts_what_the_mask_shows(T, S, causal, window):
    left, right = window or (T + S, T + S)
    visible = [
        (t, s) for t in range(T) for s in range(S) if t - left <= s <= t + right and (s <= t or not causal)
    ]
    assert shapes.Shape(1, T, S, 1, 1, 1, 1, causal, window).pairs == len(visible)


def test_flops_and_bytes():
    shape = shapes.Shape(B=2, T=3, S=3, N=4, K=2, H=5, D=7)
    assert shape.flops(backward=False) == 2 * 2 * 4 * 9 * (5 + 7)
    assert shape.flops(backward=True) == 3.5 * shape.flops(backward=False)
    assert shape.bytes("bfloat16") == 2 * (2 * 3 * 4 * 5 + 2 * 3 * 2 * 5 + 2 * 3 * 2 * 7 + 2 * 3 * 4 * 7)


def test_names_of_shapes_are_distinct():
    names = [str(shape) for shape in (*shapes.CPU, *shapes.MEMORY)]
    assert len(set(names)) == len(names)
    assert "B1 S8192 N8 H64 causal window(255,0)" in names


def test_disagreement_is_the_worst_output():
    expected = (jnp.array([1.0, 2.0]), jnp.array([10.0]))
    assert run.disagreement((jnp.array([1.0, 2.0]), jnp.array([11.0])), expected) == pytest.approx(0.1)


def test_the_gate_stops_a_wrong_implementation():
    x = jnp.ones(3)
    run.gate("shape", "float32", {"right": lambda: (x,), "peer": lambda: (x,)})
    for wrong in (x + 1e-3, x * jnp.nan):
        with pytest.raises(SystemExit, match="wrong differs from the dense computation"):
            run.gate("shape", "float32", {"wrong": lambda wrong=wrong: (wrong,), "peer": lambda: (x,)})


def test_rows_are_appended_under_one_header(tmp_path):
    path = tmp_path / "results" / "suite.csv"
    record.append(path, [{"shape": "a, b", "ms": 1.5}])
    record.append(path, [{"shape": "c", "ms": 2.0}])
    assert record.load(path) == [{"shape": "a, b", "ms": "1.5"}, {"shape": "c", "ms": "2.0"}]
    with pytest.raises(ValueError, match="columns"):
        record.append(path, [{"shape": "d", "us": 1}])


def test_lines_are_aligned():
    rows = [{"shape": "short", "ms": 1.0}, {"shape": "a longer shape", "ms": 123.45}]
    assert len({len(record.line(row)) for row in rows} | {len(record.line(rows[0], header=True))}) == 1


def test_the_latest_row_of_a_shape_and_implementation():
    rows = [{"shape": "a", "implementation": "x", "ms": ms} for ms in (1, 2)]
    assert record.latest(rows) == rows[1:]


def test_an_unknown_shape_is_named():
    arguments = run.parser().parse_args(["cpu", "--only", "nothing like it"])
    with pytest.raises(SystemExit, match="nothing like it"):
        run.selected(shapes.CPU, arguments)


# The attention suite.


def small(case, S):
    """The case with few and narrow heads."""
    shape = dataclasses.replace(case.shape, B=2, T=S, S=S, N=2, K=1, H=16, D=16)
    return dataclasses.replace(case, shape=shape)


def case_of(feature, S=2048):
    return small(next(case for case in cases.FEATURES if feature in str(case)), S)


def row_of(case, implementation="jattn", of="fwd", ms=1.0, **times):
    names = [f"times_{name}" for name in (*attention.PEERS, "flex", *cases.PLAIN)]
    measured = {"ms": str(ms), "tflops": "700.0", "percent_of_matmul": "90.0"} | dict.fromkeys(names, "")
    known = {"device": "a GPU", "jax": "0", "date": "today", "shape": str(case), "pass": of, "longest_ms": str(ms)}
    return known | {"implementation": implementation} | measured | {f"times_{k}": str(v) for k, v in times.items()}


@pytest.mark.parametrize(
    ("feature", "pairs"),
    [
        ("window", 2 * (sum(range(1, 513)) + (2048 - 512) * 512)),
        ("documents", 2 * 2 * 1024 * 1025 // 2),
        ("prefix", 2 * sum(max(t + 1, 512) for t in range(2048))),
        ("blocks", 2 * 2048 * 2048 // 4),
        ("soft cap", 2048 * 2049),
        ("key lengths", sum(min(t + 1, length) for length in (2048, 1535) for t in range(2048))),
    ],
)
def test_pairs_of_a_feature(feature, pairs):
    case = case_of(feature)
    assert case.pairs == pairs
    assert case.flops() == 2 * 2 * pairs * 32 and case.flops(backward=True) == 3.5 * case.flops()


def test_tiles_that_hold_something():
    assert case_of("documents").tiles == 2 * 36 / 256
    assert case_of("blocks").tiles == 0.25
    assert small(cases.PLAIN["full"], 256).tiles == 1


def test_cases_have_names_of_their_own_and_every_goal_a_case():
    names = [str(case) for case in cases.GRID + cases.FEATURES]
    assert len(set(names)) == len(names)
    assert {*tables.GOALS, *tables.BEST_PEER_GOALS} == {str(case) for case in cases.GRID}
    assert {*tables.FLEX_GOALS} <= {*names}


@pytest.mark.parametrize("case", cases.FEATURES, ids=str)
def test_the_dense_computation_is_what_jattn_computes(case):
    lengths = {"documents 1024": 2048, "prefix 512": 1024, "blocks 25%": 512}
    case = small(case, 1024 if case.shape.window else lengths.get(case.feature, 256))
    inputs = (*case.shape.inputs("bfloat16"), case.arrays())
    function = gpu.step(providers.build("jattn", case), backward=True)
    assert gpu.agreeing(case, {"jattn": function}, inputs, backward=True)


@pytest.mark.parametrize("place", [0, 100, 255])
@pytest.mark.parametrize("backward", [False, True], ids=["fwd", "fwd+bwd"])
def test_the_gate_leaves_out_what_is_wrong_in_one_row(place, backward, capsys):
    case = small(cases.PLAIN["causal"], 256)
    inputs = (*case.shape.inputs("bfloat16"), {})
    right = gpu.step(providers.build("jattn", case), backward)

    def wrong(*inputs):
        return jax.tree.map(lambda x: x.at[:, place].multiply(1.5), right(*inputs))

    assert list(gpu.agreeing(case, {"right": right, "wrong": wrong}, inputs, backward)) == ["right"]
    assert "wrong differs" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("provider", "case", "reason"),
    [
        ("fa3", "H192 D128", "takes one head dim"),
        ("fa3", "soft cap", "has no soft cap"),
        ("fa3", "lse", "has no lse"),
        ("xla", "S65536", "GB of scores"),
        ("xla", "H192 D128", "takes one head dim"),
        ("xla", "dropout", "has no dropout"),
        ("cudnn", "ALiBi", "has no ALiBi"),
        ("tokamax", "ALiBi", "has no ALiBi"),
        ("jla", "N16 H128 full", "is causal only"),
        ("jla", "H256", "takes no head dims"),
        ("jla", "bias", "has no bias"),
    ],
)
def test_a_provider_refuses_what_it_cannot_do(provider, case, reason, capsys):
    found = next(c for c in cases.GRID + cases.FEATURES if case in str(c))
    assert providers.build(provider, found) is None
    assert reason in capsys.readouterr().out


def test_a_peer_that_cannot_be_imported_is_a_reason(monkeypatch, capsys):
    def missing(name):
        raise ImportError(f"no {name}")

    monkeypatch.setattr(providers.importlib, "import_module", missing)
    for name in ("fa3", "jla", "tokamax"):
        assert providers.build(name, cases.GRID[0]) is None
        assert f"{name} cannot be imported" in capsys.readouterr().out


def test_a_failure_to_compile_stops_nothing(capsys):
    def broken(x):
        raise ValueError("not on this card")

    ready = gpu.compiled({"broken": jax.jit(broken), "fine": jax.jit(jnp.negative)}, (jnp.ones(2),))
    assert list(ready) == ["fine"]
    assert "broken failed: ValueError: not on this card" in capsys.readouterr().out


def test_times_are_medians_of_all_kernels_and_the_longest(monkeypatch):
    monkeypatch.setattr(gpu, "launches", lambda function, inputs, iterations: [[1.0, 3.0]] * iterations)
    found = gpu.measured({"f": (jnp.negative, (jnp.ones(2),))})["f"]
    assert (found.total, found.longest) == (4.0, 3.0)


def test_rows_hold_ratios_to_what_was_measured():
    case = cases.FEATURES[0]
    times = {name: gpu.Time(ms, ms, ms) for name, ms in {"jattn": 1.0, "fa3": 2.0, "causal": 4.0, "full": 8.0}.items()}
    jattn_row, fa3_row = attention.rows(case, times, "fwd", ceiling=800.0)
    assert (jattn_row["times_fa3"], jattn_row["times_causal"], jattn_row["times_full"]) == (0.5, 0.25, 0.125)
    assert jattn_row["times_jla"] == "" and fa3_row["implementation"] == "fa3"
    assert jattn_row["percent_of_matmul"] == pytest.approx(case.flops() / 1e9 / 8, abs=0.1)
    assert jattn_row["config"].startswith("xla")


def test_a_run_stops_between_shapes(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "matmul_ceiling", lambda: 800.0)
    monkeypatch.setattr(attention, "case_times", lambda case, arguments: {"jattn": gpu.Time(1.0, 1.0, 1.0)})
    arguments = run.parser().parse_args(["attention", "--table", "grid", "--only", "S16384"])
    assert len(list(attention.attention(arguments))) == 3
    arguments = argparse.Namespace(**vars(arguments) | {"budget": -1.0})
    assert list(attention.attention(arguments)) == []
    assert "not measured: B1 S16384 N16 H128 causal; B1 S16384 N16 H128 full" in capsys.readouterr().out


@pytest.mark.parametrize("suite", run.ON_GPU)
def test_without_a_gpu_a_sentence(suite, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # it would set them for the processes of other tests
    with pytest.raises(SystemExit, match="timed on an NVIDIA GPU"):
        run.main([suite])


def test_options_of_the_attention_suite():
    found = run.parser().parse_args("attention --pass fwd+bwd --providers jattn,fa3 --budget 60 --no-record".split())
    assert (found.of, found.providers, found.budget, found.repeats) == ("fwd+bwd", ["jattn", "fa3"], 60.0, 3)
    assert run.parser().parse_args(["tune", "--only", "H64"]).budget == float("inf")


@pytest.mark.parametrize("case", cases.GRID, ids=str)
def test_tuned_configs_are_legal(case):
    shape = case.shape
    current = tune.configs.forward_config(
        shape.H, shape.D, query_length=shape.T, key_length=shape.S, bounded=shape.causal
    )  # fmt: skip
    found = tune.legal(shape, current)
    assert len(found) > 5 and len({tune.named(c) for c in found}) == len(found) and current not in found
    assert all(c.why_not(shape.H, shape.D) is None for c in found)


def test_rows_of_tuning_are_relative_to_the_current_config():
    times = {"now": gpu.Time(2.0, 2.0, 2.0), "other": gpu.Time(1.0, 1.0, 1.0)}
    rows = list(tune.rows(cases.GRID[0], times, "now"))
    assert [(row["implementation"], row["times_current"]) for row in rows] == [("jattn", 1.0), ("candidate", 0.5)]


def test_tables_between_markers():
    documents = next(case for case in cases.FEATURES if "documents" in str(case))
    rows = [
        row_of(cases.GRID[0], fa3=0.99, cudnn=0.8),
        row_of(cases.GRID[2], fa3=1.05),
        row_of(cases.GRID[11], cudnn=0.95, jla=0.8),
        row_of(cases.GRID[0], "fa3"),
        row_of(documents, ms=0.2, causal=0.5, full=0.25, flex=0.4),
    ]
    found = tables.tables(rows)
    assert list(found) == ["attention fwd", "features fwd"]
    grid = {line.split(" | ")[0].strip("| "): line for line in found["attention fwd"][4:]}
    assert grid[str(cases.GRID[0])].endswith("| 0.990 | 0.800 | – | – | – | ≤ 1.00 | met |")
    assert grid[str(cases.GRID[2])].endswith("≤ 1.01 | not met |")
    assert grid[str(cases.GRID[11])].endswith("≤ 0.90 of the best | not met |")
    plain, line = found["features fwd"][4:]
    assert plain.endswith("| – | – | – | – | – | ≤ 0.54 | – |")
    allowed = 1.15 * 144 / 1024 * 0.8 + 0.01
    assert line.endswith(f"| 0.200 | 0.200 | 0.50 | 0.25 | {allowed:.3f} | not met | 0.40 | ≤ 0.45 | met |")
    page = "before\n<!-- a -->\nold\n<!-- end a -->\nafter\n"
    assert tables.replaced(page, "a", ["new"]) == "before\n<!-- a -->\nnew\n<!-- end a -->\nafter\n"
    assert tables.replaced("page", "a", ["new"]).endswith("page\n\n<!-- a -->\nnew\n<!-- end a -->\n")


def test_tables_take_no_arguments():
    with pytest.raises(SystemExit):
        tables.main(["attention"])


def test_flex_runs_on_cases_of_ours_and_a_missing_torch_stops_nothing(capsys):
    names = {str(case) for case in cases.GRID + cases.FEATURES}
    assert set(attention.flex.CASES) <= names
    assert attention.flex_times(cases.GRID[1:2], "fwd") == {}
    assert gpu.attempt("flex", lambda: 1 / 0) is None
    assert "flex failed: ZeroDivisionError" in capsys.readouterr().out


def test_training_stops_where_the_first_losses_part(monkeypatch):
    """Both models are trained in turn; a later loss may differ, one of the first may not."""
    losses = {"jattn": [6.0, 5.0] + [4.0] * 10, "jax.nn xla": [6.0, 5.0] + [4.0] * 9 + [1.0]}
    monkeypatch.setattr(training, "_trained", lambda demo, name, *_: (losses[name], {"implementation": name}))
    arguments = types.SimpleNamespace(only="")
    assert [row["implementation"] for row in training.training(arguments)] == list(losses)
    losses["jax.nn xla"][3] = 4.1
    with pytest.raises(SystemExit, match=r"jax.nn xla: a loss of the first 10 steps differs by 2.5e-02"):
        list(training.training(arguments))
