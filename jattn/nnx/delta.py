"""Layers whose memory is a state of fixed size: Kimi Delta Attention and Gated DeltaNet.

    x -> query, key, value: a projection, a convolution over the last tokens, SiLU; each alone
      -> decay, beta, output gate: projections
    out = W_out (RMSNorm(rule(query, key, value, decay, beta)) * activation(output gate))

What later tokens need of earlier ones is the state and the last inputs of the convolutions.
"""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx

from jattn import _check, linear
from jattn._linear import LARGEST_STEP
from jattn._problem import accumulator
from jattn.nnx._layer import (
    CachedLayer,
    checked_lengths,
    default_kernel_init,
    flat_segments,
    heads,
    no_metadata,
    zeros_init,
)

__all__ = ["GatedDeltaNet", "KimiDeltaAttention"]

# Uniform within 1 / sqrt(width), as convolutions of these layers are initialised.
conv_init = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform", in_axis=-1, out_axis=-2)


class _DeltaLayer(CachedLayer):
    """What both layers share; they differ in how decay and output gate are made, and in the rule."""

    def __init__(
        self,
        num_heads,
        in_features,
        qkv_features=None,
        out_features=None,
        num_qk_heads=None,
        *,
        value_head_dim=None,
        conv_kernel_size=4,
        gate="softplus",
        lower_bound=-5.0,
        beta_activation="sigmoid",
        mode="chunk",
        residuals="save",
        implementation=None,
        epsilon=1e-6,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init=default_kernel_init,
        out_kernel_init=None,
        conv_kernel_init=conv_init,
        bias_init=zeros_init,
        out_bias_init=None,
        use_bias=False,
        decode=None,
        kernel_metadata=no_metadata,
        out_kernel_metadata=no_metadata,
        rngs,
    ):
        self.num_heads, self.in_features = num_heads, in_features
        self.out_features = in_features if out_features is None else out_features
        self.num_qk_heads = num_heads if num_qk_heads is None else num_qk_heads
        if num_heads % self.num_qk_heads:
            raise ValueError(f"num_heads={num_heads} must be a multiple of num_qk_heads={self.num_qk_heads}")
        self.head_dim = heads(num_heads, in_features, qkv_features)
        self.value_head_dim = self.head_dim if value_head_dim is None else value_head_dim
        if gate not in ("softplus", "bounded"):
            raise ValueError(f"gate={gate!r} must be 'softplus' or 'bounded'")
        self.gate, self.lower_bound, self.beta_activation = gate, lower_bound, beta_activation
        self.mode, self.residuals, self.implementation = mode, residuals, implementation
        self.dtype, self.param_dtype, self.decode = dtype, param_dtype, decode
        self.conv_kernel_size = conv_kernel_size
        common = dict(dtype=dtype, param_dtype=param_dtype, precision=precision, rngs=rngs)
        project = functools.partial(
            nnx.LinearGeneral, kernel_init=kernel_init, kernel_metadata=kernel_metadata, bias_init=bias_init, **common
        )
        convolve = functools.partial(ShortConv, conv_kernel_size, conv_kernel_init, param_dtype, rngs=rngs)
        key, value = (self.num_qk_heads, self.head_dim), (num_heads, self.value_head_dim)
        self.query = project(in_features, key, use_bias=use_bias)
        self.key = project(in_features, key, use_bias=use_bias)
        self.value = project(in_features, value, use_bias=use_bias)
        self.query_conv, self.key_conv, self.value_conv = (convolve(math.prod(x)) for x in (key, key, value))
        self.beta = project(in_features, num_heads, use_bias=False)
        self._make_gates(functools.partial(project, use_bias=False))
        self.A_log = nnx.Param(_initial_rates(rngs.params(), num_heads, gate, param_dtype))
        self.dt_bias = nnx.Param(_initial_steps(rngs.params(), self._decay_shape(), param_dtype))
        self.norm = GatedNorm(self.value_head_dim, epsilon, self.output_activation, param_dtype)
        self.out = nnx.LinearGeneral(
            value, self.out_features, axis=(-2, -1), use_bias=use_bias, kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init, kernel_metadata=out_kernel_metadata or kernel_metadata, **common,
        )  # fmt: skip
        self.cached_state = nnx.data(None)

    def __call__(
        self, inputs, *, segment_ids=None, decode=None, seq_lengths=None, state_indices=None, out_sharding=None
    ):
        """The layer's output for every token.

        Args:
            inputs: `[*B, T, in_features]`.
            segment_ids: int `[*B, T]` or `[T]`: wherever it changes, state and convolutions start anew. Not with
                `decode`.
            decode: the tokens follow those in the cache, and are put into it: a prompt, a part of it, or one token at a
                time. None takes the constructor's.
            seq_lengths: int `[*B]`, with `decode`: how many of the T tokens of each sequence there are; the others may
                hold anything, give output 0 before the projection, and are not remembered.
            state_indices: int `[B]`, with `decode`: the row of the cache that each sequence has, no two alike; None is
                row by row. A sequence whose index is negative or past the cache is left out.
            out_sharding: for the output projection.

        Returns:
            `[*B, T, out_features]`. With `decode` there are no derivatives for T up to 32.

        Raises:
            ValueError, TypeError: shapes and dtypes that do not fit; `decode` without a cache.
        """
        decode = self.decoding(decode)
        x, batch = self.checked(inputs)
        places = None
        if decode:
            places = _Places(checked_lengths(seq_lengths, batch, x.shape[1]), state_indices)
        elif seq_lengths is not None or state_indices is not None:
            raise ValueError("seq_lengths and state_indices are for decode=True")
        if decode and segment_ids is not None:
            raise ValueError("segment_ids and decode=True do not go together: a row of the cache is one sequence")
        segments = flat_segments(segment_ids, x.shape)
        query, key, value = (
            convolution(projection(x), segments, places)
            for projection, convolution in (
                (self.query, self.query_conv), (self.key, self.key_conv), (self.value, self.value_conv),
            )
        )  # fmt: skip
        out = self._recur((query, key, value, self._decay(x), self.beta(x)), segments, places)
        out = self.out(self.norm(out, self._output_gate(x)), out_sharding=out_sharding)
        return out.reshape(*batch, *out.shape[1:])

    def init_cache(self, input_shape, dtype=None, *, state_dtype=None):
        """An empty cache, whose size does not depend on the length.

        Args:
            input_shape: `(*batch, max_length, in_features)`, as in Flax; max_length means nothing here. The batch is
                the number of rows that `state_indices` may name.
            dtype: of the inputs that the convolutions remember, that of the projections; None is the layer's.
            state_dtype: of the states: float32 (None; float64 for a float64 cache) or bfloat16, rounded once a call.

        Raises:
            ValueError: another number of features.
        """
        B, _ = self.cache_shape(input_shape)
        dtype = self.cache_dtype(dtype)
        shape = (B, self.num_heads, self.head_dim, self.value_head_dim)
        self.cached_state = nnx.Cache(jnp.zeros(shape, accumulator(dtype) if state_dtype is None else state_dtype))
        for convolution in (self.query_conv, self.key_conv, self.value_conv):
            convolution.init_cache(B, dtype)

    def has_cache(self):
        """Whether `init_cache` was called."""
        return self.cached_state is not None

    def _recur(self, tokens, segments, places):
        options = dict(
            qk_l2norm=True, gate=self.gate, A_log=self.A_log[...], dt_bias=self.dt_bias[...],
            lower_bound=self.lower_bound, beta_activation=self.beta_activation, implementation=self.implementation,
        )  # fmt: skip
        whole = functools.partial(self.op, **options, mode=self.mode, residuals=self.residuals)
        if places is None:
            return whole(*tokens, segment_ids=segments)
        out, self.cached_state[...] = places.advance(
            functools.partial(self.step, **options), whole, tokens, self.cached_state[...]
        )
        return out


