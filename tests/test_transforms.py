"""Contract 11: attention under every transform of JAX gives what the plain call gives."""

# ruff: noqa: E731 -- short local functions

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import qkv
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jattn
from jattn import masks, mods

B, T, S, N, K, H = 3, 9, 12, 4, 2, 8
rng = np.random.default_rng(0)
Q, KEY, V = qkv(B, T, S, N, K, H)
ARRAYS = dict(
    query=Q,
    key=KEY,
    value=V,
    bias=rng.standard_normal((B, 1, T, S)).astype(np.float32),
    mask=rng.random((B, N, 1, S)) < 0.8,
    scale=np.array([0.2, 0.3, 0.4], np.float32),
    sinks=rng.standard_normal((B, N)).astype(np.float32),
    query_offset=np.array([0, 2, 3], np.int32),
    key_value_seq_lengths=np.array([12, 7, 0], np.int32),
    query_seq_lengths=np.array([9, 9, 4], np.int32),
    aux=rng.uniform(0.5, 1.5, (B, N, 1, 1)).astype(np.float32),
    dropout_key=np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), B))),
    q_ids=rng.integers(0, 2, (B, T)).astype(np.int32),
    k_ids=rng.integers(0, 2, (B, S)).astype(np.int32),
    parents=np.array([[-1, 0, 1, 2, 3, 4, 5, 6, 7], [-1] * 9, [-1, 0, 0, 1, 1, 2, 2, 3, 3]], np.int32),
)


def attend(query, key, value, **d):
    """One call of any subset of the arrays above; aux, ids and parents become a modifier, segments and a tree."""
    if "aux" in d:
        d["score_mod"] = mods.score_mod(lambda score, b, n, t, s, a: score * a, d.pop("aux"))
    if "dropout_key" in d:
        d.update(dropout_rate=0.3, dropout_key=jax.random.wrap_key_data(d["dropout_key"]))
    if "q_ids" in d:
        d["segment_ids"] = d.pop("q_ids"), d.pop("k_ids")
    if "parents" in d:
        d["mask"] = masks.tree(d.pop("parents"))
    if "query_offset" in d or "bias" in d:
        d["is_causal"] = True
    return jattn.attention(query, key, value, return_residual=True, **d)


def close(got, want, atol=2e-6):
    """Equal up to the order of float32 sums, against the largest entry."""

    def check(g, w):
        g, w = np.asarray(g, np.float64), np.asarray(w, np.float64)
        np.testing.assert_allclose(
            g, w, rtol=0, atol=atol * max(1, np.abs(w, where=np.isfinite(w), out=np.zeros_like(w)).max())
        )

    jax.tree.map(check, got, want)


SUBSETS = [
    ("query",),
    ("key",),
    ("value",),
    ("key", "value"),
    ("query", "key", "value"),
    ("bias",),
    ("mask",),
    ("scale",),
    ("sinks",),
    ("query_offset",),
    ("key_value_seq_lengths",),
    ("query_seq_lengths",),
    ("aux",),
    ("dropout_key",),
    ("q_ids", "k_ids"),
    ("parents",),
    ("query", "bias", "key_value_seq_lengths"),
    ("value", "mask", "sinks", "aux"),
    (
        "query",
        "key",
        "value",
        "bias",
        "mask",
        "scale",
        "sinks",
        "query_offset",
        "key_value_seq_lengths",
        "aux",
        "dropout_key",
    ),
]


@pytest.mark.parametrize("mapped", SUBSETS, ids="+".join)
def test_vmap_of_any_subset_is_the_loop(mapped):
    """Values and gradients; what is not mapped is shared, dropout and b included."""
    names = {"query", "key", "value", *mapped}
    arrays = {n: ARRAYS[n] if n in mapped else ARRAYS[n][0] for n in names}
    differentiable = {
        n: x for n, x in arrays.items() if n in ("query", "key", "value", "bias", "scale", "sinks", "aux")
    }
    axes = {n: 0 if n in mapped else None for n in names}

    def both(d):
        def loss(f):
            out, lse = attend(**(d | f))
            return (out**2).sum() + jnp.where(lse > -jnp.inf, lse, 0.0).sum(), (out, lse)

        return jax.grad(loss, has_aux=True)({n: d[n] for n in differentiable})

    got = jax.jit(jax.vmap(both, in_axes=(axes,)))(arrays)
    one = jax.jit(both)
    want = [one({n: x[i] if n in mapped else x for n, x in arrays.items()}) for i in range(B)]
    close(got, jax.tree.map(lambda *x: np.stack(x), *want), atol=1e-5)


