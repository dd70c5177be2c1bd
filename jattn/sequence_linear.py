"""Linear attention of one sequence spread over many devices: maps of the state travel, and no tokens.

All tokens of a device together are one affine map of the state. Every device makes its own, one all-gather brings the P
maps to all, and each applies those before it, in order, to the first state: with what comes out it runs the op on its
own tokens. Maps are applied to states and never multiplied with each other, as a scan in log P steps would have to.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jattn import _check, linear
from jattn._layout import SequenceLayout
from jattn._linear import RULES
from jattn._mapped import check_same, check_sharding, mapped, mesh_for

__all__ = ["sequence_linear_attention"]

_OF_THE_MAP = (
    "qk_l2norm", "gate", "A_log", "dt_bias", "lower_bound", "beta_activation", "segment_ids", "mode", "residuals",
    "implementation",
)  # fmt: skip


def sequence_linear_attention(
    op,
    query,
    key,
    value,
    g=None,
    beta=None,
    *,
    axis,
    mesh=None,
    initial_state=None,
    return_final_state=False,
    **options,
):
    """An op of `jattn.linear` on a sequence spread over a mesh axis, device r having the r-th part of the tokens.

    Inside your own `shard_map` the arrays are one device's. Outside, they are whole, and the op maps itself over
    `axis`; other mesh axes, over batch or heads, are left as they are. Tokens lie in order: a recurrence has no use for
    a zigzag layout. All arrays have gradients.

    Args:
        op: "kda", "gated_delta_rule", "delta_rule", "gla", "simple_gla" or "linear_attention".
        query, key: `[*B, T, K, H]`; inside `shard_map` T is the device's own length.
        value: `[*B, T, N, D]`.
        g, beta: as the op has them, None where it has none. Along their tokens they are sharded as the queries are.
        axis: name of the mesh axis.
        mesh: None, or outside `shard_map` the mesh, where neither arrays nor `jax.set_mesh` tell.
        initial_state: `[*B, N, H, D]`, as in the op: what enters the first device, the same on all.
        return_final_state: also return a state: outside `shard_map` that after the last token of the sequence, inside
            that after the device's own last token, which is the sequence's on the last device.
        **options: those of the op, but for cu_seqlens and checkpoints. segment_ids `[*B, T]` or `[T]` lie as the tokens
            do; a segment may go on from one device to the next.

    Returns:
        As the op: out `[*B, T, N, D]`, or (out, state).

    Raises:
        ValueError, TypeError, NotImplementedError: as the op; also a length that P does not divide, an axis that is not
            in the mesh, tokens or states that are sharded along a wrong axis.

    Example:
        >>> import jax, jax.numpy as jnp, jattn
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 16))
        >>> mesh = jax.make_mesh((1,), ("sp",))
        >>> jattn.sequence_linear_attention("simple_gla", q, k, v, jnp.full(4, -0.1), axis="sp", mesh=mesh).shape
        (2, 64, 4, 16)

    Source: the chunk recurrence, with devices for chunks; Sun et al., "LASP-2" (arXiv:2502.07563) gathers states so.
    """
    if op not in RULES:
        raise ValueError(f"op={op!r} must be one of {', '.join(map(repr, RULES))}")
    for name, why in (
        ("cu_seqlens", "offsets are of whole arrays: give segment_ids"),
        ("checkpoints", "states are those of devices"),
    ):
        if options.pop(name, None) is not None:
            raise ValueError(f"{name} cannot be given over {axis!r}: {why}")
    _check.flag(return_final_state, "return_final_state")
    x = dict(query=query, key=key, value=value, g=g, beta=beta, initial_state=initial_state)
    x |= {n: options.pop(n) for n in ("A_log", "dt_bias", "segment_ids") if n in options}
    if hasattr(options.get("scale"), "shape"):
        x["scale"] = options.pop("scale")
    x = {name: _check.array(a, name) for name, a in x.items() if a is not None}
    for name, has in (("g", RULES[op].decay), ("beta", RULES[op].delta)):
        if (name in x) != bool(has):
            raise ValueError(f"{name} must {'' if has else 'not '}be given to op={op!r}")
    mesh = mesh_for(axis, mesh, x)
    if "initial_state" in x:
        check_sharding("initial_state", x["initial_state"], axis)
        check_same("initial_state", x["initial_state"], axis)
    if mesh is None:
        found = _on_device(op, axis, x, options)
        return found if return_final_state else found[0]
    batch, T = _tokens(x, axis, mesh.shape[axis])
    if not T:
        return _op(op, x, return_final_state=return_final_state, **options)
    found = _on_mesh(op, axis, batch, mesh, tuple(sorted(options.items())), return_final_state, x)
    return found if return_final_state else found[0]


def _op(op, x, **options):
    x, rule = dict(x), RULES[op]
    gates = [x.pop(name) for name, has in (("g", rule.decay), ("beta", rule.delta)) if has]
    return getattr(linear, op)(x.pop("query"), x.pop("key"), x.pop("value"), *gates, **x, **options)


# One device's part, inside a `shard_map`.


def _on_device(op, axis, x, options):
    """`(out, the state after the device's last token)`."""
    value, given = x["value"], x | options
    if options.get("normalize"):  # its states have a column more, which sums keys
        value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], axis=-1)
    wanted = {name: given[name] for name in _OF_THE_MAP if name in given}
    own = linear.affine_map(op, x["key"], value, x.get("g"), x.get("beta"), **wanted)
    begins = _begins(axis, x.get("segment_ids"))
    if begins is not None:  # nothing passes from the device before to this one's first token
        heads = begins.reshape(*begins.shape, *[1] * (own.matrix.ndim - len(x["value"].shape[:-3])))
        own = linear.AffineMap(jnp.where(heads, 0, own.matrix), own.offset)
    state = x.get("initial_state")
    if state is not None and options.get("state_layout") == "vk":
        state = jnp.swapaxes(state, -1, -2)
    state = linear.entering_state(own, axis, state)
    if begins is not None:
        state = jnp.where(begins[..., None, None, None], 0, state)
    if options.get("state_layout") == "vk":
        state = jnp.swapaxes(state, -1, -2)
    return _op(op, x | dict(initial_state=state), return_final_state=True, **options)


def _begins(axis, ids):
    """bool, one a sequence or one for all: whether a segment begins with this device's tokens. The first one's never
    does: its state is that of the first segment."""
    if ids is None or not ids.shape[-1]:
        return None
    size = lax.axis_size(axis)
    before = lax.ppermute(ids[..., -1], axis, [(i, i + 1) for i in range(size - 1)])
    return (lax.axis_index(axis) > 0) & (ids[..., 0] != before)


# Whole arrays, outside of any `shard_map`.


def _tokens(x, axis, size):
    """Batch axes and length of a sequence."""
    shape = x["query"].shape
    if len(shape) < 3:
        raise ValueError(f"query has shape {shape}; expected [*B, T, heads, H]")
    batch, T = len(shape) - 3, shape[-3]
    SequenceLayout("contiguous", size).check(T, "query length T")
    for name in ("key", "value", "g", "beta", "segment_ids"):
        a = x.get(name)
        if a is None or name == "g" and a.ndim == 1:
            continue
        place = _place(name, a, batch)
        if a.ndim <= place or a.shape[place] != T:
            raise ValueError(f"{name} has shape {a.shape}; query has {shape[:-2]} tokens")
        check_sharding(name, a, axis, place, "tokens")
    check_sharding("query", x["query"], axis, batch, "tokens")
    return batch, T


def _place(name, a, batch):
    """The axis of an array's tokens."""
    return a.ndim - 1 if name == "segment_ids" else batch


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def _on_mesh(op, axis, batch, mesh, options, final, x):
    tokens = {"query", "key", "value", "g", "beta", "segment_ids"}

    def spec(name, a):
        along = name in tokens and not (name == "g" and a.ndim == 1)
        return P(*[None] * _place(name, a, batch), axis) if along else P()

    def body(x):
        out, state = _on_device(op, axis, x, dict(options))
        if not final:
            return (out,)
        last = lax.axis_index(axis) == lax.axis_size(axis) - 1
        return out, lax.psum(jnp.where(last, state, 0), axis)  # of one state and zeros

    def out_sharding(found):
        *lead, _, heads, last = found["value"]
        return (found["value"], P(*lead, heads, None, None))[: 1 + final]

    specs, out = {name: spec(name, a) for name, a in x.items()}, (P(*[None] * batch, axis), P())[: 1 + final]
    return mapped(body, mesh, axis, x, specs, out, out_sharding)
