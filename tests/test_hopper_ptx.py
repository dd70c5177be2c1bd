"""The instruction wrappers and what is built on their registers: in interpret mode, and on a GPU as instructions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import _philox
from jattn.pallas._compat import kernel, pl, plgpu
from jattn.pallas.hopper import dropout, memory, ptx, softmax

HOW = [pytest.param(True, id="interpreted"), pytest.param(False, id="gpu", marks=pytest.mark.gpu)]
BF16 = jnp.bfloat16


def normal(*shape, dtype=BF16, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def run(body, out_types, inputs, interpret, warpgroups=1, **scratch):
    launch = kernel(
        body, name="test", out_type=out_types, scratch=scratch, grid={"block": 1}, warpgroups=warpgroups,
        interpret=interpret, reduction_scratch_bytes=4096,
    )  # fmt: skip
    return jax.tree.map(lambda x: np.asarray(x, np.float64), launch(*inputs))


def slab_memory(rows, columns, dtype=BF16):
    return plgpu.SMEM((1, ptx.slabs(columns), rows, ptx.SLAB), dtype, transforms=ptx.TRANSFORMS)


def copy_in(array, smem, barrier, rows):
    for i in range(smem.shape[1]):
        plgpu.copy_gmem_to_smem(array.at[pl.ds(0, rows), slab(i)], smem.at[0, i], barrier)


def slab(i):
    """The start is traced: Pallas refuses a constant slice past the edge of the array."""
    return pl.ds(jnp.minimum(jax.lax.axis_index("block"), 0) + i * ptx.SLAB, ptx.SLAB)


def store(out, value):
    """A float32 array in the WGMMA layout to HBM."""
    out[...] = value


f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731


@pytest.mark.parametrize("interpret", HOW)
@pytest.mark.parametrize("width, n, dtype", [(64, 64, BF16), (40, 80, jnp.float16), (200, 176, BF16)])
def test_products(interpret, width, n, dtype):
    """`wgmma_ss`, then `wgmma_rs` of its result, as q·kᵀ and p·v; widths that fill a slab, do not, and need several."""
    q, k, v = (normal(rows, width, dtype=dtype, seed=i) for i, rows in enumerate((64, n, n)))

    def body(q, k, v, s_out, o_out, *, q_smem, k_smem, v_smem, barrier):
        for array, smem, rows in ((q, q_smem, 64), (k, k_smem, n), (v, v_smem, n)):
            copy_in(array, smem, barrier, rows)
        plgpu.barrier_wait(barrier)
        a, b = ptx.matrix(lambda i: q_smem.at[i], 64, width), ptx.matrix(lambda i: k_smem.at[i], n, width)
        c = ptx.matrix(lambda i: v_smem.at[i], n, width, along_rows=True)
        s = ptx.wgmma_ss(a.at(jnp.int32(0)), b.at(jnp.int32(0)), dtype)
        (s,) = ptx.wgmma_wait_group(0, s)
        store(s_out, s)
        o = plgpu.layout_cast(jnp.full((64, width), 0.5, jnp.float32), ptx.WGMMA)
        o = ptx.wgmma_rs(o, s.astype(dtype), c)
        (o,) = ptx.wgmma_wait_group(0, o)
        store(o_out, o)

    memory = {f"{name}_smem": slab_memory(rows, width, dtype) for name, rows in (("q", 64), ("k", n), ("v", n))}
    barrier = plgpu.Barrier(num_arrivals=3 * ptx.slabs(width))
    s, o = run(body, (f32(64, n), f32(64, width)), (q, k, v), interpret, **memory, barrier=barrier)
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    np.testing.assert_allclose(s, q @ k.T, atol=1e-4)
    np.testing.assert_allclose(o, 0.5 + np.asarray(jnp.asarray(s, dtype), np.float64) @ v, rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize("interpret", HOW)
@pytest.mark.parametrize("width", [64, 40, 136])
def test_stmatrix_and_zeroed_rows(interpret, width):
    """Registers to shared memory to HBM by TMA, with the rows from 50 on cleared in between."""
    x = normal(64, width)

    def body(x, out, *, smem, staged, barrier):
        copy_in(x, smem, barrier, 64)
        plgpu.barrier_wait(barrier)
        # Through the tensor core, to have it in registers in the WGMMA layout: x · 1.
        a = ptx.matrix(lambda i: smem.at[i], 64, width, along_rows=True)
        rows, columns = (plgpu.broadcasted_iota(jnp.int32, (64, 64), axis, layout=ptx.WGMMA) for axis in (0, 1))
        eye = jnp.where(rows == columns, 1.0, 0.0).astype(BF16)
        o = plgpu.layout_cast(jnp.zeros((64, width), jnp.float32), ptx.WGMMA)
        (o,) = ptx.wgmma_wait_group(0, ptx.wgmma_rs(o, eye, a))
        memory.stmatrix(o.astype(BF16), staged.at[0])
        plgpu.commit_smem()
        memory.st_shared_zero_rows(staged.at[0], jnp.int32(50))
        plgpu.commit_smem()
        for i in range(ptx.slabs(width)):
            plgpu.copy_smem_to_gmem(staged.at[0, i], out.at[:, slab(i)])
        plgpu.wait_smem_to_gmem(0)

    out = run(
        body, (jax.ShapeDtypeStruct((64, width), BF16),), (x,), interpret, smem=slab_memory(64, width),
        staged=slab_memory(64, width), barrier=plgpu.Barrier(num_arrivals=ptx.slabs(width)),
    )[0]  # fmt: skip
    np.testing.assert_array_equal(out, np.where(np.arange(64)[:, None] < 50, np.asarray(x, np.float64), 0))


@pytest.mark.parametrize("interpret", HOW)
@pytest.mark.parametrize("shape", [(2, 3, 70, 41), (1, 3, 1, 41), (2, 1, 70, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("dtype", [jnp.float32, BF16, jnp.int8])
def test_ld_global(interpret, shape, dtype):
    """The tile at row 20, column 30 of batch row 1, head 2; what is past the edges repeats the edge."""
    x = (8 * normal(*shape, dtype=jnp.float32)).astype(dtype)
    kind = jnp.int32 if dtype == jnp.int8 else jnp.float32

    def body(x, out):
        store(out, memory.ld_global(x, jnp.int32(1), jnp.int32(2), jnp.int32(20), jnp.int32(30), 16))

    out = run(body, (jax.ShapeDtypeStruct((64, 16), kind),), (x,), interpret)[0]
    plane = np.asarray(x, np.float64)[min(1, shape[0] - 1), min(2, shape[1] - 1)]
    rows, columns = np.minimum(20 + np.arange(64), shape[2] - 1), np.minimum(30 + np.arange(16), shape[3] - 1)
    np.testing.assert_array_equal(out, plane[rows[:, None], columns])


@pytest.mark.parametrize("interpret", HOW)
def test_ld_global_by_diagonal_and_at_places(interpret):
    table, picks = normal(1, 2, 90, dtype=jnp.float32), jnp.arange(2 * 7 * 5, dtype=jnp.int8).reshape(1, 2, 7, 5)

    def body(table, picks, out, chosen):
        place = [jnp.int32(i) for i in (0, 1, 3, 8)]
        store(out, memory.ld_global(table, *place, 8, diagonal_origin=60))
        rows, columns = (plgpu.broadcasted_iota(jnp.int32, (64, 8), axis, layout=ptx.WGMMA) for axis in (0, 1))
        store(chosen, memory.ld_global_at(picks, jnp.int32(0), jnp.int32(1), rows >> 3, columns - 1))

    types = f32(64, 8), jax.ShapeDtypeStruct((64, 8), jnp.int32)
    out, chosen = run(body, types, (table, picks), interpret)
    rows, columns = np.arange(64)[:, None], np.arange(8)
    np.testing.assert_array_equal(out, np.asarray(table, np.float64)[0, 1][np.clip(columns + 8 - rows - 3 + 60, 0, 89)])
    np.testing.assert_array_equal(chosen, np.asarray(picks)[0, 1][np.clip(rows >> 3, 0, 6), np.clip(columns - 1, 0, 4)])


@pytest.mark.parametrize("interpret", HOW)
@pytest.mark.parametrize("lazy", [False, True])
def test_online_softmax(interpret, lazy):
    """Two tiles, the first masked whole for some rows: state and weights against float64."""
    x = 3 * normal(64, 64, dtype=jnp.float32)
    high = np.array([0, 5, 32, 40])[np.arange(64) % 4]

    def body(x, p_out, state_out):
        columns = plgpu.broadcasted_iota(jnp.int32, (64, 32), 1, layout=ptx.WGMMA)
        rows = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=ptx.ROW)
        limit = jnp.where(rows % 4 == 0, 0, jnp.where(rows % 4 == 1, 5, jnp.where(rows % 4 == 2, 32, 40)))
        m, total, o = softmax.init_state(8)
        o = o + 1.0
        for half in range(2):
            s = plgpu.load(x.at[:, pl.ds(32 * half, 32)], layout=ptx.WGMMA, optimized=False)
            s = softmax.mask_columns(s + 0.0 * columns.astype(jnp.float32), None, limit - 32 * half)
            p, m, total, alpha = softmax.online_softmax(s, m, total, 1.5, may_be_empty=True, lazy=lazy)
            if half:
                o = softmax.rescale(o, alpha, lazy=lazy)
        store(p_out, p)
        total = jax.lax.broadcast_in_dim(total.sum(axis=1), (64, 8), [0])
        reference = jax.lax.broadcast_in_dim(m, (64, 8), [0])
        index = plgpu.broadcasted_iota(jnp.int32, (64, 8), 1, layout=ptx.WGMMA)
        store(state_out, jnp.where(index == 0, total, jnp.where(index == 1, reference, o)))

    p, state = run(body, (f32(64, 32), f32(64, 8)), (x,), interpret)
    s = np.where(np.arange(64) < high[:, None], 1.5 * np.asarray(x, np.float64), -np.inf)
    total, m = state[:, 0], state[:, 1]
    seen = high > 0
    assert (total[~seen] == 0).all() and np.isneginf(m[~seen]).all() and (p[~seen] == 0).all()
    np.testing.assert_allclose(total[seen] * 2 ** m[seen], np.exp2(s[seen]).sum(1), rtol=1e-5)
    np.testing.assert_allclose(p[seen], np.exp2(s[seen, 32:] - m[seen, None]), rtol=1e-5, atol=1e-30)
    first = np.max(s[:, :32], axis=1, initial=-np.inf)
    with np.errstate(invalid="ignore"):
        moved = np.where(lazy & (s.max(1) <= first + softmax.LAZY_THRESHOLD), first, s.max(1))
        want = np.where(np.isneginf(first), 0, np.exp2(first - moved))
    np.testing.assert_allclose(state[seen, 2], want[seen], rtol=1e-5)


@pytest.mark.parametrize("interpret", HOW)
@pytest.mark.parametrize("position, aligned", [(32, True), (32, False), (-5, False)])
def test_dropout_bits(interpret, position, aligned):
    key = jnp.array([3, -7], jnp.int32)

    def body(key, out):
        ones = plgpu.layout_cast(jnp.ones((64, 32), jnp.float32), ptx.WGMMA)
        where = (jnp.int32(x) for x in (2, 5, position, 48))
        store(out, dropout.drop(ones, (key[0], key[1]), *where, 30000, aligned=aligned))

    out = run(body, (f32(64, 32),), (key,), interpret)[0]
    keep = _philox.keep_mask(
        key.astype(jnp.uint32), jnp.array([2]), jnp.array([5]), jnp.int32(position), 64, jnp.int32(48), 32, 30000
    )  # fmt: skip
    np.testing.assert_array_equal(out, np.asarray(keep)[0, 0])


@pytest.mark.parametrize("interpret", HOW)
def test_named_barriers_hand_over(interpret):
    """Two warpgroups pass one cell back and forth."""

    def body(out, *, cell, turn):
        me = jax.lax.axis_index("warpgroup")

        @pl.when(me == 0)
        def _():
            cell[...] = jnp.zeros((128,), jnp.float32)

        pl.when(me == 1)(lambda: turn.bar_arrive(0))
        for _ in range(3):
            turn.bar_sync(me)
            cell[...] = cell[...] * 2.0 + jnp.where(me == 0, 1.0, 0.0)
            plgpu.commit_smem()
            turn.bar_arrive(1 - me)

        @pl.when(me == 0)
        def _():
            turn.bar_sync(0)
            plgpu.copy_smem_to_gmem(cell, out)
            plgpu.wait_smem_to_gmem(0)

    turn = ptx.NamedBarriers(first=5, count=2, arrivals=1)
    out = run(body, (f32(128),), (), interpret, warpgroups=2, cell=plgpu.SMEM((128,), jnp.float32), turn=turn)[0]
    assert (out == 42).all()  # 0 → 1, 2 → 5, 10 → 21, 42


def test_named_barriers_stay_clear_of_the_others():
    with pytest.raises(ValueError, match="5 to 15"):
        ptx.NamedBarriers(first=4, count=1, arrivals=1)
    with pytest.raises(ValueError, match="5 to 15"):
        ptx.NamedBarriers(first=12, count=5, arrivals=1)
