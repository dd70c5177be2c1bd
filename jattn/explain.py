"""`explain`: what a call would run on, without running it."""

from typing import Any

import jax

from jattn import _dispatch
from jattn.attention import prepare as prepare_attention
from jattn.decode import prepare as prepare_decode_attention
from jattn.paged import prepare as prepare_paged_attention
from jattn.ragged import prepare as prepare_ragged_attention

__all__ = ["explain"]

_PREPARE = {
    "attention": prepare_attention,
    "ragged_attention": prepare_ragged_attention,
    "decode_attention": prepare_decode_attention,
    "paged_attention": prepare_paged_attention,
}


def explain(
    *args, op: str = "attention", implementation: str | None = None, config: Any = None, **kwargs
) -> _dispatch.Explanation:
    """Which implementation and tile config the call `op(*args, **kwargs)` gets, and why the others were refused.

    Args:
        *args, **kwargs: the arguments of the op; arrays may be `jax.ShapeDtypeStruct`. Nothing runs.
        op: "attention", "ragged_attention", "decode_attention" or "paged_attention".
        implementation, config: as in the op.

    Returns:
        An object with `implementation` (None when nothing can run the call), `config`, `refused` (name -> reason) and
        a readable `repr`.

    Raises:
        ValueError, TypeError: what the op would raise.

    Example:
        `print(jattn.explain(q, k, v, is_causal=True))`
    """
    if op not in _PREPARE:
        raise ValueError(f"op={op!r} is unknown; choose from {', '.join(map(repr, _PREPARE))}")
    kwargs.pop("return_residual", None)
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves]
    found = []

    def describe(arrays):
        arrays = iter(arrays)
        args, kwargs = structure.unflatten([next(arrays) if a else x for x, a in zip(leaves, is_array, strict=True)])
        found.append(_PREPARE[op](*args, **kwargs).problem)

    jax.eval_shape(describe, [x for x, a in zip(leaves, is_array, strict=True) if a])
    return _dispatch.explain(found[0], implementation, config)
