"""The benchmark of sparse stages: its roofline is arithmetic, its gate stops what is wrong, its rows are whole."""

import argparse

import pytest

from benchmarks import sparse


@pytest.mark.parametrize(
    "model, op, compute, memory",
    [
        ("V3 decode", "mla_decode", 185, 140),
        ("K3 decode", "mla_decode", 555, 562),
        ("V3.2 decode", "sparse_attention", 185, 80),
        ("V3.2 prefill", "sparse_attention", 2958, 2247),
        ("V4-Pro prefill", "sparse_attention", 1566, 1124),
        ("V3.2 prefill", "indexer_logits", 7682, 499),
        ("V3.2 decode", "indexer_logits", 120, 265),
        ("V3.2 prefill", "topk_select", 0, 499),
    ],
)
def test_rooflines(model, op, compute, memory):
    """Microseconds by hand, of operations at 790 (fp8 1145) TFLOP/s and of keys at 4.3 TB/s; results come on top."""
    stage = next(s for s in sparse.LARGE if (s.model, s.op) == (model, op))
    found = [1e6 * x for x in stage.roofline]
    assert found[0] == pytest.approx(compute, rel=0.01)
    assert memory * 0.97 <= found[1] <= memory * 1.12


def test_rows_and_gate(monkeypatch):
    arguments = argparse.Namespace(only="topk_select", repeats=1)
    rows = list(sparse.sparse(arguments))
    assert [r["stage"].strip() for r in rows] == ["topk_select"]
    assert rows[0]["us"] > 0 and rows[0]["h200_bound"] == "memory"
    monkeypatch.setitem(sparse._DENSE, "topk_select", lambda stage, scores: sparse._dense_topk(stage, -scores))
    with pytest.raises(SystemExit, match="topk_select .*differs from the dense computation.*nothing was timed"):
        list(sparse.sparse(arguments))


def test_names_are_distinct():
    for stages in (sparse.LARGE, sparse.SMALL):
        names = [(s.op, str(s), s.backward) for s in stages]
        assert len(set(names)) == len(names)
