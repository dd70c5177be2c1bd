"""Online softmax on one score tile in registers: mask, running maximum and sum, rescaling of the accumulator.

State per query row: `m`, the reference of the exponentials in log2 units (−inf before the first visible key), `[64]` in
the ROW layout; `total`, the sum of weights in 8 partial sums, `[64, 8]`, which are added up once, at the end.

A thread has two rows, eight apart. With `half` the second one is nobody's and left out.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jattn.pallas._compat import arith, interpreting, ir, plgpu, scf
from jattn.pallas.hopper import ptx

LN2 = math.log(2)
LAZY_THRESHOLD = 8.0  # in log2 units: weights stay below 2^8 of the row's reference


def init_state(columns: int, sink=None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(m, total, accumulator [64, columns])` of rows that have seen no key, or only a sink (in log2 units)."""
    start, weight = (-jnp.inf, 0.0) if sink is None else (sink, jnp.where(sink == -jnp.inf, 0.0, 1 / 8))
    m = plgpu.layout_cast(jnp.full((ptx.TILE_ROWS,), start, jnp.float32), ptx.ROW)
    total = plgpu.layout_cast(jnp.full((ptx.TILE_ROWS, 8), weight, jnp.float32), ptx.WGMMA)
    accumulator = plgpu.layout_cast(jnp.zeros((ptx.TILE_ROWS, columns), jnp.float32), ptx.WGMMA)
    return m, total, accumulator


def mask_columns(s: jax.Array, low: jax.Array | None, high: jax.Array | None, *, half: bool = False) -> jax.Array:
    """Scores with −inf outside columns `[low, high)` of the tile; the bounds are int32, `[64]` a row or `[]` for all.

    The bound, less the thread's first column, is compared with a constant per register. A tile of column numbers would
    be hoisted out of the loop by the compiler, one register per element, and spill.
    """
    if low is None and high is None:
        return s
    if interpreting():
        column = jnp.arange(s.shape[1], dtype=jnp.int32)
        keep = jnp.ones(s.shape, bool)
        keep = keep if high is None else keep & (column < high.reshape(-1, 1))
        keep = keep if low is None else keep & (column >= low.reshape(-1, 1))
        return jnp.where(keep, s, -jnp.inf)
    bounds = [jnp.asarray(x, jnp.int32) for x in (low, high) if x is not None]  # 64 bits wide under x64

    layouts = [ptx.ROW if x.ndim else ptx.SCALAR for x in bounds]

    @plgpu.inline_mgpu(arg_types=(ptx.WGMMA, *layouts), return_type=ptx.array_type(s.shape[1]))
    def mask(_, s, *bounds):
        _, first_column = ptx.lane_position()
        bounds = [[x.registers[()]] * 2 if x.shape == () else ptx.scalars(x) for x in bounds]
        bounds = [[arith.subi(b, first_column) for b in rows] for rows in bounds]
        lows = bounds[0] if low is not None else None
        highs = bounds[-1] if high is not None else None
        masked, values = ptx.constant(-jnp.inf), ptx.scalars(s)
        for i, x in enumerate(values):
            if half and ptx.row_of(i):
                continue
            column = arith.constant(ir.IntegerType.get_signless(32), ptx.column_of(i))
            if highs is not None:
                x = arith.select(arith.cmpi(arith.CmpIPredicate.sgt, highs[ptx.row_of(i)], column), x, masked)
            if lows is not None:
                x = arith.select(arith.cmpi(arith.CmpIPredicate.sle, lows[ptx.row_of(i)], column), x, masked)
            values[i] = x
        return ptx.from_scalars(values)

    return mask(s, *bounds)


