"""What the layers with an autoregressive cache share."""

import math
import types

import jax.numpy as jnp
from flax import nnx

from jattn import _check

default_kernel_init = nnx.initializers.lecun_normal()
zeros_init = nnx.initializers.zeros_init()
no_metadata = types.MappingProxyType({})


class CachedLayer(nnx.Module):
    """A layer of `[*B, T, in_features]` that can keep what later tokens need of earlier ones.

    Subclasses have `init_cache(input_shape, dtype)` and hold the cache in attributes of type `nnx.Cache`.
    """

    def set_view(self, decode=None, batch_size=None, max_length=None):
        """What `nnx.view` sets: `decode`; with `batch_size` and `max_length` also an empty cache, if there is none."""
        if decode is None:
            return
        self.decode = decode
        init_absent_cache(self, batch_size, max_length)

    def decoding(self, decode):
        """Whether this call reads and writes the cache."""
        decode = _check.flag(bool(self.decode) if decode is None else decode, "decode")
        if decode and not self.has_cache():
            raise ValueError("decode=True needs a cache: call init_cache((batch, max_length, in_features)) before")
        return decode

    def checked(self, inputs):
        """`inputs` with one batch axis, and the axes that they had."""
        if inputs.ndim < 2 or inputs.shape[-1] != self.in_features:
            raise ValueError(f"inputs have shape {inputs.shape}; expected [*B, T, {self.in_features}]")
        *batch, T, M = inputs.shape
        return inputs if len(batch) == 1 else inputs.reshape(math.prod(batch), T, M), tuple(batch)

    def cache_shape(self, input_shape):
        """(B, max_length) of an `input_shape` as Flax has it, `(*batch, max_length, features)`."""
        *batch, max_length, features = input_shape
        if features != self.in_features:
            raise ValueError(f"input_shape={tuple(input_shape)} must end with in_features={self.in_features}")
        return math.prod(batch), max_length

    def cache_dtype(self, dtype):
        """The dtype of cached rows: that of the layer's own projections."""
        return cache_dtype(dtype, self)


def cache_dtype(dtype, layer):
    """The dtype of cached rows: that of the layer's own projections."""
    return jnp.dtype(next(x for x in (dtype, layer.dtype, layer.param_dtype) if x is not None))


def init_absent_cache(layer, batch_size, max_length):
    """An empty cache for a layer that is to decode and has none, if its size is known."""
    if layer.decode and not layer.has_cache() and batch_size is not None and max_length is not None:
        batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
        layer.init_cache((*batch, max_length, layer.in_features))


def heads(num_heads, in_features, qkv_features):
    """Channels of a head."""
    features = in_features if qkv_features is None else qkv_features
    if features % num_heads:
        raise ValueError(f"qkv_features={features} must be a multiple of num_heads={num_heads}")
    return features // num_heads


def checked_lengths(x, batch, T):
    """int32 `[B]`, how many of the T tokens there are, or None for all."""
    lengths = _check.lengths(x, "seq_lengths", batch, T)
    return None if lengths is None else jnp.clip(lengths, 0, T)


def flat_segments(segment_ids, shape):
    """Segment ids with one batch axis, for inputs `[B, T, M]`."""
    if segment_ids is None:
        return None
    segment_ids = _check.array(segment_ids, "segment_ids")
    return segment_ids if segment_ids.ndim < 2 else segment_ids.reshape(shape[:2])


def dropout_key(layer, deterministic, rngs):
    """The key of this call's dropout, by Flax's rules for `deterministic` and `rngs`; None if it is off."""
    if layer.dropout_rate == 0.0:
        return None
    deterministic = layer.deterministic if deterministic is None else deterministic
    if deterministic is None:
        raise ValueError(f"deterministic must be given, to the call or before: dropout_rate={layer.dropout_rate}")
    if deterministic:
        return None
    rngs = layer.rngs if rngs is None else rngs
    if rngs is None:
        raise ValueError("rngs must be given to the call of a module made with keep_rngs=False")
    return rngs.dropout() if isinstance(rngs, nnx.Rngs) else rngs()
