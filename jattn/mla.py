"""Multi-head latent attention (MLA): one latent row a token, which all heads read, in the place of keys and values.

    token x -> residual a = norm(x W_DQ), queries a W_UQ = [nope | rope], latent c = norm(x W_DKV), one rope key for all
    expanded   keys [c W_UK | rope key], values c W_UV, for every head          `mla_prefill`
    absorbed   queries [nope W_UK | rope] against rows [c | rope key], one key head; values are
               the first channels of the rows, and W_UV comes after             `mla_absorbed`, `mla_decode`

Both are one function of x. Expanded costs less a pair of tokens; absorbed reads one row a token whatever the number of
heads, and is what `sparse_attention` takes. The scale is always that of the expanded form.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jattn import _check, _formats
from jattn._call import int32, only_xla, positive
from jattn._project import fits, normal, product, rms_norm, rotated
from jattn._tile import Shape
from jattn._varying import vary, varying_axes
from jattn.attention import attention
from jattn.indexer import token_positions, tokens
from jattn.paged import PagedCache, _in_auto_mode, assemble, checked
from jattn.reference import mla as _xla
from jattn.reference import paged as _paged

__all__ = [
    "MLAInputs", "MLAWeights", "mla_absorbed", "mla_decode", "mla_output", "mla_prefill", "mla_preprocess",
    "mla_values", "pack_latent", "unpack_latent",
]  # fmt: skip

_FLOATS = ("bfloat16", "float16", "float32", "float64")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MLAWeights:
    """The weights of one layer, a pytree. Width M, N heads, latent C, rope R, query latent Q, key H, value D a head.

    query_down: `[M, Q]`, query_norm: `[Q]`, query_up: `[Q, N, H + R]`, nope before rope. Without a query latent the
    first two are None and query_up is `[M, N, H + R]`.
    latent_down: `[M, C + R]`, latent_norm: `[C]`, key_up: `[C, N, H]`, value_up: `[C, N, D]`, out: `[N, D, M]`.
    gate: `[M, N, D]` of an output gate, or None.

    Example:
        >>> import jax, jattn
        >>> w = jattn.MLAWeights.normal(jax.random.key(0), M=64, Q=48, N=4, H=16, R=8, C=32, D=16)
        >>> w.query_up.shape, w.latent_down.shape
        ((48, 4, 24), (64, 40))

    Source: DeepSeek-V2 (2024); Kimi K3 for the gate.
    """

    query_up: Any
    latent_down: Any
    latent_norm: Any
    key_up: Any
    value_up: Any
    out: Any
    query_down: Any = None
    query_norm: Any = None
    gate: Any = None

    @classmethod
    def normal(cls, key, *, M: int, N: int, H: int, R: int, C: int, D: int, Q: int | None = None, gate: bool = False,
               dtype=jnp.float32) -> "MLAWeights":  # fmt: skip
        """Random weights of variance 1 / (inputs), and norms of 1; without Q there is no query latent."""
        shapes = dict(
            query_up=(Q or M, N, H + R), latent_down=(M, C + R), key_up=(C, N, H), value_up=(C, N, D), out=(N, D, M),
        )  # fmt: skip
        shapes |= ({"query_down": (M, Q)} if Q else {}) | ({"gate": (M, N, D)} if gate else {})
        fan_in = [N * D if name == "out" else shape[0] for name, shape in shapes.items()]
        drawn = dict(zip(shapes, normal(key, tuple(shapes.values()), tuple(fan_in), dtype), strict=True))
        return cls(latent_norm=jnp.ones(C, dtype), query_norm=jnp.ones(Q, dtype) if Q else None, **drawn)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MLAInputs:
    """What attention reads of T tokens, a pytree; `mla_preprocess` makes it.

    query_nope: `[*B, T, N, H]`, for the expanded form; query_latent: `[*B, T, N, C]`, the same, absorbed; query_rope:
    `[*B, T, N, R]`; latent: `[*B, T, C]`; key_rope: `[*B, T, R]`; residual: `[*B, T, Q]`, what an indexer shares, or
    None without a query latent.

    Source: DeepSeek-V2 (2024), section 2.1.
    """

    query_nope: Any
    query_latent: Any
    query_rope: Any
    latent: Any
    key_rope: Any
    residual: Any

    @property
    def query(self):
        """Absorbed queries `[*B, T, N, C + R]`."""
        return jnp.concatenate([self.query_latent, self.query_rope], axis=-1)

    @property
    def rows(self):
        """Rows for the cache, `[*B, T, C + R]`."""
        return jnp.concatenate([self.latent, self.key_rope], axis=-1)


def mla_preprocess(x, weights: MLAWeights, positions=None, *, rotate: Callable | None, eps: float = 1e-6) -> MLAInputs:
    """Everything before attention: queries of both forms, the rows for the cache, and the residual of the queries.

    Under `jit` the form of the queries that is not used costs nothing.

    Args:
        x: floating-point `[*B, T, M]`, after the norm of the layer's input.
        weights: `MLAWeights` in the dtype of x.
        positions: int `[*B, T]` or `[T]`; None is 0..T-1.
        rotate: called as `rotate(y, positions)` for y `[*B, T, N or 1, R]`: for DeepSeek and GLM
            `functools.partial(jattn.rope, interleaved=True)`. None leaves the rope channels as they are (Kimi).
        eps: of the root mean square norms.

    Returns:
        `MLAInputs` in the dtype of x. Norms are computed in float32 (float64 for float64).

    Raises:
        ValueError, TypeError: weights that do not fit (the message names them and the dimension).

    Example:
        >>> import functools, jax, jax.numpy as jnp, jattn
        >>> w = jattn.MLAWeights.normal(jax.random.key(0), M=64, Q=48, N=4, H=16, R=8, C=32, D=16)
        >>> x = jax.random.normal(jax.random.key(1), (2, 10, 64), "float32")
        >>> rotate = functools.partial(jattn.rope, interleaved=True)
        >>> inputs = jax.jit(functools.partial(jattn.mla_preprocess, rotate=rotate))(x, w)
        >>> inputs.query.shape, inputs.rows.shape, inputs.residual.shape
        ((2, 10, 4, 40), (2, 10, 40), (2, 10, 48))

    Source: DeepSeek-V2 (2024), section 2.1.
    """
    x = tokens(x)
    sizes = _sizes(weights, x.shape[-1], x.dtype)
    positions = token_positions(positions, x.shape[:-1])
    residual = None
    if weights.query_down is not None:
        residual = rms_norm(product("btm,mq->btq", x, weights.query_down), weights.query_norm, eps)
    query = product("btm,mnh->btnh", x if residual is None else residual, weights.query_up)
    nope, query_rope = query[..., : sizes["H"]], query[..., sizes["H"] :]
    latent = product("btm,mc->btc", x, weights.latent_down)
    latent, key_rope = latent[..., : sizes["C"]], latent[..., None, sizes["C"] :]
    query_rope, key_rope = rotated(rotate, query_rope, positions), rotated(rotate, key_rope, positions)
    return MLAInputs(
        nope,
        product("btnh,cnh->btnc", nope, weights.key_up),
        query_rope,
        rms_norm(latent, weights.latent_norm, eps),
        key_rope[..., 0, :],
        residual,
    )


def mla_prefill(inputs: MLAInputs, weights: MLAWeights, rows=None, *, scale, is_causal: bool = True, **options):
    """Attention in the expanded form: keys and values of every head are made of the rows.

    Args:
        inputs: `MLAInputs` of the T queries.
        weights: `MLAWeights`.
        rows: floating-point `[*B, S, C + R]`, a history that the tokens of `inputs` end; None is those tokens alone.
        scale: required: (H + R) ** -0.5 for most models, times mscale ** 2 for YaRN.
        is_causal, **options: as in `attention`; with `rows`, `query_offset="end"` puts the queries at their end.

    Returns:
        `[*B, T, N, D]` (and lse `[*B, T, N]` with `return_residual`). Differentiable like `attention`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `attention`.

    Example:
        >>> import functools, jax, jax.numpy as jnp, jattn
        >>> w = jattn.MLAWeights.normal(jax.random.key(0), M=64, Q=48, N=4, H=16, R=8, C=32, D=16)
        >>> @jax.jit
        ... def layer(x, w):
        ...     inputs = jattn.mla_preprocess(x, w, rotate=functools.partial(jattn.rope, interleaved=True))
        ...     return jattn.mla_output(jattn.mla_prefill(inputs, w, scale=24**-0.5), w)
        >>> layer(jax.random.normal(jax.random.key(1), (2, 10, 64), "float32"), w).shape
        (2, 10, 64)

    Source: DeepSeek-V2 (2024), section 2.1.
    """
    scale = _required(scale)
    rows = inputs.rows if rows is None else _check.array(rows, "rows")
    C, R = weights.key_up.shape[0], inputs.query_rope.shape[-1]
    if rows.ndim < 2 or rows.shape[-1] != C + R:
        raise ValueError(f"rows have shape {rows.shape}; expected [*B, S, C + R] with C + R = {C} + {R} = {C + R}")
    latent, rope = rows[..., :C], rows[..., None, C:]
    key = product("btc,cnh->btnh", latent, weights.key_up)
    key = jnp.concatenate([key, jnp.broadcast_to(rope, (*key.shape[:-1], R))], axis=-1)
    query = jnp.concatenate([inputs.query_nope, inputs.query_rope], axis=-1)
    value = product("btc,cnd->btnd", latent, weights.value_up)
    return attention(query, key, value, scale=scale, is_causal=is_causal, **options)


def mla_absorbed(query, rows, *, scale, latent_dim: int, is_causal: bool = True, return_residual=False, **options):
    """Attention in the absorbed form: all heads read one row a token, as key and, its first channels, as value.

    Args:
        query: floating-point `[*B, T, N, C + R]`, `MLAInputs.query`.
        rows: `[*B, S, C + R]` in the query's dtype.
        scale: required; that of the expanded form, not (C + R) ** -0.5.
        latent_dim: C.
        is_causal, return_residual, **options: as in `attention`.

    Returns:
        `[*B, T, N, C]` (and lse `[*B, T, N]`): weighted latents, which `mla_values` takes. Differentiable like
        `attention`.

    Raises:
        ValueError, TypeError, NotImplementedError: as `attention`.

    Example:
        >>> import jax, jattn
        >>> query = jax.random.normal(jax.random.key(0), (2, 10, 4, 40), "float32")  # inputs.query
        >>> rows = jax.random.normal(jax.random.key(1), (2, 10, 40), "float32")      # inputs.rows
        >>> jattn.mla_absorbed(query, rows, scale=24**-0.5, latent_dim=32).shape
        (2, 10, 4, 32)

    Source: DeepSeek-V2 (2024), appendix on absorbed weights.
    """
    query, rows, C = *_absorbed(query, rows), _latent_dim(latent_dim, query)
    if rows.shape[:-2] != query.shape[:-3]:
        raise ValueError(f"rows have shape {rows.shape}; expected [*B, S, C + R] with *B={query.shape[:-3]}")
    rows = rows[..., None, :]
    # A slice of the rows for values would be a copy of the cache; of the output it is nothing.
    out, lse = attention(
        query, rows, rows, scale=_required(scale), is_causal=is_causal, return_residual=True, **options
    )
    return (out[..., :C], lse) if _check.flag(return_residual, "return_residual") else out[..., :C]


def mla_decode(
    query, rows, lengths=None, *, scale, latent_dim: int, block_tables=None, cu_seqlens_q=None, mask=None,
    is_causal: bool = True, query_seq_lengths=None, local_window_size=None, sinks=None, return_residual: bool = False,
    implementation: str | None = None,
):  # fmt: skip
    """The absorbed form over a cache of rows, contiguous or in pages, for the newest tokens of each sequence.

    The rows of the queries are in the cache already. Bits depend on a sequence's own tokens alone, as in
    `decode_attention` and `paged_attention`.

    Args:
        query: `[*B, T, N, C + R]`, T from 1 to 64; with pages `[B, T, N, C + R]`, or packed `[T, N, C + R]` with
            `cu_seqlens_q`, of any length.
        rows: `[*B, S, C + R]`, or pages `[P, page, C + R]`; in the query's dtype, or uint8 `[.., 656]`, the rows of
            `pack_latent` for C = 512 and R = 64.
        lengths: int `[*B]`, tokens in the cache, those of the queries included (None is S; pages need it).
        scale: required; that of the expanded form: (H + R) ** -0.5 for most models, not (C + R) ** -0.5.
        latent_dim: C.
        block_tables: int `[B, W]` for pages: entry w of row b is the page of tokens w · page and following.
        cu_seqlens_q, mask, is_causal, query_seq_lengths, local_window_size, sinks, return_residual: as in
            `paged_attention`.
        implementation: "xla" or None.

    Returns:
        `[.., T, N, C]` (and lse `[.., T, N]`): weighted latents, which `mla_values` takes. An output gate comes after
        that, in `mla_output`.

    Raises:
        ValueError, TypeError: an argument is wrong. NotImplementedError: as `paged_attention`.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> query = jax.random.normal(jax.random.key(0), (2, 1, 4, 40), "float32")   # of the newest tokens
        >>> cache = jax.random.normal(jax.random.key(1), (2, 100, 40), "float32")    # with the newest rows in it
        >>> jattn.mla_decode(query, cache, jnp.array([11, 57]), scale=24**-0.5, latent_dim=32).shape
        (2, 1, 4, 32)

    Source: DeepSeek-V2 (2024); FlashMLA for the rows of 656 bytes.
    """
    only_xla("mla_decode", implementation)
    query, rows, C = *_absorbed(query, rows), _latent_dim(latent_dim, query)
    over = _contiguous if block_tables is None else _in_pages
    out, lse = over(
        query, rows, lengths, block_tables, cu_seqlens_q, query_seq_lengths, mask=mask, scale=_required(scale),
        is_causal=is_causal, local_window_size=local_window_size, sinks=sinks,
    )  # fmt: skip
    return (out[..., :C], lse) if _check.flag(return_residual, "return_residual") else out[..., :C]


def mla_values(latents, weights: MLAWeights):
    """Values of every head, `[*B, T, N, D]`, of weighted latents `[*B, T, N, C]`: what absorbing left for afterwards.

    Raises:
        ValueError: heads or latents that do not fit.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> w = jattn.MLAWeights.normal(jax.random.key(0), M=64, Q=48, N=4, H=16, R=8, C=32, D=16)
        >>> jattn.mla_values(jnp.ones((2, 10, 4, 32), "float32"), w).shape
        (2, 10, 4, 16)

    Source: DeepSeek-V2 (2024), appendix on absorbed weights.
    """
    latents, (C, N, _) = _check.array(latents, "latents"), weights.value_up.shape
    if latents.shape[-2:] != (N, C):
        raise ValueError(f"latents have shape {latents.shape}; expected [*B, T, N, C] with N={N}, C={C} of value_up")
    return product("btnc,cnd->btnd", latents, weights.value_up)


def mla_output(values, weights: MLAWeights, x=None):
    """The output projection of values `[*B, T, N, D]`: `[*B, T, M]`, gated where the layer has a gate.

    Args:
        values: of `mla_prefill` or `mla_values`.
        weights: `MLAWeights`; with a gate, values are multiplied by sigmoid(x W_G) before they are projected.
        x: `[*B, T, M]`, what `mla_preprocess` got; needed for a gate, and refused without one.

    Raises:
        ValueError: shapes that do not fit, or an x that is missing or has no use.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> w = jattn.MLAWeights.normal(jax.random.key(0), M=64, N=4, H=16, R=8, C=32, D=16, gate=True)
        >>> jattn.mla_output(jnp.ones((2, 10, 4, 16), "float32"), w, jnp.ones((2, 10, 64), "float32")).shape
        (2, 10, 64)

    Source: Kimi K3 for the gate.
    """
    values, (N, D, M) = _check.array(values, "values"), weights.out.shape
    if values.shape[-2:] != (N, D):
        raise ValueError(f"values have shape {values.shape}; expected [*B, T, N, D] with N={N}, D={D} of out")
    if (x is None) != (weights.gate is None):
        raise ValueError("the layer has a gate: x is needed" if x is None else "x has no use: the layer has no gate")
    if x is not None:
        x = tokens(x)
        if x.shape != (*values.shape[:-2], M):
            raise ValueError(f"x has shape {x.shape}; expected {(*values.shape[:-2], M)} for values {values.shape}")
        gate = jax.nn.sigmoid(product("btm,mnd->btnd", x, weights.gate, rounded=False))
        values = (values.astype(gate.dtype) * gate).astype(values.dtype)
    return product("btnd,ndm->btm", values, weights.out)


def pack_latent(latent, key_rope):
    """Rows of 656 bytes for the cache, uint8 `[.., 656]`, of `latent [.., 512]` and `key_rope [.., 64]`.

    512 e4m3 codes, four float32 scales (one for 128 channels, rounded up to powers of two), and the rope part in
    bfloat16. Rounding is to nearest, ties to even; NaN and Inf make NaN of the channels that share their scale.

    Raises:
        ValueError, TypeError: other shapes or dtypes.

    Example:
        >>> import jax.numpy as jnp, jattn
        >>> jattn.pack_latent(jnp.ones((2, 100, 512)), jnp.ones((2, 100, 64))).shape
        (2, 100, 656)

    Source: FlashMLA, fp8 KV cache of DeepSeek-V3.2.
    """
    latent, key_rope = _check.array(latent, "latent"), _check.array(key_rope, "key_rope")
    if (latent.shape[-1:], key_rope.shape[-1:]) != ((_formats.LATENT,), (_formats.ROPE,)):
        raise ValueError(f"latent has shape {latent.shape}, key_rope {key_rope.shape}; expected [.., 512] and [.., 64]")
    if latent.shape[:-1] != key_rope.shape[:-1]:
        raise ValueError(f"key_rope has shape {key_rope.shape}; all but its last axis must be latent's {latent.shape}")
    for name, x in (("latent", latent), ("key_rope", key_rope)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating-point, not {x.dtype}")
    return jax.jit(_formats.pack_latent)(latent, key_rope)


def unpack_latent(rows, dtype=jnp.float32):
    """`[.., 576]` of `dtype`, latent before rope, of rows that `pack_latent` made; exact in bfloat16 and float32.

    Raises:
        ValueError, TypeError: no uint8 rows of 656 bytes.

    Example:
        >>> import jax.numpy as jnp, jattn
        >>> jattn.unpack_latent(jattn.pack_latent(jnp.ones((2, 100, 512)), jnp.ones((2, 100, 64)))).shape
        (2, 100, 576)

    Source: FlashMLA, fp8 KV cache of DeepSeek-V3.2.
    """
    rows = _check.array(rows, "rows")
    if rows.dtype != jnp.uint8:
        raise TypeError(f"rows must be uint8, not {rows.dtype}")
    if rows.shape[-1:] != (_formats.ROW_BYTES,):
        raise ValueError(f"rows have shape {rows.shape}; expected [.., 656]")
    return jax.jit(_formats.unpack_latent, static_argnums=1)(rows, jnp.dtype(dtype))


def _contiguous(query, rows, lengths, _, cu_seqlens_q, used, **options):
    """Rows `[*B, S, ..]`, as pages: one a sequence."""
    *batch, T, N, H = query.shape
    batch, S, B = tuple(batch), rows.shape[-2], math.prod(batch)
    if cu_seqlens_q is not None:
        raise ValueError("cu_seqlens_q needs block_tables: a contiguous cache has a row of queries a sequence")
    if rows.shape[:-2] != batch:
        raise ValueError(f"rows have shape {rows.shape}; expected [*B, S, C + R] with *B={batch}")
    if not 1 <= T <= 64:
        raise ValueError(f"query length T={T} must be from 1 to 64: longer ones are for jattn.mla_absorbed")
    out, lse = _run(
        query.reshape(B, T, N, H), rows.reshape(B, S, rows.shape[-1]), jnp.arange(B, dtype=jnp.int32)[:, None],
        _check.lengths(S if lengths is None else lengths, "lengths", batch, S), Shape(batch, N, T, S),
        query_lengths=_check.lengths(used, "query_seq_lengths", batch, T), **options,
    )  # fmt: skip
    return out.reshape(*batch, *out.shape[1:]), lse.reshape(*batch, *lse.shape[1:])


def _in_pages(query, rows, lengths, tables, cu_seqlens_q, used, **options):
    """Rows `[P, page, ..]`."""
    if lengths is None or rows.ndim != 3:
        raise ValueError(f"block_tables need lengths and rows [P, page, C + R]; rows have shape {rows.shape}")
    cache = checked(PagedCache(_with_head(rows), _with_head(rows), tables, lengths))
    (T, N), B = query.shape[-3:-1], cache.block_tables.shape[0]
    cu = None if cu_seqlens_q is None else _check.cu_seqlens(cu_seqlens_q, "cu_seqlens_q", T)
    if query.shape[:-3] != (() if cu is not None else (B,)) or (cu is not None and cu.shape != (B + 1,)):
        want = f"[B, T, N, C + R] with B={B}, or packed [T, N, C + R] with cu_seqlens_q [{B + 1}]"
        raise ValueError(f"query has shape {query.shape}; expected {want}")
    return _run(
        query, rows, int32(cache.block_tables), int32(cache.lengths),
        Shape((B,) if cu is None else (), N, T, cache.capacity, None if cu is None else B), cu_queries=cu,
        query_lengths=_check.lengths(used, "query_seq_lengths", (B,), T), **options,
    )  # fmt: skip


def _run(query, rows, tables, lengths, shape, **options):
    # Rows get their head where they are fetched: as an axis of the whole cache it would cost a copy.
    pages = _with_head(rows)
    call = assemble("paged_attention", query, pages, pages, tables, lengths, shape, **options)
    arrays = dataclasses.replace(call.arrays, key=rows, value=None)
    static = dataclasses.replace(call.options, config=_paged.choose(call.problem, None))
    with jax.named_scope("jattn.mla_decode"):
        return _in_auto_mode(functools.partial(_attend, static), vary(arrays, varying_axes(arrays)))


def _with_head(rows):
    """What rows `[P, page, ..]` look like as keys of one head."""
    return jax.ShapeDtypeStruct((*rows.shape[:2], 1, rows.shape[2]), rows.dtype)


@functools.partial(jax.jit, static_argnums=0)
@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _attend(options, arrays):
    out, lse = _xla.forward(arrays, options)
    return out.astype(arrays.query.dtype), lse


@_attend.__wrapped__.defjvp
def _refuse_derivatives(*_):
    raise NotImplementedError("mla_decode has no derivatives: mla_absorbed has, over rows that are not in a cache")


def _absorbed(query, rows):
    query, rows = _check.array(query, "query"), _check.array(rows, "rows")
    if query.ndim < 3 or rows.ndim < 2:
        shapes = f"query has shape {query.shape}, rows {rows.shape}"
        raise ValueError(f"{shapes}; expected [*B, T, N, C + R] and [*B, S, C + R]")
    if str(query.dtype) not in _FLOATS:
        raise TypeError(f"query has dtype {query.dtype}; expected one of {', '.join(_FLOATS)}")
    stored = rows.dtype == jnp.uint8
    if not stored and rows.dtype != query.dtype:
        raise TypeError(f"rows dtype {rows.dtype} must equal query's {query.dtype}, or be uint8 for rows of 656 bytes")
    want = _formats.ROW_BYTES if stored and query.shape[-1] == _formats.LATENT + _formats.ROPE else query.shape[-1]
    if rows.shape[-1] != want or (stored and want != _formats.ROW_BYTES):
        raise ValueError(
            f"rows have {rows.shape[-1]} {'bytes' if stored else 'channels'} for queries of C + R = {query.shape[-1]}; "
            + ("rows of 656 bytes are for 512 + 64 = 576" if stored else f"expected {want}")
        )
    return query, rows


def _latent_dim(C, query):
    C = positive(C, "latent_dim")
    if C > query.shape[-1]:
        raise ValueError(f"latent_dim={C} must be <= {query.shape[-1]}, the channels of a row")
    return C


def _required(scale):
    if scale is None:
        raise TypeError("scale=None: pass the scale of the expanded form, (H + R) ** -0.5 for most models")
    return scale


def _sizes(w: MLAWeights, M, dtype) -> dict[str, int]:
    """Sizes by their letters, once every weight fits the others."""
    if not isinstance(w, MLAWeights):
        raise TypeError(f"weights must be a jattn.MLAWeights, not {type(w).__name__}")
    if w.latent_norm.ndim != 1 or w.key_up.ndim != 3 or w.value_up.ndim != 3 or w.latent_down.ndim != 2:
        shapes = {n: getattr(w, n).shape for n in ("latent_norm", "key_up", "value_up", "latent_down")}
        raise ValueError(f"weights have shapes {shapes}; expected [C], [C, N, H], [C, N, D], [M, C + R]")
    (C,), (_, N, H), D = w.latent_norm.shape, w.key_up.shape, w.value_up.shape[2]
    R = w.latent_down.shape[1] - C
    if R < 0:
        raise ValueError(f"latent_down has shape {w.latent_down.shape}; expected [M, C + R] with C={C} of latent_norm")
    if (w.query_down is None) != (w.query_norm is None):
        raise ValueError("query_down and query_norm go together: one is None")
    Q = M if w.query_down is None else w.query_norm.shape[0]
    fit = dict(
        query_up=(Q, N, H + R), latent_down=(M, C + R), latent_norm=(C,), key_up=(C, N, H), value_up=(C, N, D),
        out=(N, D, M),
    )  # fmt: skip
    fit |= {} if w.query_down is None else dict(query_down=(M, Q), query_norm=(Q,))
    fit |= {} if w.gate is None else dict(gate=(M, N, D))
    fits(w, fit, dtype)
    return dict(C=C, N=N, H=H, D=D, R=R)