def test_vmap_along_other_axes_and_nested():
    inner = jax.vmap(lambda q, k: jattn.attention(q, k, V[0]), in_axes=(None, 2), out_axes=1)
    keys = np.stack([KEY[0], KEY[1]], axis=2)
    nested = jax.vmap(inner, in_axes=(0, None))(Q, keys)
    assert nested.shape == (B, T, 2, N, H)
    for i in range(B):
        for j in range(2):
            close(nested[i, :, j], jattn.attention(Q[i], KEY[j], V[0]))


def test_vmap_of_dropout_shares_an_unmapped_key():
    """As in a loop: every element of the map is batch row 0 of its own call."""
    key = jax.random.key(3)
    f = lambda q, k, v: jattn.attention(q, k, v, dropout_rate=0.5, dropout_key=key)
    close(jax.vmap(f)(Q, KEY, V), np.stack([f(*x) for x in zip(Q, KEY, V, strict=True)]))


def test_vmap_of_ragged():
    cu = np.array([[0, 4, 9], [0, 9, 9], [0, 0, 3]], np.int32)
    q, k, v = qkv(3, 9, 9, N, K, H)
    f = lambda q, k, v, cu: jattn.ragged_attention(q, k, v, cu, is_causal=True)
    close(jax.vmap(f)(q, k, v, cu), np.stack([f(*x) for x in zip(q, k, v, cu, strict=True)]))
    close(jax.vmap(f, (None, 0, 0, None))(q[0], k, v, cu[0]), np.stack([f(q[0], k[i], v[i], cu[0]) for i in range(3)]))


@pytest.mark.quick
def test_jit_is_eager():
    for names in (("bias",), ("mask", "sinks"), ("query_offset", "key_value_seq_lengths")):
        d = {n: ARRAYS[n] for n in ("query", "key", "value", *names)} | (
            {"sinks": ARRAYS["sinks"][0]} if "sinks" in names else {}
        )
        close(jax.jit(attend)(**d), attend(**d))


@pytest.mark.parametrize("name, traced", [("scale", 0.3), ("query_offset", 2), ("key_value_seq_lengths", 5)])
def test_traced_numbers_do_not_compile_again(name, traced):
    traces = []

    @jax.jit
    def f(x):
        traces.append(x)
        return jattn.attention(Q, KEY, V, is_causal=True, **{name: jnp.broadcast_to(x, (B,)) if "len" in name else x})

    number = np.asarray(traced, np.float32 if name == "scale" else np.int32)
    a, b = f(number), f(number * 2)
    assert len(traces) == 1 and not np.array_equal(a, b)
    static = np.full(B, traced, np.int32) if "len" in name else traced
    close(a, jattn.attention(Q, KEY, V, is_causal=True, **{name: static}))


@pytest.mark.parametrize("name", ["logits_soft_cap", "local_window_size", "dropout_rate", "is_causal"])
def test_traced_options_that_compile_in_are_refused(name):
    with pytest.raises(TypeError, match=name if name != "local_window_size" else "window"):
        jax.jit(lambda x: jattn.attention(Q, KEY, V, dropout_key=jax.random.key(0), **{name: x}))(jnp.asarray(1))


def test_vjp_of_one_output_leaves_the_other_out():
    """The cotangent of out alone, of lse alone, and none at all."""
    f = lambda q: jattn.attention(q, KEY, V, is_causal=True, return_residual=True)
    (out, lse), pull = jax.vjp(f, Q)
    g_out, g_lse = rng.standard_normal(out.shape).astype(np.float32), rng.standard_normal(lse.shape).astype(np.float32)
    both = pull((g_out, g_lse))[0]
    alone = jax.grad(lambda q: (f(q)[0] * g_out).sum())(Q) + jax.grad(lambda q: (f(q)[1] * g_lse).sum())(Q)
    close(both, alone, 1e-5)
    assert not np.any(jax.grad(lambda q: f(q)[0].sum() * 0)(Q))


def test_jacrev_is_a_stack_of_gradients():
    q, k, v = qkv(1, 4, 8, 2, 1, 4)
    jacobian = jax.jacrev(lambda q: jattn.attention(q, k, v, is_causal=True))(q)
    assert jacobian.shape == (1, 4, 2, 4, 1, 4, 2, 4)
    one = jax.grad(lambda q: jattn.attention(q, k, v, is_causal=True)[0, 2, 1, 3])(q)
    close(jacobian[0, 2, 1, 3], one)
    assert not np.any(jacobian[0, 1, 0, 0, 0, 2:]), "a query's output does not depend on later queries"


