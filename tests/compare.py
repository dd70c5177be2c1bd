"""The one error rule of the test suite."""

import baseline
import ml_dtypes
import numpy as np
import oracle

LSE_TOLERANCE = {"bfloat16": 1e-3, "float16": 1e-3, "float32": 1e-5, "float64": 1e-12}


def eps(dtype):
    """Spacing of `dtype` at 1."""
    return float(ml_dtypes.finfo(dtype).eps)


def check(name, got, truth, baseline, dtype):
    """max|got − truth| / max|truth| ≤ 2 · (the same for baseline) + 2 · eps(dtype). A truth of zeros asks for zeros."""
    exact = str(dtype) == str(np.asarray(baseline).dtype) == "float64"
    got, truth, baseline = (np.asarray(x).astype(np.float64) for x in (got, truth, baseline))
    assert got.shape == truth.shape == baseline.shape, f"{name}: {got.shape} {truth.shape} {baseline.shape}"
    assert np.isfinite(got).all(), f"{name}: {np.count_nonzero(~np.isfinite(got))} of {got.size} entries are not finite"
    if not truth.size:
        return
    size = np.abs(truth).max()
    error, yardstick = np.abs(got - truth).max(), np.abs(baseline - truth).max()
    # In float64 the baseline is the truth to many digits; a wrong one would excuse a wrong kernel.
    assert not exact or yardstick <= 1e-10 * max(size, 1), f"{name}: the baseline is off by {yardstick:.3g}"
    assert error <= 2 * yardstick + 2 * eps(dtype) * size, (
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


def attention(problem, call, primals=None, *, score_mod=None, aux=None, dout=None, dlse=None, flatten=None):
    """Hold `call(primals) -> (out, lse)` and all its gradients against the oracle on `problem`.

    `primals` is a dict of the differentiable inputs that `call` gets (default: those of the problem): query, key, value
    and, where used, bias, sinks, scale, aux. `score_mod` and `aux` are the problem's modifier for the dense baseline.
    `flatten(name, array)` turns a result of `call` into the problem's shape. Returns out, lse, gradients of
    `call`, then those of the oracle and of the baseline.
    """
    query = problem.query
    dtype, shape = query.dtype, (*query.shape[:3], problem.value.shape[-1])
    rng = np.random.default_rng(5)
    dout = rng.standard_normal(shape).astype(dtype) if dout is None else dout
    dlse = np.zeros(shape[:3]) if dlse is None else dlse
    if primals is None:
        primals = {n: getattr(problem, n) for n in ("query", "key", "value", "bias", "sinks", "scale")}
        primals = {n: a for n, a in primals.items() if a is not None} | ({"aux": problem.aux} if problem.aux else {})
    flatten = flatten or (lambda name, a: a)
    out, lse, got = run(call, primals, dout, dlse)
    truth_out, truth_lse = oracle.forward(problem)
    truth = oracle.backward(problem, dout.reshape(shape), dlse.reshape(shape[:3]))
    yard_out, yard_lse, yard = run(
        lambda d: _dense(problem, score_mod, d),
        _dense_primals(problem, primals, aux),
        dout.reshape(shape),
        dlse.reshape(shape[:3]),
    )
    assert out.dtype == dtype and lse.dtype == np.promote_types(np.float32, dtype if dtype.itemsize > 2 else np.float32)
    check("out", flatten("out", out), truth_out, yard_out, dtype)
    check_lse(flatten("lse", lse), truth_lse, dtype)
    for name, gradient in got.items():
        if name == "aux":
            continue
        assert gradient.dtype == primals[name].dtype, f"d{name} is {gradient.dtype}, its primal {primals[name].dtype}"
        check("d" + name, flatten(name, gradient), truth[name], yard[name], dtype)
    return out, lse, got, truth, yard


def run(call, primals, dout, dlse):
    """(out, lse, gradients) of `call` as NumPy arrays, from one compilation."""
    import jax

    @jax.jit
    def both(primals, dout, dlse):
        (out, lse), pull = jax.vjp(call, primals)
        return out, lse, pull((dout.reshape(out.shape).astype(out.dtype), dlse.reshape(lse.shape).astype(lse.dtype)))[0]

    return jax.tree.map(np.asarray, both(primals, dout, dlse))


def _dense_primals(problem, primals, aux):
    own = {n: getattr(problem, n) for n in primals if n != "aux"}
    return own | ({"aux": problem.aux if aux is None else aux} if "aux" in primals else {})


def _dense(p, score_mod, d):
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
