"""The kernel refuses what it may refuse, with the reason, and every primitive that it accepts compiles in it."""

import re
import subprocess
import sys

import aot
import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jattn
from jattn import _dispatch, masks, mods
from jattn._callables import Callable
from jattn._mask import Mask, mask_class
from jattn.attention import prepare
from jattn.pallas import attention as mosaic
from jattn.pallas import primitives

Q = jnp.zeros((1, 32, 2, 64), jnp.bfloat16)
PERMITTED = [
    r"needs a GPU of compute capability 9\.0, and the default backend is cpu",
    r"needs compute capability 9\.0, not [\d.]+",
    r"runs bfloat16 and float16, not float(32|64)",
    r"head dims must be multiples of 8 up to 256, not [HD]=\d+",
    r"a predicate or modifier uses primitives that the kernel cannot compute: (\w+\([\w<> ]*\)(, )?)+",
]


def reason(query=Q, **options):
    return mosaic.why_not(prepare(query, query, query, **options).problem)


def permitted(text):
    return any(re.fullmatch(pattern, text) for pattern in PERMITTED)


def test_the_case_table_is_refused_for_dtype_and_head_dim_alone():
    """As within jit, which compiles nothing to look at a call; every tenth with arrays that are there as well."""

    def why_not(kwargs):
        return mosaic.why_not(prepare(**kwargs).problem)

    def traced(kwargs):
        found = []
        jax.eval_shape(lambda: found.append(why_not(kwargs)))
        return found[0]

    for i, case in enumerate(cases.CASES):
        kwargs = cases.arguments(case, cases.make_inputs(case))
        kwargs.pop("return_residual")
        *_, width = kwargs["query"].shape
        widths = width, kwargs["value"].shape[-1]
        refused = case.dtype not in ("bfloat16", "float16") or any(n % 8 or n > 256 for n in widths)
        for look in (traced, why_not)[: 1 if i % 10 else 2]:
            found = look(kwargs)
            assert permitted(found) if refused else found is None, (case, found)


@pytest.mark.parametrize("H, word", [(264, "H=264"), (20, "H=20")])
def test_head_dims(H, word):
    found = reason(jnp.zeros((1, 4, 2, H), jnp.bfloat16))
    assert permitted(found) and word in found


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_dtypes(dtype):
    with jax.enable_x64(True):
        found = reason(Q.astype(dtype))
    assert permitted(found) and jnp.dtype(dtype).name in found


UNKNOWN = {
    "floor(float32)": lambda x, b, n, t, s: jnp.floor(x),
    "erfc(float32)": lambda x, b, n, t, s: jax.nn.gelu(x, approximate=False),
    "pow(float32)": lambda x, b, n, t, s: x**0.3,
    "while()": lambda x, b, n, t, s: lax.fori_loop(0, t, lambda i, x: x * 0.5, x),
    "random_seed(int32)": lambda x, b, n, t, s: x + jax.random.uniform(jax.random.key(np.int32(0)), dtype=jnp.float32),
    "add(int8)": lambda x, b, n, t, s: x + (t.astype(jnp.int8) + s.astype(jnp.int8)).astype(jnp.float32),
}


@pytest.mark.parametrize("primitive", UNKNOWN)
def test_a_primitive_is_named(primitive):
    found = reason(score_mod=UNKNOWN[primitive])
    assert permitted(found) and primitive in found


def test_a_modifier_without_a_derivative_is_refused_by_the_backward_alone():
    loop = lambda x, b, n, t, s: lax.fori_loop(0, t, lambda i, x: x * 0.5, x)  # noqa: E731
    assert "vjp(float32)" in mosaic.why_not_backward(prepare(Q, Q, Q, score_mod=mods.score_mod(loop)).problem)


def test_a_primitive_of_a_predicate_deep_in_a_mask_is_named():
    rule = masks.predicate(lambda b, n, t, s: lax.population_count(t ^ s) < 3)
    assert "population_count(int32)" in reason(mask=masks.causal() & ~(rule | masks.window(3)))


def test_a_mask_of_a_kind_that_nobody_lowered_is_refused():
    @mask_class
    class Diagonal(Mask):
        def __repr__(self):
            return "diagonal"

    assert "masks of kind Diagonal" in reason(mask=masks.causal() & ~Diagonal())


def test_sizes_known_at_run_time_alone_are_refused():
    (b,) = jax.export.symbolic_shape("b")
    query = jax.ShapeDtypeStruct((b, 32, 2, 64), jnp.bfloat16)
    assert "static shapes" in jattn.explain(query, query, query).refused["mosaic"]