def online_softmax(
    s, m, total, factor: float, *, may_be_empty: bool, lazy: bool, signal_after: float = 0.0, half: bool = False
):
    """One step: `(p, m, total, alpha)` for scores `s [64, n]`, where weights are `p = 2^(factor·s − m)` and what was
    accumulated under the old `m` is to be multiplied by `alpha [64]`.

    Args:
        factor: positive; turns scores into log2 units.
        may_be_empty: whether a row may have no visible key up to and including this tile.
        signal_after: a fraction above 0 asks for a fifth result, an int32 0 that exists once that share of the
            exponentials does: what depends on it, and what may not move before that, comes no earlier.
        lazy: keep the old `m` until the maximum exceeds it by `LAZY_THRESHOLD`; alpha is then exactly 1.
    """
    assert not (half and signal_after)  # whose share counts all of a thread's values
    if interpreting():
        new = jnp.maximum(m, s.max(axis=1) * factor)
        new = jnp.where(new > m + LAZY_THRESHOLD, new, m) if lazy else new
        shift = jnp.where(new == -jnp.inf, 0.0, new)
        alpha = jnp.exp2(m - shift)
        p = jnp.exp2(s * factor - shift[:, None])
        results = p, new, total * alpha[:, None] + p.reshape(p.shape[0], -1, 8).sum(1), alpha
        return (*results, jnp.int32(0)) if signal_after else results
    columns = s.shape[1]

    @plgpu.inline_mgpu(
        arg_types=(ptx.WGMMA, ptx.ROW, ptx.WGMMA),
        return_type=(ptx.array_type(columns), ptx.row_type(), ptx.array_type(8), ptx.row_type())
        + ((ptx.scalar_type(),) if signal_after else ()),
    )
    def step(_, s, m, total):
        scores, old, sums, c = ptx.scalars(s), ptx.scalars(m), ptx.scalars(total), ptx.constant(factor)
        new, negated, alpha = [], [], []
        for row in range(1 if half else 2):
            top = ptx.mul(_row_maximum([x for i, x in enumerate(scores) if ptx.row_of(i) == row]), c)
            if lazy:
                grown = arith.cmpf(arith.CmpFPredicate.OGT, top, ptx.add(old[row], ptx.constant(LAZY_THRESHOLD)))
                new.append(arith.select(grown, top, old[row]))
            else:
                new.append(ptx.fmax(old[row], top))
            shift = arith.negf(new[row])
            if may_be_empty:
                empty = arith.cmpf(arith.CmpFPredicate.OEQ, new[row], ptx.constant(-jnp.inf))
                shift = arith.select(empty, ptx.constant(0.0), shift)
            negated.append(shift)
            alpha.append(ptx.ex2(ptx.add(old[row], shift)))
        if half:
            new, alpha = [new[0], old[1]], [alpha[0], ptx.constant(1.0)]
        mine = [i for i in range(len(scores)) if not (half and ptx.row_of(i))]
        p, signal = [ptx.constant(0.0)] * len(scores), None
        for i in mine:
            p[i] = ptx.ex2(ptx.fma(scores[i], c, negated[ptx.row_of(i)]))
        for i in mine:  # into the thread's four partial sums
            x = p[i]
            sums[i % 4] = ptx.fma(sums[i], alpha[ptx.row_of(i)], x) if i < 4 else ptx.add(sums[i % 4], x)
            if signal is None and i + 1 >= signal_after * len(p):
                negative = arith.cmpf(arith.CmpFPredicate.OLT, sums[i % 4], ptx.constant(-1.0))  # never
                signal = arith.extui(ir.IntegerType.get_signless(32), negative)
        results = (
            ptx.from_scalars(p), ptx.rows_from_scalars(new, m), ptx.from_scalars(sums), ptx.rows_from_scalars(alpha, m),
        )  # fmt: skip
        return (*results, ptx.scalar_array(signal)) if signal_after else results

    return step(s, m, total)


def log_sum(m: jax.Array, total: jax.Array) -> jax.Array:
    """Natural log of the sum of the weights `2^m · total`, `[64]` each in the ROW layout; −inf where total is 0.

    One instruction for one operation: what the compiler contracts depends on the code around it, and would show in the
    last bit of equal calls in different programs.
    """
    if interpreting():
        return jnp.where(total > 0, (m + jnp.log2(total)) * LN2, -jnp.inf)

    @plgpu.inline_mgpu(arg_types=(ptx.ROW, ptx.ROW), return_type=ptx.row_type())
    def compute(_, m, total):
        results = []
        for top, x in zip(ptx.scalars(m), ptx.scalars(total), strict=True):
            log = ptx.mul(ptx.add(top, ptx.lg2(x)), ptx.constant(LN2))
            empty = arith.cmpf(arith.CmpFPredicate.OLE, x, ptx.constant(0.0))
            results.append(arith.select(empty, ptx.constant(-jnp.inf), log))
        return ptx.rows_from_scalars(results, m)

    return compute(m, total)


def _row_maximum(values: list):
    """Over one row's registers in four independent chains, then over the four lanes that share the row."""
    chains = values[:4]
    for i, x in enumerate(values[4:]):
        chains[i % 4] = ptx.fmax(chains[i % 4], x)
    top = ptx.fmax(ptx.fmax(chains[0], chains[1]), ptx.fmax(chains[2], chains[3]))
    top = ptx.fmax(top, ptx.shfl_bfly(top, 1))
    return ptx.fmax(top, ptx.shfl_bfly(top, 2))


def rescale(accumulator: jax.Array, alpha: jax.Array, *, lazy: bool, half: bool = False) -> jax.Array:
    """`accumulator [64, n] · alpha [64]`. With `lazy`, a warp whose alphas are all 1 skips the multiplications."""
    if interpreting() or not (lazy or half):
        return accumulator * lax.broadcast_in_dim(alpha, accumulator.shape, [0])
    columns = accumulator.shape[1]

    @plgpu.inline_mgpu(arg_types=(ptx.WGMMA, ptx.ROW), return_type=ptx.array_type(columns))
    def scale(_, accumulator, alpha):
        values, factors = ptx.scalars(accumulator), ptx.scalars(alpha)

        def scaled():
            multiply = ptx.mul if lazy else arith.mulf  # which flushes nothing, as above
            mine = lambda i: not (half and ptx.row_of(i))  # noqa: E731
            return [multiply(x, factors[ptx.row_of(i)]) if mine(i) else x for i, x in enumerate(values)]

        if not lazy:
            return ptx.from_scalars(scaled())
        changed = [arith.cmpf(arith.CmpFPredicate.ONE, x, ptx.constant(1.0)) for x in factors]
        branch = scf.IfOp(
            ptx.vote_any(arith.ori(*changed)), results_=[ir.F32Type.get()] * len(values), has_else=True
        )
        with ir.InsertionPoint(branch.then_block):
            scf.yield_(scaled())
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(values)
        return ptx.from_scalars(list(branch.results))

    return scale(accumulator, alpha)