def test_grad_with_respect_to_a_part():
    """Of each argument alone, as of all of them at once."""
    d = {n: ARRAYS[n] for n in ("query", "key", "value", "bias", "aux")} | dict(
        scale=np.float32(0.3), sinks=ARRAYS["sinks"][0]
    )

    def loss(part):
        out, lse = attend(**(d | part))
        return (out * jnp.cos(out)).sum() + lse.sum()

    whole = jax.jit(jax.grad(loss))(d)
    for name in d:
        close(jax.jit(jax.grad(loss))({name: d[name]})[name], whole[name], 1e-5)


POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "no batch dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


@pytest.mark.parametrize("policy", POLICIES)
def test_checkpoint_is_bit_equal(policy):
    def attend(q, k, v):
        key = jax.random.key(1)
        return jattn.attention(q, k, v, is_causal=True, dropout_rate=0.2, dropout_key=key, return_residual=True)

    def gradients(f):
        def loss(q, k, v):
            out, lse = f(q, k, v)
            return (out**2).sum() + lse.sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(Q, KEY, V)

    plain = gradients(attend)
    for g, w in zip(gradients(jax.checkpoint(attend, policy=POLICIES[policy])), plain, strict=True):
        np.testing.assert_array_equal(g, w)


def test_out_and_lse_carry_checkpoint_names():
    """A policy that saves the names saves the forward pass: the backward computes no attention again."""
    from jax.ad_checkpoint import checkpoint_name  # noqa: F401 -- the mechanism behind the names

    names = set()

    def policy(prim, *_, **params):
        if prim.name == "name":
            names.add(params["name"])
        return False

    def loss(q):
        out, lse = jattn.attention(jnp.sin(q), KEY, V, return_residual=True)
        return (out**2).sum() + lse.sum()

    jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=policy)))(Q)
    assert {n for n in names if "out" in n} and {n for n in names if "lse" in n}, names
    save = jax.checkpoint_policies.save_only_these_names(*names)
    saved, nothing = (
        str(jax.make_jaxpr(jax.grad(jax.checkpoint(loss, policy=p)))(Q)).count(" exp")
        for p in (save, jax.checkpoint_policies.nothing_saveable)
    )
    assert saved < nothing
    close(jax.grad(jax.checkpoint(loss, policy=save))(Q), jax.grad(loss)(Q), 1e-5)


def test_scan_over_layers():
    layers = (rng.standard_normal((3, N * H, N * H)) / np.sqrt(N * H)).astype(np.float32)

    def layer(x, w):
        y = jattn.attention(x, x, x, is_causal=True)
        return x + jnp.einsum("btx,xy->bty", y.reshape(B, T, N * H), w).reshape(x.shape), None

    def loop(x):
        for w in layers:
            x, _ = layer(x, w)
        return (x**2).sum()

    scanned = lambda x: (jax.lax.scan(layer, x, layers)[0] ** 2).sum()
    close(jax.jit(jax.grad(scanned))(Q), jax.jit(jax.grad(loop))(Q), 1e-4)


def test_loops_and_branches_of_lax():
    f = lambda q, n: jattn.attention(q, KEY, V, key_value_seq_lengths=jnp.broadcast_to(n, (B,)))
    mapped = jax.lax.map(lambda n: f(Q, n), jnp.arange(1, 4))
    for i in range(3):
        close(mapped[i], f(Q, i + 1))
    branch = jax.jit(lambda flag: jax.lax.cond(flag, lambda: f(Q, 5), lambda: jnp.zeros_like(Q)))
    close(branch(True), f(Q, 5))
    while_ = jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, f(c[1], 7)), (0, jnp.asarray(Q)))[1]
    close(while_, f(f(Q, 7), 7))


def test_eval_shape_computes_nothing():
    shapes = [jax.ShapeDtypeStruct((2, 2**20, 4, 64), jnp.bfloat16)] * 3
    f = lambda q, k, v: jattn.attention(q, k, v, is_causal=True, return_residual=True)
    out, lse = jax.eval_shape(f, *shapes)
    assert out.shape == (2, 2**20, 4, 64) and out.dtype == jnp.bfloat16
    assert lse.shape == (2, 2**20, 4) and lse.dtype == jnp.float32
    grads = jax.eval_shape(jax.grad(lambda *x: f(*x)[0].astype(jnp.float32).sum(), (0, 1, 2)), *shapes)
    assert [g.dtype for g in grads] == [jnp.bfloat16] * 3


