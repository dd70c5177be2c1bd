"""The arithmetic and the records of the benchmarks; nothing is timed here."""

import itertools

import jax.numpy as jnp
import pytest

from benchmarks import record, run, shapes


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
