"""What the Flax adapters share: Flax's attention keywords in, one call of `attention` out. Imports no flax."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jattn import masks
from jattn.attention import attention
from jattn.rope import rope

OPTIONS = frozenset({
    "mask", "is_causal", "rope", "scale", "query_offset", "query_seq_lengths", "key_value_seq_lengths",
    "local_window_size", "segment_ids", "logits_soft_cap", "score_mod", "sinks", "deterministic", "implementation",
    "config",
})


def checked_options(options):
    """`options` as given to make_attention_fn, or a TypeError that names the unknown ones."""
    unknown = sorted(set(options) - OPTIONS)
    if unknown:
        raise TypeError(f"unknown attention options {unknown}; jattn's are {sorted(OPTIONS)}")
    return options


def attend(query, key, value, *, bias, mask, is_causal, input_positions, dropout_rng, dropout_rate, deterministic,
           precision, module, options):
    """`attention` of arrays of one dtype. `deterministic` is Flax's (dropout off); `options` are jattn's keywords."""
    # Flax's layers pass themselves as `module` where their caller gave sow_weights=True.
    asked = None if module is None else type(module).__name__
    refuse("module", asked, "sow_weights=True asks for it, and no T x S weights exist that could be sown")
    check_precision(precision)
    options = dict(options or {})
    is_causal = options.pop("is_causal", False) or is_causal
    query, key = rotated(query, key, options.pop("rope", False), input_positions)
    dropout = {} if deterministic else dropout_arguments(dropout_rate, dropout_rng)
    return attention(
        query, key, value, bias, both_masks(mask, options.pop("mask", None)),
        is_causal=is_causal, **dropout, **options,
    )


def refuse(name, value, reason):
    """NotImplementedError for an argument of Flax's that cannot be honoured, unless it is absent."""
    if value is not None:
        raise NotImplementedError(f"jattn cannot honour {name}={value!r}: {reason}")


def check_precision(precision):
    """Accept every lax.Precision level, which jattn's products meet as a lower bound; refuse named dot algorithms."""
    for one in precision if isinstance(precision, tuple | list) else (precision,):
        try:
            jax.lax.Precision(one) if one is not None else None
        except ValueError:
            refuse("precision", precision, "only jax.lax.Precision levels say what its products meet")


def dropout_arguments(rate, rng):
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate must be in [0, 1), got {rate!r}")
    if rate == 0.0:
        return {}
    if rng is None:
        raise ValueError(f"dropout_rng is required when dropout_rate={rate!r} and deterministic=False")
    return {"dropout_rate": rate, "dropout_key": rng}


def rope_options(spec):
    """False, True, a base or a mapping of `jattn.rope`'s keywords: None when off, else hashable pairs of keywords."""
    if spec is None or isinstance(spec, tuple):
        return spec
    if isinstance(spec, bool):
        return () if spec else None
    return tuple(sorted(spec.items())) if isinstance(spec, Mapping) else (("base", float(spec)),)


def rotated(query, key, spec, positions):
    """query and key under rope at `positions` (one array for both or a (query, key) pair), as they are without rope."""
    options = rope_options(spec)
    if options is None:
        refuse("input_positions", positions, "they only serve rope, which is off; pass rope=True")
        return query, key
    at_query, at_key = positions if isinstance(positions, tuple | list) else (positions, positions)
    return rope(query, at_query, **dict(options)), rope(key, at_key, **dict(options))


def as_mask(mask):
    """A jattn mask or None as they are; an array in Flax's sense: nonzero is visible."""
    if mask is None or isinstance(mask, masks.Mask):
        return mask
    return masks.dense(jnp.asarray(mask).astype(bool))


def both_masks(one, other):
    one, other = as_mask(one), as_mask(other)
    if one is None or other is None:
        return other if one is None else one
    return one & other
