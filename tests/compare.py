"""The one error rule of the test suite."""

import functools

import baseline
import jax
import ml_dtypes
import numpy as np
import oracle

LSE_TOLERANCE = {"bfloat16": 1e-3, "float16": 1e-3, "float32": 1e-5, "float64": 1e-12}


def quickly(dtype):
    """jit of the same program in less time, on a CPU: no mask is folded by an interpreter, nothing is optimised that
    runs once. Where rounding is all the error there is, sums stay as optimisation orders them."""
    options = {"xla_disable_hlo_passes": "constant_folding"}
    options |= {} if dtype == "float64" else {"xla_backend_optimization_level": 0}
    return functools.partial(jax.jit, compiler_options=options) if jax.default_backend() == "cpu" else jax.jit


def eps(dtype):
    """Spacing of `dtype` at 1."""
    return float(ml_dtypes.finfo(dtype).eps)


def check(name, got, truth, baselines, dtype, size=0.0):
    """max|got − truth| / max|truth| ≤ 2 · (the same for the baseline) + 2 · eps(dtype). Zeros ask for zeros.

    The baseline's error is the largest of several `baselines`, because small arrays do not even out luck. An array of a
    coarser dtype is held to that dtype. `size` is a floor of max|truth|, for a number that may cancel.
    """
    # In float64 the baseline is the truth to many digits; a wrong one would excuse a wrong kernel.
    exact = str(dtype) == str(np.asarray(baselines[0]).dtype) == "float64"
    precision = max(eps(dtype), eps(got.dtype))
    got, truth, *baselines = (np.asarray(x).astype(np.float64) for x in (got, truth, *baselines))
    assert {got.shape} == {x.shape for x in (truth, *baselines)}, f"{name}: {got.shape} should be {truth.shape}"
    assert np.isfinite(got).all(), f"{name}: {np.count_nonzero(~np.isfinite(got))} of {got.size} entries are not finite"
    if not truth.size:
        return
    size = max(size, np.abs(truth).max())
    error, yardstick = np.abs(got - truth).max(), max(np.abs(x - truth).max() for x in baselines)
    assert not exact or yardstick <= 1e-10 * max(size, 1), f"{name}: the baseline is off by {yardstick:.3g}"
    assert error <= 2 * yardstick + 2 * precision * size, (
        f"{name}: error {error:.3g} of {size:.3g}, the dense baseline's is {yardstick:.3g} in {dtype}"
    )


def check_lse(got, truth, dtype):
    """lse within 1e-3 (bf16, f16) or 1e-5 (f32) of max(1, |truth|), and −inf exactly where the truth is."""
    got, truth = np.asarray(got), np.asarray(truth)
    assert got.shape == truth.shape, f"lse: {got.shape} {truth.shape}"
    np.testing.assert_array_equal(np.isneginf(got), np.isneginf(truth), err_msg="empty rows of lse")
    finite = ~np.isneginf(truth)
    error = np.abs(got[finite].astype(np.float64) - truth[finite]) / np.maximum(1, np.abs(truth[finite]))
    assert not error.size or error.max() <= LSE_TOLERANCE[str(dtype)], f"lse: error {error.max():.3g} in {dtype}"


