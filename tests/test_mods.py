"""Score modifiers: values, gradients, aux of every shape, alibi, relative_bias, and what is refused."""

# ruff: noqa: E731 -- short local functions

import compare
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cases import qkv

import jattn
from jattn import mods

rng = np.random.default_rng(0)
B, T, S, N, K = 2, 17, 23, 4, 2
PRODUCT = oracle.ScoreMod(
    lambda score, b, n, t, s, a: score * a,
    lambda score, b, n, t, s, a: a,
    lambda score, b, n, t, s, a: (score,),
)
SUM = oracle.ScoreMod(
    lambda score, b, n, t, s, a: score + a,
    lambda score, b, n, t, s, a: np.ones_like(score),
    lambda score, b, n, t, s, a: (np.ones_like(score),),
)


def product(score, b, n, t, s, a):
    return score * a


def attend(d, mod=None, **options):
    options = options | {name: d[name] for name in ("bias", "sinks", "scale") if name in d}
    mod = mod(d) if mod else None
    return jattn.attention(d["query"], d["key"], d["value"], score_mod=mod, return_residual=True, **options)


@pytest.mark.parametrize("shape", [(N, 1, 1), (B, 1, 1, S), (T, S), (B, N, T, S), (1, 1, T, 1), (S,), (), (B, 1, 1, 1)])
def test_aux_arrays_of_every_shape_get_their_gradient(shape):
    q, k, v = qkv(B, T, S, N, K)
    aux = rng.uniform(0.5, 1.5, shape).astype(np.float32)
    p = oracle.Problem(q, k, v, score_mod=PRODUCT, aux=(aux,))
    call = lambda d: attend(d, lambda d: mods.score_mod(product, *d["aux"]))
    compare.attention(p, call, score_mod=product)


@pytest.mark.quick
def test_a_bare_function_is_a_modifier():
    """Nonlinear in the score, and reading b, n, t and s."""
    mod = oracle.ScoreMod(
        lambda score, b, n, t, s: np.tanh(score) + 0.1 * n - 0.2 * b + 0.01 * (t - 2 * s),
        lambda score, b, n, t, s: 1 / np.cosh(score) ** 2,
    )

    def fn(score, b, n, t, s):
        where = (10 * n - 20 * b + t - 2 * s).astype(score.dtype)
        return jnp.tanh(score) + 0.01 * where

    p = oracle.Problem(*qkv(B, T, S, N, K), score_mod=mod, offset=np.array([3, -2]))
    compare.attention(p, lambda d: attend(d, lambda d: fn, query_offset=np.array([3, -2], np.int32)), score_mod=fn)


def test_a_function_may_close_over_python_numbers():
    factor = 0.5
    q, k, v = qkv(B, T, S, N, K)
    got = jattn.attention(q, k, v, score_mod=lambda score, b, n, t, s: score * factor)
    np.testing.assert_array_equal(got, jattn.attention(q, k, v, score_mod=lambda score, b, n, t, s: score * 0.5))