# --- machines ---------------------------------------------------------------------------------------------------------


def test_explain_says_what_a_machine_without_a_gpu_lacks():
    told = jattn.explain(Q, Q, Q)
    assert told.implementation == "xla" and permitted(told.refused["mosaic"])
    assert jattn.explain(Q, Q, Q, implementation="mosaic").implementation is None


def test_another_gpu_is_refused_with_its_capability(monkeypatch):
    class Card:
        compute_capability = "8.0"

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Card])
    told = jattn.explain(Q, Q, Q)
    assert told.implementation == "xla" and permitted(told.refused["mosaic"]) and "8.0" in told.refused["mosaic"]
    with pytest.raises(NotImplementedError, match="mosaic: needs compute capability 9.0, not 8.0"):
        jattn.attention(Q, Q, Q, implementation="mosaic")


def test_a_kernel_that_cannot_be_imported_is_a_reason(monkeypatch):
    monkeypatch.setitem(_dispatch._TABLE["attention"], "mosaic", "jattn.pallas.of_tomorrow")
    told = jattn.explain(Q, Q, Q)
    assert told.implementation == "xla" and f"cannot be imported with jax {jax.__version__}" in told.refused["mosaic"]
    assert jattn.attention(Q, Q, Q).shape == Q.shape
    with pytest.raises(NotImplementedError, match="of_tomorrow"):
        jattn.attention(Q, Q, Q, implementation="mosaic")