@pytest.mark.parametrize("mode", [AxisType.Auto, AxisType.Explicit])
def test_shard_map_with_varying_axes_checked(mode):
    """Batch over one axis, heads over the other; values, lse and gradients, with the sums that sharding asks for."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"), axis_types=(mode, mode))
    q, k, v = qkv(2, T, S, 4, 2, H)
    bias = rng.standard_normal((1, 4, T, S)).astype(np.float32)
    lengths = np.array([12, 7], np.int32)

    def local(q, k, v, bias, lengths):
        return jattn.attention(q, k, v, bias, is_causal=True, key_value_seq_lengths=lengths, return_residual=True)

    spec = P("x", None, "y")
    specs = spec, spec, spec, P(None, "y"), P("x")
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(spec, spec), check_vma=True)

    def gradients(f):
        def loss(q, k, v, bias, lengths):
            out, lse = f(q, k, v, bias, lengths)
            return (out**2).sum() + lse.sum()

        return jax.jit(jax.grad(loss, (0, 1, 2, 3)))

    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip((q, k, v, bias, lengths), specs, strict=True)
        ]
        close(jax.jit(sharded)(*placed), local(q, k, v, bias, lengths))
        got = gradients(sharded)(*placed)
    close(got, gradients(local)(q, k, v, bias, lengths), 1e-5)


def test_shard_map_with_unvarying_arguments():
    """Keys replicated, queries split along time with an offset per device; ragged and masks too."""
    mesh = Mesh(np.array(jax.devices()[:3]), ("x",))
    q, k, v = qkv(2, 9, 12, N, K, H)
    mask = masks.causal() & masks.window(5, 0)

    def local(q, k, v):
        offset = jax.lax.axis_index("x") * q.shape[1]
        return jattn.attention(q, k, v, mask=mask, query_offset=offset, score_mod=mods.alibi(N))

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P(None, "x"), P(), P()), out_specs=P(None, "x"))
    plain = lambda q, k, v: jattn.attention(q, k, v, mask=mask, score_mod=mods.alibi(N))
    close(jax.jit(sharded)(q, k, v), plain(q, k, v))
    got, want = (jax.jit(jax.grad(lambda *x, f=f: (f(*x) ** 2).sum(), (0, 1, 2)))(q, k, v) for f in (sharded, plain))
    close(got, want, 1e-5)


def test_dropout_in_a_shard_map_of_ones_own():
    """Indices are local there: the same key on each shard repeats the pattern, a folded one does not."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    q, k, v = (np.concatenate([x[:1]] * 2) for x in (Q, KEY, V))

    def local(q, k, v, *, fold):
        key = jax.random.key(0)
        key = jax.random.fold_in(key, jax.lax.axis_index("x")) if fold else key
        return jattn.attention(q, k, v, dropout_rate=0.5, dropout_key=key)

    for fold in (False, True):
        f = jax.shard_map(functools.partial(local, fold=fold), mesh=mesh, in_specs=(P("x"),) * 3, out_specs=P("x"))
        out = np.asarray(jax.jit(f)(q, k, v))
        assert np.array_equal(out[0], out[1]) != fold


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_export_lowers_and_runs(platform):
    """Forward and gradient, with features, for this machine and for one that is not here."""
    mask = masks.causal() & masks.segments(ARRAYS["q_ids"], ARRAYS["k_ids"])

    def step(q, k, v, bias, seed):
        def loss(q, k, v, bias):
            out = jattn.attention(
                q,
                k,
                v,
                bias,
                mask,
                logits_soft_cap=20.0,
                dropout_rate=0.1,
                dropout_key=jax.random.wrap_key_data(seed),
                score_mod=mods.alibi(N),
            )
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1, 2, 3))(q, k, v, bias)

    arguments = Q, KEY, V, ARRAYS["bias"], np.array([0, 1], np.uint32)
    exported = jax.export.export(jax.jit(step), platforms=[platform])(*arguments)
    assert exported.platforms == (platform,)
    again = jax.export.deserialize(exported.serialize())
    if platform == "cpu":
        close(again.call(*arguments), jax.jit(step)(*arguments), 1e-5)


def test_export_of_ragged_for_tpu():
    q, k, v = (x[0] for x in qkv(1, 40, 40))
    f = jax.jit(lambda q, k, v, cu: jattn.ragged_attention(q, k, v, cu, is_causal=True))
    assert jax.export.export(f, platforms=["tpu"])(q, k, v, np.array([0, 13, 40], np.int32)).mlir_module()