class KimiDeltaAttention(_DeltaLayer):
    """Kimi Delta Attention: a state a head that decays by channel, instead of a cache that grows.

    Decay and output gate are projections to `value_head_dim` numbers and from there to all heads; the output gate is a
    sigmoid. Query, key and value go through a short convolution and SiLU, query and key are divided by their length.

    Args:
        num_heads: N value heads, each with a state.
        in_features: of the inputs.
        qkv_features: N times the channels H of a query and a key; None is `in_features`.
        out_features: None is `in_features`.
        num_qk_heads: heads of query and key, a divisor of num_heads; None is num_heads. Value head n reads query and
            key head n // (num_heads / num_qk_heads).
        value_head_dim: channels D of a value; None is H.
        conv_kernel_size: tokens of the convolutions, the token itself included.
        gate: of the decay, "softplus" (Kimi Linear) or "bounded" (from `lower_bound` to 0 a token), as in
            `jattn.linear.kda`.
        lower_bound: of the bounded gate, in [-5, 0).
        beta_activation: "sigmoid", or "sigmoid2" for (0, 2), which can turn what a key retrieves around.
        mode, residuals, implementation: as in `jattn.linear.kda`.
        epsilon: of the norm of the output.
        dtype: of the computation, inferred from inputs and parameters if None; states and gates are float32 (float64).
        param_dtype, precision, kernel_init, out_kernel_init, bias_init, out_bias_init, kernel_metadata,
            out_kernel_metadata: as in `flax.nnx.MultiHeadAttention`.
        conv_kernel_init: of the convolutions, `[channels, conv_kernel_size]`.
        use_bias: biases for query, key, value and the output; published layers have none.
        decode: default of the call's argument; `init_cache` makes the cache.
        rngs: `nnx.Rngs`.

    Raises:
        ValueError: head counts or feature counts that do not divide, an unknown gate.

    Example:
        >>> import jax.numpy as jnp
        >>> import jattn.nnx
        >>> from flax import nnx
        >>> layer = jattn.nnx.KimiDeltaAttention(num_heads=4, in_features=64, rngs=nnx.Rngs(0))
        >>> x = jnp.ones((2, 40, 64))
        >>> layer(x).shape
        (2, 40, 64)
        >>> layer.init_cache((2, 1024, 64))
        >>> prompt, token = layer(x[:, :39], decode=True), layer(x[:, 39:], decode=True)
        >>> prompt.shape, token.shape
        ((2, 39, 64), (2, 1, 64))

    Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025).
    """

    op, step = staticmethod(linear.kda), staticmethod(linear.kda_step)
    output_activation = "sigmoid"

    def _make_gates(self, project):
        N, H, D = self.num_heads, self.head_dim, self.value_head_dim
        self.decay_down, self.decay_up = project(self.in_features, D), project(D, (N, H))
        self.gate_down, self.gate_up = project(self.in_features, D), project(D, (N, D))

    def _decay_shape(self):
        return self.num_heads, self.head_dim

    def _decay(self, x):
        return self.decay_up(self.decay_down(x))

    def _output_gate(self, x):
        return self.gate_up(self.gate_down(x))


