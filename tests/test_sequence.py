"""Sequence parallelism is attention of the undivided sequence: every mask, feature, layout, strategy and gradient."""

import dataclasses
import functools

import cases
import compare
import jax
import numpy as np
import pytest
from cases import Case
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, sequence
from jattn._ring import map_mask
from jattn.sequence import SequenceLayout

KINDS = ("contiguous", "zigzag", "striped")
OPS = {
    name: getattr(sequence, f"{name}_attention") for name in ("ring", "allgather", "ulysses", "hybrid")
}


def mesh_of(mode=AxisType.Auto, **axes):
    count = int(np.prod(list(axes.values())))
    devices = np.array(jax.devices()[:count]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes), axis_types=(mode,) * len(axes))


def lay_out(layout, kwargs):
    """Arguments of `attention` with every array in layout order."""

    def rows(a):
        return layout.shard(a, -2) if a.ndim > 1 and a.shape[-2] != 1 else a

    def tokens(a):
        return None if a is None else layout.shard(a, -1)

    new = dict(kwargs)
    for name in ("query", "key", "value"):
        new[name] = layout.shard(kwargs[name], -3)
    if kwargs.get("bias") is not None:
        new["bias"] = rows(kwargs["bias"])
    mask, mod = kwargs.get("mask"), kwargs.get("score_mod")
    if mask is not None:
        new["mask"] = map_mask(mask, rows, tokens, tokens) if isinstance(mask, masks.Mask) else rows(mask)
    if "segment_ids" in kwargs:
        new["segment_ids"] = jax.tree.map(tokens, kwargs["segment_ids"])
    if getattr(mod, "kinds", ())[:1] == ("element",):
        new["score_mod"] = dataclasses.replace(mod, aux=tuple(map(rows, mod.aux)))
    return new


def parallel(strategy, layout, devices, kwargs):
    """`kwargs` in natural order through a sequence-parallel op; results in natural order."""
    if strategy == "hybrid":
        mesh, where = mesh_of(ring=layout.size, heads=devices // layout.size), dict(axes=("ring", "heads"))
    else:
        mesh, where = mesh_of(sp=devices), dict(axis="sp")
    out, lse = OPS[strategy](**lay_out(layout, kwargs), **where, mesh=mesh, layout=layout)
    return layout.unshard(out, -3), layout.unshard(lse, -2)


@functools.cache
def _prepared(case):
    x = cases.make_inputs(case)
    return x, cases.problem(case, x)


@pytest.fixture(scope="module", autouse=True)
def _baselines_once():
    """The dense baseline of a case serves all layouts and strategies."""
    compute, known = compare._baselines, {}

    def remembered(problem, *args):
        if id(problem) not in known:
            known[id(problem)] = list(compute(problem, *args))
        return known[id(problem)]

    compare._baselines = remembered
    yield
    compare._baselines = compute


def check(case, strategy, kind, devices, ring=None):
    """Outputs, lse and gradients obey the error rule of `attention` itself."""
    x, problem = _prepared(case)
    names = ("query", "key", "value", "bias", "sinks", "scale", "aux")
    primals = {n: x.get("poisoned_" + n, x[n]) for n in names}
    primals = {n: a for n, a in primals.items() if not (a is None or isinstance(a, tuple) and not a)}
    B, batch = cases.flat_batch(case), cases.batch_shape(case)
    layout = SequenceLayout(kind, ring or devices)

    def call(d):
        kwargs = cases.arguments(case, x | d | {"poisoned_" + n: a for n, a in d.items()})
        return parallel(strategy, layout, devices, kwargs)

    def flatten(name, a):
        per_batch = name in ("out", "lse", "query", "key", "value")
        return a.reshape(B, *a.shape[len(batch) :]) if per_batch else cases._flat_bias(case, a) if name == "bias" else a

    fn, aux = cases.baseline_score_mod(case, x, x["aux"])
    compare.attention(
        problem, call, primals, score_mod=fn, aux=aux, flatten=flatten, dout=x["dout"], dlse=x["dlse"],
        fold=(lambda a: cases.table_gradient(case, x, a)) if case.score_mod == "relative" else None,
    )


def _case(**fields):
    return Case(**(dict(T=64, S=64, G=2, K=2, H=16, D="less", dtype="float32", batch="2", dlse=True) | fields))


# Every mask, modifier and option, several at a time where they can go together.
FEATURES = {
    "causal, cap, sinks": _case(is_causal=True, soft_cap="5", sinks=True, heavy=True),
    "documents, prefix": _case(mask="prefix", segments="sorted", key_lengths=True, poison=True, bias="TS"),
    "window, relative bias": _case(window="16,0", score_mod="relative", batch="", S=128, T=64, offset="5"),
    "window on both sides, alibi": _case(mask="window", score_mod="alibi", window="40,-2", scale="traced"),
    "dense, dropout": _case(mask="dense", dropout="0.5", bias="BNTS", query_lengths=True, sinks=True, poison=True),
    "blocks, dropout, causal": _case(mask="blocks", dropout="0.1", is_causal=True, T=128, H=40),
    "predicate, offsets": _case(mask="predicate", offset="array", score_mod="aux", bias="1N1S", batch="1x2"),
    "or, end": _case(mask="or", offset="end", query_lengths=True, key_lengths=True, S=128, bias="BNT1"),
    "not, unsorted ids": _case(mask="not", segments="unsorted", score_mod="plain", bias="N11", minus_inf=False),
    "tree": _case(mask="tree", bias="B1TS", minus_inf=True),
    "lengths": _case(mask="lengths", heavy=True, G=4, K=1),
}
SPREAD = [("ring", "zigzag", 4), ("ring", "striped", 8), ("allgather", "zigzag", 2), ("ulysses", "contiguous", 4)]


@pytest.mark.parametrize("strategy, kind, devices", SPREAD)
@pytest.mark.parametrize("name", FEATURES)
def test_every_feature(name, strategy, kind, devices):
    check(FEATURES[name], strategy, kind, devices)