def test_a_jax_without_mosaic():
    code = """import sys
sys.modules["jax.experimental.pallas.mosaic_gpu"] = None
import jattn, jax.numpy as jnp
q = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
print(jattn.attention(q, q, q).shape, jattn.explain(q, q, q).refused["mosaic"])"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert found.stdout.startswith("(1, 4, 2, 8) cannot be imported"), found


# --- primitives -------------------------------------------------------------------------------------------------------


def floats(*names):
    return {name: lambda x, y, t, s, name=name: getattr(lax, name)(x, y) for name in names}


def unary(*names):
    return {name: lambda x, y, t, s, name=name: getattr(lax, name)(x) for name in names}


def integers(*names):
    return {f"{name} int": lambda x, y, t, s, name=name: getattr(lax, name)(t, s + 1) for name in names}


def unary_integers(*names):
    return {f"{name} int": lambda x, y, t, s, name=name: getattr(lax, name)(t - s) for name in names}


def compared(*names):
    both = {}
    for name in names:
        f = getattr(lax, name)
        both[f"{name} float"] = lambda x, y, t, s, f=f: f(x, y)
        both[f"{name} int"] = lambda x, y, t, s, f=f: f(t, s)
    return both


def conversion(name, through, back):
    return {f"{name} to {through}": lambda x, y, t, s: {"x": x, "t": t}[name].astype(through).astype(back)}


def mixed(t, s):
    h = ((t * jnp.uint32(2654435761)) ^ (s + jnp.uint32(40503))) - ((t << jnp.uint32(3)) | (s & jnp.uint32(15)))
    same = (h == jnp.uint32(7)) | (t != s)
    return jnp.where(same, h >> jnp.uint32(28), t >> jnp.uint32(1)).astype(jnp.int32)


#: What each accepted primitive computes, from floats x and y > 0 and integers t and s >= 0.
EXAMPLES = {
    **floats("add", "sub", "mul", "div", "max", "min"),
    **unary("neg", "sign", "abs", "square", "exp", "exp2", "sin", "cos", "tanh", "logistic", "round", "stop_gradient"),
    "log, sqrt, rsqrt": lambda x, y, t, s: lax.log(y) + lax.sqrt(y) + lax.rsqrt(y),
    **integers("add", "sub", "mul", "div", "max", "min", "rem", "bitwise_and", "bitwise_or", "bitwise_xor"),
    **unary_integers("neg", "sign", "abs", "square", "bitwise_not", "clz", "stop_gradient"),
    "shifts": lambda x, y, t, s: (t << 3) + ((t - s) >> 1) + lax.shift_right_logical(t - s, jnp.int32(20)),
    "a hash": lambda x, y, t, s: mixed(t.astype(jnp.uint32), s.astype(jnp.uint32)),
    "clamp": lambda x, y, t, s: lax.clamp(-y, x, y) + lax.clamp(jnp.int32(1), t, jnp.int32(50)).astype(jnp.float32),
    "powers": lambda x, y, t, s: x**3 + y**-2 + ((t % 5) ** 3).astype(jnp.float32),
    **compared("eq", "ne", "lt", "le", "gt", "ge"),
    "booleans": lambda x, y, t, s: (((t > s) & (x > 0)) | ~(t > 7)) ^ ((s > 3) == (x > 1)) ^ ((s > 5) != (x > 2)),
    "select": lambda x, y, t, s: jnp.where(t > s, x, y) + jnp.where(t > s, t, s).astype(jnp.float32),
    "select numbers": lambda x, y, t, s: jnp.where(t > s, jnp.int32(1), jnp.int32(3)).astype(jnp.float32),
    "select bool": lambda x, y, t, s: jnp.where(t > s, t > 3, s > 5),
    "stop_gradient of bool": lambda x, y, t, s: lax.stop_gradient(t > s),
    "bits": lambda x, y, t, s: (lax.bitcast_convert_type(x, jnp.int32) & 255) + (t > s).astype(jnp.int32),
    "bits of int": lambda x, y, t, s: lax.bitcast_convert_type((t % 8) + 0x3F800000, jnp.float32),
    **conversion("x", jnp.int32, jnp.float32), **conversion("x", jnp.bfloat16, jnp.float32),
    **conversion("x", jnp.float16, jnp.float32), **conversion("t", jnp.uint32, jnp.int32),
    **conversion("x", jnp.bool_, jnp.float32), **conversion("t", jnp.bool_, jnp.int32),
    "is_finite": lambda x, y, t, s: jnp.isfinite(x / (t % 2).astype(jnp.float32)),
    "functions of jax.nn": lambda x, y, t, s: jax.nn.relu(x) + jax.nn.silu(x) + jax.nn.gelu(x),
    "a branch": lambda x, y, t, s: lax.cond(t > s, lambda: x, lambda: 2 * y),
    "python's remainder": lambda x, y, t, s: (t - s) % 3 + (t - s) // 3,
}  # fmt: skip
GROUPS = [list(EXAMPLES)[i::4] for i in range(4)]


def modifier(names):
    """A modifier that computes these examples and lets each of them count."""
    functions = tuple(EXAMPLES[name] for name in names)

    def modify(x, b, n, t, s):
        total = x
        for function in functions:
            value = function(x, jnp.abs(x) + 0.5, t, s)
            value = (value.astype(jnp.int32) if value.dtype == jnp.bool_ else value).astype(jnp.float32)
            total = total + lax.clamp(jnp.float32(-2), value * 0.1, jnp.float32(2))
        return total

    return modify


def operations(names):
    function, dtypes = Callable(modifier(names), "", 5), [jnp.float32, *[jnp.int32] * 4]
    return function.operations(dtypes) | function.operations(dtypes, slope=True)


def test_the_examples_use_every_primitive_of_the_list():
    """But those that change nothing, as conversions of arrays do that the kernel has read as 32 bits."""
    used = frozenset().union(*map(operations, GROUPS))
    same = re.compile(r"copy .*|convert_element_type ((\w+) \2|.*64 .*|u?int(8|16) .*)|custom_vjp_call")
    assert not used - primitives.KNOWN
    assert [name for name in primitives.KNOWN - used if not same.fullmatch(name)] == []


@pytest.mark.parametrize("group", range(4))
def test_what_is_written_in_terms_of_other_primitives_is_the_same(group):
    """The kernel's way to compute a function on a tile, beside JAX's own."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((8, 16)) * 2, jnp.float32)
    t, s = (lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (0, 1))
    mapped = jax.vmap(jax.vmap(modifier(GROUPS[group])))
    jaxpr = jax.make_jaxpr(mapped)(x, t, t, t, s)
    (got,) = primitives.evaluate(jaxpr.jaxpr, jaxpr.consts, x, t, t, t, s)
    np.testing.assert_allclose(got, mapped(x, t, t, t, s), rtol=1e-6)


@pytest.mark.aot
@pytest.mark.parametrize("group", range(4))
def test_every_primitive_compiles_in_the_kernel(group):
    def attend(q, k, v):
        return jattn.attention(q, k, v, score_mod=modifier(GROUPS[group]), implementation="mosaic")

    assert aot.compile_for_h200(attend, Q, Q, Q).registers


@pytest.mark.gpu
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_primitive_is_computed_right(name):
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in cases.qkv(B=1, T=100, S=200, N=2, K=1, H=64))
    got, want = (
        jattn.attention(q, k, v, score_mod=modifier([name]), return_residual=True, implementation=implementation)
        for implementation in ("mosaic", "xla")
    )
    np.testing.assert_allclose(got[1], want[1], atol=2e-3)
    np.testing.assert_allclose(got[0].astype(jnp.float32), want[0].astype(jnp.float32), atol=2e-2)
