"""`jattn.debug`: data faults become errors that name the argument and the value, eagerly and under jit."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jattn
from jattn import debug, masks

B, T, S, N, H = 2, 4, 6, 2, 8


def operands(seed=0, packed=False):
    rng = np.random.default_rng(seed)
    shapes = [(T, N, H), (S, N, H), (S, N, H)]
    return [jnp.asarray(rng.standard_normal(s if packed else (B, *s)), jnp.float32) for s in shapes]


def ints(*values):
    return jnp.array(values, jnp.int32)


def spoil(x, *index, value=jnp.nan):
    return x.at[index].set(value)


def faults(function, *args, words):
    """`function` reports `words`, eagerly and under jit."""
    faults_now(function, *args, words=words)
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(words)):
        jax.block_until_ready(jax.jit(function)(*args))


def faults_now(function, *args, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        function(*args)


def passes(function, *args):
    jax.block_until_ready(jax.jit(function)(*args))
    jax.effects_barrier()
    return function(*args)


# Single checks


@pytest.mark.parametrize("lengths", [ints(0, 6), jnp.zeros((0,), jnp.int32), ints(3)[0]])
def test_lengths_in_range_pass(lengths):
    passes(lambda n: debug.check_lengths(n, 6), lengths)


def test_lengths_out_of_range():
    faults(lambda n: debug.check_lengths(n, 6, "key lengths"), ints(0, 7), words="key lengths[1]=7 must be in [0, 6]")
    faults(lambda n: debug.check_lengths(n, 6), ints(-1)[0], words="lengths=-1 must be in [0, 6]")
    faults(debug.check_lengths, ints(3, 3), ints(3, 2), words="lengths[1]=3 must be in [0, 2]")


def test_lengths_given_as_a_number():
    debug.check_lengths(6, 6)
    with pytest.raises(ValueError, match=r"lengths=7 must be in \[0, 6\]"):
        debug.check_lengths(7, 6)


def test_offsets_in_order_pass():
    passes(lambda c, used: debug.check_cu_seqlens(c, 6, used), ints(0, 2, 2, 5), ints(2, 0, 1))
    passes(lambda c: debug.check_cu_seqlens(c, 6), ints(0))


@pytest.mark.parametrize(
    "cu_seqlens, used, words",
    [
        ((1, 2), None, "cu_seqlens[0]=1 must be 0"),
        ((0, 4, 3), None, "cu_seqlens must not decrease, but [1]=4 and [2]=3"),
        ((0, 4, 7), None, "cu_seqlens[-1]=7 must be at most the 6 rows there are"),
        ((0, 4, 6), (4, 3), "used lengths of cu_seqlens[1]=3 must be in [0, 2]"),
        ((0, 4, 6), (-1, 0), "used lengths of cu_seqlens[0]=-1 must be in [0, 4]"),
    ],
)
def test_offsets_out_of_order(cu_seqlens, used, words):
    if used is None:
        faults(lambda c: debug.check_cu_seqlens(c, 6), ints(*cu_seqlens), words=words)
    else:
        faults(lambda c, u: debug.check_cu_seqlens(c, 6, u), ints(*cu_seqlens), ints(*used), words=words)


@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_not_finite(value):
    x = jnp.zeros((2, 3, 4))
    passes(debug.check_finite, x)
    words = "bias has NaN or Inf, first at bias[1, 2, ...]"
    faults(lambda x: debug.check_finite(x, "bias"), spoil(x, 1, 2, 0, value=value), words=words)


def test_parents():
    passes(debug.check_parents, ints(-1, 0, 0, -1))
    faults(debug.check_parents, ints(-1, 0, 2), words="parents[2]=2 must be in [-1, 1]")
    faults(debug.check_parents, jnp.stack([ints(-1, 0), ints(-1, -2)]), words="parents[1, 1]=-2 must be in [-1, 0]")


# Checked ops


def attend(*args, **options):
    return lambda: debug.checked(jattn.attention)(*args, **options)


def attend_packed(*args, **options):
    return lambda: debug.checked(jattn.ragged_attention)(*args, **options)


def test_a_good_call_is_the_op_bit_for_bit():
    q, k, v = operands()
    options = dict(key_value_seq_lengths=ints(6, 3), query_seq_lengths=ints(4, 0), mask=masks.lengths(ints(5, 6)))
    got = passes(attend(q, k, v, return_residual=True, **options))
    jax.tree.map(np.testing.assert_array_equal, got, jattn.attention(q, k, v, return_residual=True, **options))


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(key_value_seq_lengths=ints(2, 7)), "key_value_seq_lengths[1]=7 must be in [0, 6]"),
        (dict(key_value_seq_lengths=jnp.int32(7)), "key_value_seq_lengths=7 must be in [0, 6]"),
        (dict(query_seq_lengths=ints(-1, 3)), "query_seq_lengths[0]=-1 must be in [0, 4]"),
        (dict(mask=masks.causal() & masks.lengths(ints(2, 9))), "key lengths in mask[1]=9 must be in [0, 6]"),
    ],
)
def test_attention_with_wrong_lengths(options, words):
    faults_now(attend(*operands(), **options), words=words)


@pytest.mark.parametrize("name, place", [("query", 0), ("key", 1), ("value", 2)])
def test_attention_with_operands_that_are_not_finite(name, place):
    arrays = operands()
    arrays[place] = spoil(arrays[place], 1, 3, 0, 5)
    faults_now(attend(*arrays), words=f"{name} has NaN or Inf, first at {name}[1, 3, 0, ...]")


def test_attention_may_hold_anything_where_nothing_is():
    q, k, v = operands()
    q, k, v = spoil(q, 1, 3), spoil(k, 0, slice(4, None), value=jnp.inf), spoil(v, 1, 5)
    lengths = dict(query_seq_lengths=ints(4, 3))
    passes(attend(q, k, v, key_value_seq_lengths=ints(4, 5), **lengths))
    attend(q, k, v, mask=masks.lengths(ints(4, 5)), **lengths)()
    attend(q, k, v, mask=masks.lengths(4), key_value_seq_lengths=5, **lengths)()


def test_attention_over_several_batch_axes():
    q, k, v = (x[:, None] for x in operands())
    k = spoil(k, 1, 0, 4)
    attend(q, k, v, key_value_seq_lengths=jnp.array([[6], [4]], jnp.int32))()
    faults_now(attend(q, k, v), words="key has NaN or Inf, first at key[1, 0, 4, 0, ...]")


def test_attention_whose_result_is_not_finite():
    q, k, v = operands()
    bias = spoil(jnp.zeros((T, S)), 2, 1)
    faults_now(attend(q, k, v, bias), words="the output of attention has NaN or Inf, first at [0, 2, 0]")
    attend(q, k, v, spoil(bias, 2, 1, value=-jnp.inf))()
    sinks = jnp.array([0, jnp.inf])
    faults_now(attend(q, k, v, sinks=sinks, return_residual=True), words="of attention has NaN or")


def test_wrong_arguments_are_reported_as_ever():
    q, k, v = operands()
    with pytest.raises(ValueError, match="key head dim H=7 must equal query's H=8"):
        attend(q, k[..., :7], v, key_value_seq_lengths=99)()
    for lengths in (7, [6, 7], np.array([6, 7])):
        with pytest.raises(ValueError, match="key_value_seq_lengths=.*7.* must be <= 6"):
            attend(q, k, v, key_value_seq_lengths=lengths)()
    with pytest.raises(TypeError, match="checked takes jattn.attention or jattn.ragged_attention"):
        debug.checked(jattn.merge)


def test_packed_calls_may_have_holes_and_a_tail():
    q, k, v = operands(packed=True)
    k, v = spoil(k, 1), spoil(v, 5)
    q = spoil(q, 3)
    used = dict(query_seq_lengths=ints(2, 1), key_value_seq_lengths=ints(1, 3))
    passes(attend_packed(q, k, v, ints(0, 2, 4), ints(0, 2, 5), **used))
    attend_packed(*operands(packed=True), ints(0, 0, 4), ints(0, 4, 6), mask=masks.lengths(ints(0, 2)))()


@pytest.mark.parametrize(
    "offsets, options, words",
    [
        (((0, 5),), {}, "cu_seqlens_q[-1]=5 must be at most the 4 rows there are"),
        (((0, 4), (1, 6)), {}, "cu_seqlens_k[0]=1 must be 0"),
        (((0, 4), (0, 6)), dict(query_seq_lengths=ints(5)), "query_seq_lengths[0]=5 must be in [0, 4]"),
        (((0, 4), (0, 6)), dict(key_value_seq_lengths=jnp.int32(7)), "key_value_seq_lengths[0]=7 must be in [0, 6]"),
        (((0, 4), (0, 6)), dict(mask=masks.lengths(ints(7))), "key lengths in mask[0]=7 must be in [0, 6]"),
    ],
)
def test_packed_calls_with_wrong_offsets(offsets, options, words):
    q, k, v = operands(packed=True)
    if len(offsets) == 1:
        k, v = k[:T], v[:T]
    faults_now(attend_packed(q, k, v, *(ints(*o) for o in offsets), **options), words=words)


@pytest.mark.parametrize("name, place", [("query", 0), ("key", 1), ("value", 2)])
def test_packed_calls_with_operands_that_are_not_finite(name, place):
    arrays = operands(packed=True)
    arrays[place] = spoil(arrays[place], 3, 1)
    words = f"{name} has NaN or Inf, first at {name}[3, 1, ...]"
    faults_now(attend_packed(*arrays, ints(0, 1, 4), ints(0, 2, 6)), words=words)


# Transformations

LENGTHS = ints(6, 7)
WORDS = r"key_value_seq_lengths(\[1\])?=7 must be in \[0, 6\]"


def total(q, k, v, lengths):
    return debug.checked(jattn.attention)(q, k, v, key_value_seq_lengths=lengths).sum()


@pytest.mark.parametrize(
    "transformed",
    [
        lambda *x: jax.grad(total)(*x),
        lambda *x: jax.grad(jax.checkpoint(total))(*x),
        lambda *x: jax.vmap(total)(*x),
        lambda *x: jax.lax.scan(lambda c, xs: (c, total(*xs)), 0, x)[1],
    ],
    ids=["grad", "checkpoint", "vmap", "scan"],
)
def test_transformations(transformed):
    program = jax.jit(transformed)
    jax.block_until_ready(program(*operands(), ints(6, 5)))
    with pytest.raises(jax.errors.JaxRuntimeError, match=WORDS):
        jax.block_until_ready(program(*operands(), LENGTHS))


@pytest.mark.parametrize("axis_type", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_sharded_over_the_batch(axis_type):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        *arrays, good, bad = (
            jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))) for x in (*operands(), ints(6, 5), LENGTHS)
        )
        program = jax.jit(debug.checked(jattn.attention))
        with pytest.raises(jax.errors.JaxRuntimeError, match=WORDS):
            jax.block_until_ready(program(*arrays, key_value_seq_lengths=bad))
        jax.block_until_ready(program(*arrays, key_value_seq_lengths=good))
    jax.effects_barrier()


def test_inside_shard_map_a_check_sees_its_shard():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=(spec,) * 4, out_specs=spec)
    def program(q, k, v, lengths):
        return debug.checked(jattn.attention)(q, k, v, key_value_seq_lengths=lengths)

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"key_value_seq_lengths\[0\]=7"):
        jax.block_until_ready(program(*operands(), LENGTHS))
    jax.block_until_ready(program(*operands(), ints(6, 5)))
    jax.effects_barrier()


def test_int64_lengths():
    with jax.enable_x64(True):
        q, k, v = operands()
        attend(q, k, v, key_value_seq_lengths=jnp.array([6, 5]), mask=masks.lengths(ints(4, 4)))()
        faults_now(attend(q, k, v, key_value_seq_lengths=jnp.array([6, 7])), words="key_value_seq_lengths[1]=7")
