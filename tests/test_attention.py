"""`jattn.attention` against the float64 oracle over the case table, with all gradients; the oracle against itself."""

import contextlib
import dataclasses
import itertools

import cases
import compare
import jax
import numpy as np
import oracle
import pytest


def x64(dtype):
    """The context in which arrays of `dtype` exist."""
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


def small_problem(**changes):
    """A float64 problem with every feature that is not in `changes` off; B 2, T 5, S 6, N 4, K 2, H 3, D 2."""
    rng = np.random.default_rng(1)
    shapes = dict(query=(2, 5, 4, 3), key=(2, 6, 2, 3), value=(2, 6, 2, 2))
    return oracle.Problem(**{n: rng.standard_normal(s) for n, s in shapes.items()} | changes)


def _features():
    rng = np.random.default_rng(2)
    mask = rng.random((2, 1, 5, 6)) < 0.7
    mask[0, :, 1] = False  # an empty row
    bias = rng.standard_normal((2, 1, 5, 6))
    bias[:, :, 2, 3] = -np.inf
    case = cases.Case(score_mod="aux", batch="2", S=6)
    mod, _ = cases.oracle_score_mod(case, dict(aux=(np.ones((4, 1, 1)), np.ones((2, 1, 1, 6)))))
    aux = rng.uniform(0.5, 1.5, (4, 1, 1)), rng.standard_normal((2, 1, 1, 6))
    keep, p = oracle.dropout_keep((3, 4), 0.4, 2, 4, 5, 6, offset=np.array([0, 3]))
    return [
        dict(),
        dict(mask=mask, scale=0.7, query_lengths=np.array([5, 3])),
        dict(mask=mask, bias=bias, soft_cap=2.0, sinks=rng.standard_normal(4)),
        dict(mask=mask, score_mod=mod, aux=aux, keep=keep, keep_probability=p, sinks=rng.standard_normal(4), scale=0.6),
        dict(
            bias=rng.standard_normal((4, 5, 1)),
            score_mod=cases.oracle_score_mod(cases.Case(score_mod="plain"), {})[0],
            soft_cap=3.0,
        ),
    ]


@pytest.mark.parametrize("features", _features(), ids=["plain", "mask", "cap", "modifier", "bias"])
def test_oracle_gradients_are_central_differences(features):
    p = small_problem(**features)
    rng = np.random.default_rng(3)
    dout, dlse = rng.standard_normal((2, 5, 4, 2)), rng.standard_normal((2, 5, 4))

    def loss(p):
        out, lse = oracle.forward(p)
        return (out * dout).sum() + (np.where(np.isneginf(lse), 0, lse) * dlse).sum()

    def difference(name, array, index, put):
        step = np.zeros_like(array)
        step[index] = 1e-5
        return (loss(put(array + step)) - loss(put(array - step))) / 2e-5

    gradients = oracle.backward(p, dout, dlse)
    for name in ("query", "key", "value", "bias", "sinks", "scale"):
        array = getattr(p, name)
        if array is None:
            continue
        array = np.asarray(array, np.float64)
        for index in itertools.islice(np.ndindex(array.shape), 0, None, 1 + array.size // 25):
            if np.isneginf(array[index]):
                continue
            got = difference(name, array, index, lambda a, name=name: dataclasses.replace(p, **{name: a}))
            np.testing.assert_allclose(gradients[name][index], got, rtol=2e-6, atol=2e-8, err_msg=name)
    for i, array in enumerate(p.aux):
        for index in np.ndindex(array.shape):
            got = difference(
                "aux", array, index, lambda a, i=i: dataclasses.replace(p, aux=(*p.aux[:i], a, *p.aux[i + 1 :]))
            )
            np.testing.assert_allclose(gradients["aux"][i][index], got, rtol=2e-6, atol=2e-8)


def test_oracle_philox_gives_the_published_numbers():
    published = {  # the known-answer file of Random123
        ((0,) * 4, (0,) * 2): "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2): "408f276d 41c83b0e a20bc7c6 6d5451fd",
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
        ): "d16cfe09 94fdcceb 5001e420 24126ea1",
    }
    for (counter, key), words in published.items():
        assert " ".join(f"{int(w):08x}" for w in oracle.philox4x32(counter, key)) == words