def test_b_is_the_flat_batch_index():
    q, k, v = (x.reshape(2, 3, *x.shape[1:]) for x in qkv(6, T, S, N, K))
    mod = lambda score, b, n, t, s: score * (1 + 0.3 * b.astype(score.dtype))
    got = jattn.attention(q, k, v, score_mod=mod)
    flat = jattn.attention(*(x.reshape(6, *x.shape[2:]) for x in (q, k, v)), score_mod=mod)
    np.testing.assert_array_equal(got.reshape(flat.shape), flat)
    for i in range(6):
        one = jattn.attention(q[i // 3, i % 3], k[i // 3, i % 3], v[i // 3, i % 3], scale=(1 + 0.3 * i) / 4)
        np.testing.assert_allclose(flat[i], one, atol=1e-5)


@pytest.mark.parametrize("heads", [8, 12, 1])
def test_alibi_of_a_number_of_heads_has_the_published_slopes(heads):
    def published(n):
        if np.log2(n) % 1 == 0:
            return [2 ** (-8 * (i + 1) / n) for i in range(n)]
        m = 2 ** int(np.log2(n))
        return published(m) + published(2 * m)[0::2][: n - m]

    q, k, v = qkv(1, T, S, heads, 1)
    got = jattn.attention(q, k, v, score_mod=mods.alibi(heads))
    want = jattn.attention(q, k, v, score_mod=mods.alibi(np.asarray(published(heads), np.float32)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_alibi_subtracts_slope_times_distance():
    q, k, v = qkv(B, T, S, N, K)
    slopes = np.array([0.5, 0.1, 0.02, 0.3], np.float32)
    mod = oracle.ScoreMod(
        lambda score, b, n, t, s, a: score - a * abs(t - s),
        lambda score, b, n, t, s, a: np.ones_like(score),
        lambda score, b, n, t, s, a: (-abs(t - s) * np.ones_like(score),),
    )
    fn = lambda score, b, n, t, s, a: score - a * abs(t - s).astype(score.dtype)
    p = oracle.Problem(q, k, v, score_mod=mod, aux=(slopes[:, None, None],), offset=4)
    call = lambda d: attend(d, lambda d: mods.alibi(d["aux"][0]), query_offset=4)
    primals = dict(query=q, key=k, value=v, aux=(slopes,))
    compare.attention(p, call, primals, score_mod=fn)


@pytest.mark.parametrize("shape", [(N, 8), (N, 9), (1, 64), (1, 2)])
@pytest.mark.parametrize("offset", [0, 5])
def test_relative_bias_reads_the_table_at_the_clipped_distance(shape, offset):
    """Entry for d = s − t is table[n, clip(d + L // 2, 0, L − 1)]; its gradient sums what shares an entry."""
    q, k, v = qkv(B, T, S, N, K)
    table = rng.standard_normal(shape).astype(np.float32)
    L = shape[1]
    index = np.clip(np.arange(S) - (np.arange(T)[:, None] + offset) + L // 2, 0, L - 1)
    dense = np.broadcast_to(table[:, index], (N, T, S))
    p = oracle.Problem(q, k, v, score_mod=SUM, aux=(dense,))
    call = lambda d: attend(d, lambda d: mods.relative_bias(d["aux"][0]), query_offset=offset)
    primals = dict(query=q, key=k, value=v, aux=(table,))

    def fold(gradient):
        total = np.zeros(shape)
        np.add.at(total, (np.arange(N)[:, None, None] % shape[0], index), np.asarray(gradient, float))
        return total

    compare.attention(p, call, primals, score_mod=lambda score, b, n, t, s, a: score + a, fold=fold)


def test_modifiers_with_new_arrays_share_a_compilation():
    q, k, v = qkv(B, T, S, N, K)
    traces = []

    @jax.jit
    def f(mod):
        traces.append(mod)
        return jattn.attention(q, k, v, score_mod=mod)

    def build(seed):
        gain = np.random.default_rng(seed).uniform(0.5, 1.5, (N, 1, 1)).astype(np.float32)
        return mods.score_mod(lambda score, b, n, t, s, gain: score * gain, gain)

    results = [np.asarray(f(build(i))) for i in range(3)]
    assert len(traces) == 1
    assert not np.array_equal(results[0], results[1])
    f(mods.alibi(np.ones(N, np.float32)))
    f(mods.alibi(np.zeros(N, np.float32)))
    assert len(traces) == 2


def test_eager_calls_with_a_rebuilt_modifier_do_not_compile_again():
    q, k, v = qkv(B, T, S, N, K)

    def call(seed):
        gain = np.random.default_rng(seed).uniform(0.5, 1.5, (N, 1, 1)).astype(np.float32)
        return jattn.attention(q, k, v, score_mod=mods.score_mod(lambda score, b, n, t, s, gain: score * gain, gain))

    call(0)
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        import logging

        compiled = []
        patch.setattr(logging.getLogger("jax._src.interpreters.pxla"), "log", lambda *a, **k: compiled.append(a))
        call(1)
        call(2)
    assert not compiled


@pytest.mark.parametrize(
    "mod, error, words",
    [
        (lambda score: score, TypeError, "positional argument"),
        (lambda score, b, n, t, s: score > 0, (TypeError, ValueError), "score_mod"),
        (3, TypeError, "score_mod"),
        ("alibi", TypeError, "score_mod"),
    ],
)
def test_wrong_modifiers_are_refused(mod, error, words):
    with pytest.raises(error, match=words):
        jattn.attention(*qkv(B, T, S, N, K), score_mod=mod)


def test_a_modifier_cannot_look_beyond_its_element():
    """A sum over what it is given is a sum over one score, whatever the tiles."""
    q, k, v = qkv(B, T, S, N, K)
    got = jattn.attention(q, k, v, score_mod=lambda score, b, n, t, s: score.sum() + 0 * t.max().astype(score.dtype))
    np.testing.assert_allclose(got, jattn.attention(q, k, v), atol=1e-6)


def test_a_function_that_closes_over_an_array_is_refused_with_the_line_to_write():
    slopes = jnp.arange(4.0)
    with pytest.raises(TypeError, match=r"(?s)slopes.*mods\.score_mod\(fn"):
        jattn.attention(*qkv(B, T, S, N, K), score_mod=lambda score, b, n, t, s: score - slopes[n])


def test_a_function_that_closes_over_a_tracer_is_refused():
    def loss(slope):
        return jattn.attention(*qkv(B, T, S, N, K), score_mod=lambda score, b, n, t, s: score * slope).sum()

    with pytest.raises(TypeError, match=r"(?s)slope.*score_mod\("):
        jax.grad(loss)(jnp.float32(1.0))


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda: mods.score_mod(product, np.ones((3, 1, 1), np.float32)), "aux"),
        (lambda: mods.alibi(np.ones(3, np.float32)), "alibi"),
        (lambda: mods.relative_bias(np.ones((3, 9), np.float32)), "table"),
        (lambda: mods.relative_bias(np.ones((9,), np.float32)), "table"),
        (lambda: mods.relative_bias(np.ones((N, 0), np.float32)), "table"),
    ],
)
def test_arrays_that_do_not_fit_the_call_are_refused(build, words):
    with pytest.raises(ValueError, match=words):
        jattn.attention(*qkv(B, T, S, N, K), score_mod=build())