class GatedDeltaNet(_DeltaLayer):
    """Gated DeltaNet: a state a head that decays by one number a token.

    As `KimiDeltaAttention`, with a decay and an output gate that are projections of full rank, and SiLU in the output
    gate.

    Args:
        num_heads, in_features, ..., rngs: as in `KimiDeltaAttention`.

    Raises:
        ValueError: head counts or feature counts that do not divide, an unknown gate.

    Example:
        >>> import jax.numpy as jnp
        >>> import jattn.nnx
        >>> from flax import nnx
        >>> layer = jattn.nnx.GatedDeltaNet(num_heads=4, in_features=64, num_qk_heads=2, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 40, 64))).shape
        (2, 40, 64)

    Sources: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024); Qwen3-Next for
    fewer heads of query and key.
    """

    op, step = staticmethod(linear.gated_delta_rule), staticmethod(linear.gated_delta_rule_step)
    output_activation = "silu"

    def _make_gates(self, project):
        self.decay = project(self.in_features, self.num_heads)
        self.output_gate = project(self.in_features, (self.num_heads, self.value_head_dim))

    def _decay_shape(self):
        return (self.num_heads,)

    def _decay(self, x):
        return self.decay(x)

    def _output_gate(self, x):
        return self.output_gate(x)


class ShortConv(nnx.Module):
    """A causal convolution of every channel by itself over the last tokens, and SiLU, of heads `[B, T, N, H]`."""

    def __init__(self, width, kernel_init, param_dtype, channels, *, rngs):
        self.kernel = nnx.Param(kernel_init(rngs.params(), (channels, width), param_dtype))
        self.cached_inputs = nnx.data(None)

    def init_cache(self, sequences, dtype):
        channels, width = self.kernel.shape
        self.cached_inputs = nnx.Cache(jnp.zeros((sequences, width - 1, channels), dtype))

    def __call__(self, x, segments, places):
        flat, kernel = x.reshape(*x.shape[:2], math.prod(x.shape[2:])), self.kernel[...]
        whole = functools.partial(linear.short_conv, weight=kernel, activation="silu")
        if places is None:
            return whole(flat, segment_ids=segments).reshape(x.shape)

        def step(flat, state, **where):
            return linear.short_conv_step(flat, kernel, state, activation="silu", **where)

        y, self.cached_inputs[...] = places.advance(step, whole, (flat,), self.cached_inputs[...])
        return y.reshape(x.shape)