def attention(
    problem, call, primals=None, *, score_mod=None, aux=None, fold=None, dout=None, dlse=None, flatten=None, jit=None
):  # fmt: skip
    """Hold `call(primals) -> (out, lse)` and all its gradients against the oracle on `problem`; returns what it gave.

    `primals` is a dict of the differentiable inputs that `call` gets (default: those of the problem): query, key, value
    and, where used, bias, sinks, scale, aux. `score_mod` and `aux` are the problem's modifier for the dense baseline;
    `fold(gradient)` brings the gradient of the problem's aux to the shape of the primal one (default: a reshape).
    `flatten(name, array)` turns a result of `call` into the problem's shape. `jit` compiles it, and the baseline
    (default: `quickly`).
    """
    query = problem.query
    dtype, shape = query.dtype, (*query.shape[:3], problem.value.shape[-1])
    jit = jit or quickly(dtype)
    rng = np.random.default_rng(5)
    dout = rng.standard_normal(shape).astype(dtype) if dout is None else dout
    dlse = np.zeros(shape[:3]) if dlse is None else dlse
    if primals is None:
        primals = {n: getattr(problem, n) for n in ("query", "key", "value", "bias", "sinks", "scale")}
        primals = {n: a for n, a in primals.items() if a is not None} | ({"aux": problem.aux} if problem.aux else {})
    flatten = flatten or (lambda name, a: a)
    out, lse, got = jax.tree.map(np.asarray, _pullback(call, jit)(primals, dout, dlse))
    dout, dlse = dout.reshape(shape), dlse.reshape(shape[:3])
    truth = oracle.backward(problem, dout, dlse)
    truth_out, truth_lse = truth["forward"]
    own = {n: getattr(problem, n) for n in primals if n != "aux"}
    own |= {"aux": problem.aux if aux is None else aux} if "aux" in primals else {}
    yards = list(_baselines(problem, score_mod, own, dout, dlse, jit))
    assert out.dtype == dtype and lse.dtype == np.promote_types(np.float32, dtype if dtype.itemsize > 2 else np.float32)
    check("out", flatten("out", out), truth_out, [y["out"] for y in yards], dtype)
    check_lse(flatten("lse", lse), truth_lse, dtype)
    for name in got.keys() - {"aux"}:
        assert got[name].dtype == primals[name].dtype, f"d{name} is {got[name].dtype}, its primal {primals[name].dtype}"
        gradient, baselines = flatten(name, got[name]), [y[name] for y in yards]
        check("d" + name, gradient, truth[name], baselines, dtype, truth["terms"].get(name, 0.0))
    for i, gradient in enumerate(got.get("aux", ())):
        back = fold or (lambda a, shape=gradient.shape: np.reshape(a, shape))
        want, baselines = back(truth["aux"][i]), [back(y["aux"][i]) for y in yards]
        assert gradient.dtype == primals["aux"][i].dtype
        check("daux", gradient, want, baselines, dtype)
    return out, lse, got


def _pullback(call, jit=jax.jit):
    """Compiled (primals, dout, dlse) -> out, lse, gradients."""

    def run(primals, dout, dlse):
        (out, lse), pull = jax.vjp(call, primals)
        cotangent = dout.reshape(out.shape).astype(out.dtype), dlse.reshape(lse.shape).astype(lse.dtype)
        return out, lse, pull(cotangent)[0]

    return jit(run)


def _baselines(p, score_mod, primals, dout, dlse, jit=jax.jit):
    """Three runs of the dense baseline, with the channels of q·k and of v in different order: name -> array."""

    def dense(d):
        return baseline.attention(
            d["query"],
            d["key"],
            d["value"],
            d.get("bias"),
            p.mask,
            scale=d.get("scale", p.scale),
            offset=p.offset,
            query_lengths=p.query_lengths,
            soft_cap=p.soft_cap,
            score_mod=score_mod,
            aux=d.get("aux", ()),
            sinks=d.get("sinks"),
            keep=p.keep,
            keep_probability=p.keep_probability,
        )

    run, rng = _pullback(dense, jit), np.random.default_rng(6)
    for shuffled in (False, True, True):
        h, d = (rng.permutation(n) if shuffled else np.arange(n) for n in (p.query.shape[-1], p.value.shape[-1]))
        order = dict(query=h, key=h, value=d)
        moved = primals | {n: primals[n][..., o] for n, o in order.items()}
        out, _, gradients = jax.tree.map(np.asarray, run(moved, dout[..., d], dlse))
        back = {n: gradients[n][..., np.argsort(o)] for n, o in order.items()}
        yield gradients | back | {"out": out[..., np.argsort(d)]}