def test_export_with_symbolic_batch():
    """Works, or is refused with a sentence of ours."""
    (b,) = jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((b, *x.shape[1:]), x.dtype) for x in (Q, KEY, V)]
    f = jax.jit(lambda q, k, v: jattn.attention(q, k, v, is_causal=True))
    try:
        exported = jax.export.export(f)(*shapes)
    except (TypeError, ValueError, NotImplementedError) as error:
        assert "symbolic" in str(error) or "static" in str(error)
    else:
        close(exported.call(Q, KEY, V), f(Q, KEY, V))


def works_or_refuses(run, want):
    """`run()` equals `want()`, or a sentence says what is not there."""
    try:
        got = run()
    except (NotImplementedError, TypeError) as error:
        text = str(error)
        assert any(w in text.lower() for w in ("forward-mode", "second derivative", "jvp", "reverse-mode")), text
        assert "attention" in text or "jattn" in text or "custom_vjp" in text
    else:
        close(got, want(), 1e-3)


def dense(q, k, v):
    """The textbook formula, which JAX can differentiate any number of times."""
    G = q.shape[2] // k.shape[2]
    score = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, G, 2)) * q.shape[-1] ** -0.5
    return jnp.einsum("bnts,bsnd->btnd", jax.nn.softmax(score), jnp.repeat(v, G, 2))


def test_forward_mode_works_or_is_refused_with_a_sentence():
    for f in (
        lambda f: jax.jvp(f, (Q, KEY, V), (Q, KEY, V))[1],
        lambda f: jax.jacfwd(lambda q: f(q, KEY, V)[0, 0, 0, 0])(Q),
    ):
        works_or_refuses(lambda f=f: f(jattn.attention), lambda f=f: f(dense))


def test_second_derivatives_work_or_are_refused_with_a_sentence():
    def penalty(f):
        grad = jax.grad(lambda q: f(q, KEY, V).sum())
        return jax.grad(lambda q: (grad(q) ** 2).sum())(Q)

    works_or_refuses(lambda: penalty(jattn.attention), lambda: penalty(dense))


def test_a_hessian_vector_product_works_or_is_refused_with_a_sentence():
    def product(f):
        return jax.jvp(jax.grad(lambda q: (f(q, KEY, V) ** 2).sum()), (Q,), (Q,))[1]

    works_or_refuses(lambda: product(jattn.attention), lambda: product(dense))


def test_gradient_of_a_function_that_uses_no_gradient():
    """stop_gradient, integers and unused outputs around it."""
    q = jax.grad(lambda q: jattn.attention(jax.lax.stop_gradient(q), KEY, V).sum() + q.sum())(Q)
    np.testing.assert_array_equal(q, np.ones_like(Q))
    got = jax.grad(lambda q, n: jattn.attention(q, KEY, V, key_value_seq_lengths=n).sum(), allow_int=True)(
        Q, np.full(B, 5, np.int32)
    )
    assert np.isfinite(got).all()


def test_donated_and_committed_arguments():
    f = jax.jit(lambda q, k, v: jattn.attention(q, k, v).astype(q.dtype), donate_argnums=0)
    device = NamedSharding(Mesh(np.array(jax.devices()[2:3]), ("x",)), P())
    placed = [jax.device_put(x, device) for x in (Q, KEY, V)]
    out = f(*placed)
    assert out.devices() == {jax.devices()[2]}
    close(out, jattn.attention(Q, KEY, V))


def test_x64_mode_int64_lengths_and_strict_promotion():
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        lengths = np.array([12, 7, 0], np.int64)
        kwargs = dict(is_causal=True, key_value_seq_lengths=lengths, query_offset=np.array([0, 1, 2], np.int64))
        out, lse = jattn.attention(Q, KEY, V, return_residual=True, **kwargs)
        assert out.dtype == lse.dtype == np.float32
        wide = [x.astype(np.float64) for x in (Q, KEY, V)]
        out64, lse64 = jattn.attention(*wide, return_residual=True, **kwargs)
        assert out64.dtype == lse64.dtype == np.float64
        close(out, out64)
        half = [x.astype(np.float16) for x in (Q, KEY, V)]
        out16, lse16 = jattn.attention(*half, return_residual=True, **kwargs)
        assert (out16.dtype, lse16.dtype) == (np.float16, np.float32)