def test_oracle_agrees_with_naive_softmax():
    p = small_problem()
    s = np.einsum("btkgh,bskh->bkgts", p.query.reshape(2, 5, 2, 2, 3), p.key) / np.sqrt(3)
    weights = np.exp(s) / np.exp(s).sum(-1, keepdims=True)
    out, lse = oracle.forward(p)
    np.testing.assert_allclose(out, np.einsum("bkgts,bskd->btkgd", weights, p.value).reshape(2, 5, 4, 2), rtol=1e-12)
    np.testing.assert_allclose(lse, np.log(np.exp(s).sum(-1)).transpose(0, 3, 1, 2).reshape(2, 5, 4), rtol=1e-12)


def test_table_is_a_covering_design():
    """Every pair of values meets in some case, but for those that no case can have; and the table stays small."""
    fields = list(cases.FACTORS)
    met = set().union(*(cases._pairs(dataclasses.astuple(c)) for c in cases.CASES))
    missing = {
        (fields[i], a, fields[j], b)
        for i, j in itertools.combinations(range(len(fields)), 2)
        for a in cases.FACTORS[fields[i]]
        for b in cases.FACTORS[fields[j]]
        if (i, j, a, b) not in met
    }
    assert missing == {
        ("T", 1000, "mask", "tree"),
        ("T", 4092, "mask", "tree"),
        ("mask", "tree", "offset", "-3"),
        ("mask", "tree", "offset", "array"),
        ("mask", "tree", "offset", "end"),
        ("H", 256, "D", "more"),
        ("bias", "", "bias_dtype", "float32"),
        ("bias", "", "minus_inf", True),
        ("bias", "BNT1", "minus_inf", True),
        ("bias", "N11", "minus_inf", True),
        ("minus_inf", True, "score_mod", "plain"),
    }
    assert len(cases.CASES) <= 400
    assert len(set(map(cases.case_id, cases.CASES))) == len(cases.CASES)


@pytest.mark.parametrize("case", cases.CASES, ids=cases.case_id)
def test_case(case):
    """Output, lse and all gradients obey the error rule; the inputs hold NaN and Inf where no trace is promised."""
    check_case(case)


QUICK = cases.Case(
    T=17,
    S=65,
    G=3,
    K=2,
    H=40,
    D="more",
    dtype="bfloat16",
    batch="2",
    mask="or",
    window="40,-2",
    key_lengths=True,
    offset="end",
    bias="B1TS",
    soft_cap="50",
    score_mod="aux",
    sinks=True,
    dropout="0.1",
    dlse=True,
    poison=True,
)


@pytest.mark.quick
def test_one_case_with_many_features():
    check_case(QUICK, jax.jit)  # as users compile it


def check_case(case, jit=None):
    from jattn import attention

    x = cases.make_inputs(case)
    names = ("query", "key", "value", "bias", "sinks", "scale", "aux")
    primals = {n: x.get("poisoned_" + n, x[n]) for n in names}
    primals = {n: a for n, a in primals.items() if not (a is None or isinstance(a, tuple) and not a)}
    B, batch = cases.flat_batch(case), cases.batch_shape(case)

    def call(d):
        return attention(**cases.arguments(case, x | d | {"poisoned_" + n: a for n, a in d.items()}))

    def flatten(name, a):
        per_batch = name in ("out", "lse", "query", "key", "value")
        return a.reshape(B, *a.shape[len(batch) :]) if per_batch else cases._flat_bias(case, a) if name == "bias" else a

    with x64(case.dtype):
        fn, aux = cases.baseline_score_mod(case, x, x["aux"])
        compare.attention(
            cases.problem(case, x),
            call,
            primals,
            score_mod=fn,
            aux=aux,
            fold=(lambda a: cases.table_gradient(case, x, a)) if case.score_mod == "relative" else None,
            flatten=flatten,
            dout=x["dout"],
            dlse=x["dlse"] if case.dlse else np.zeros_like(x["dlse"]),
            jit=jit,
        )