class GatedNorm(nnx.Module):
    """RMSNorm over the channels of each head, with one scale for all, times an activated gate, in float32 (float64)."""

    def __init__(self, features, epsilon, activation, param_dtype):
        self.scale = nnx.Param(jnp.ones(features, param_dtype))
        self.epsilon, self.activation = epsilon, activation

    def __call__(self, x, gate):
        wide = accumulator(x.dtype)
        y, gate = x.astype(wide), gate.astype(wide)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.epsilon) * self.scale[...].astype(wide)
        return (y * getattr(jax.nn, self.activation)(gate)).astype(x.dtype)


class _Places:
    """Which tokens of a call exist, and which rows of the cache their sequences have."""

    def __init__(self, lengths, indices):
        self.lengths, self.indices = lengths, indices

    def advance(self, step, whole, tokens, pool):
        """`(out, pool)`: a few tokens by `step`, more by `whole`."""
        if tokens[0].shape[1] <= LARGEST_STEP:
            return step(*tokens, pool, state_indices=self.indices, query_seq_lengths=self.lengths)
        if self.indices is None:
            out, new = self._run(whole, tokens, pool, self.lengths)
            return out, new.astype(pool.dtype)
        P, (B, T) = len(pool), tokens[0].shape[:2]
        indices = _check.array(self.indices, "state_indices").astype(jnp.int32)
        at = jnp.where((indices >= 0) & (indices < P), indices, P)
        lengths = jnp.full((B,), T, jnp.int32) if self.lengths is None else self.lengths
        state = jnp.take(pool, at, axis=0, mode="fill", fill_value=0)
        out, new = self._run(whole, tokens, state, jnp.where(at < P, lengths, 0))
        return out, pool.at[at].set(new.astype(pool.dtype), mode="drop")

    @staticmethod
    def _run(whole, tokens, state, lengths):
        if lengths is None:
            return whole(*tokens, initial_state=state, return_final_state=True)
        # Packed, with what is behind the length of a sequence as a sequence of nobody's.
        B, T = tokens[0].shape[:2]
        starts = T * jnp.arange(B, dtype=jnp.int32)
        cu = jnp.concatenate([jnp.stack([starts, starts + lengths], axis=1).reshape(-1), jnp.array([B * T], jnp.int32)])
        out, new = whole(
            *(x.reshape(B * T, *x.shape[2:]) for x in tokens), cu_seqlens=cu, return_final_state=True,
            initial_state=jnp.stack([state, jnp.zeros_like(state)], axis=1).reshape(2 * B, *state.shape[1:]),
        )  # fmt: skip
        out = out.reshape(B, T, *out.shape[1:])
        exists = (jnp.arange(T, dtype=jnp.int32) < lengths[:, None]).reshape(B, T, *[1] * (out.ndim - 2))
        return jnp.where(exists, out, 0), new[::2]


def _initial_rates(key, heads, gate, dtype):
    """A_log: rates between 1 and 16 for the softplus gate, 1 for the bounded one."""
    if gate == "bounded":
        return jnp.zeros(heads, dtype)
    return jnp.log(jax.random.uniform(key, (heads,), dtype, 1.0, 16.0))


def _initial_steps(key, shape, dtype):
    """dt_bias: what softplus makes steps between 0.001 and 0.1 of, evenly in their logarithm."""
    low, high = math.log(1e-3), math.log(1e-1)
    steps = jnp.exp(jax.random.uniform(key, shape, dtype, low, high))
    return steps + jnp.log(-jnp.expm1(-steps))
