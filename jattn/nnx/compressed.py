"""Compressed attention of DeepSeek-V4: a window of raw tokens and entries of blocks of tokens, in one softmax."""

import functools

import jax.numpy as jnp
from flax import nnx

from jattn._project import rms_norm
from jattn.compressed import EntryIndex, EntrySource, csa_attention, grouped_output, hca_attention
from jattn.compressed_cache import CompressedCache
from jattn.nnx._layer import CachedLayer, checked_lengths, default_kernel_init, heads, no_metadata, zeros_init

__all__ = ["CompressedSparseAttention", "HeavilyCompressedAttention"]


class _CompressedLayer(CachedLayer):
    """What both layers share; they differ in entries, and in who picks them."""

    def __init__(
        self,
        num_heads,
        in_features,
        qkv_features=None,
        out_features=None,
        *,
        ratio,
        query_latent_features=None,
        window=128,
        num_groups=1,
        group_features=None,
        rotary=None,
        scale=None,
        epsilon=1e-6,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init=default_kernel_init,
        out_kernel_init=None,
        position_bias_init=zeros_init,
        decode=None,
        kernel_metadata=no_metadata,
        out_kernel_metadata=no_metadata,
        rngs,
    ):
        self.num_heads, self.in_features = num_heads, in_features
        self.out_features = in_features if out_features is None else out_features
        self.head_dim = D = heads(num_heads, in_features, qkv_features)
        if num_heads % num_groups:
            raise ValueError(f"num_heads={num_heads} must be a multiple of num_groups={num_groups}")
        Q = in_features if query_latent_features is None else query_latent_features
        R = num_heads // num_groups * D if group_features is None else group_features
        self.query_latent_features, self.num_groups, self.group_features = Q, num_groups, R
        self.ratio, self.window, self.rotary = ratio, window, rotary
        self.scale = D**-0.5 if scale is None else scale
        self.epsilon, self.dtype, self.param_dtype, self.decode = epsilon, dtype, param_dtype, decode
        common = dict(use_bias=False, dtype=dtype, param_dtype=param_dtype, precision=precision, rngs=rngs)
        project = functools.partial(
            nnx.LinearGeneral, kernel_init=kernel_init, kernel_metadata=kernel_metadata, **common
        )
        # Flax's module for its parameter; its norm does not run in 16 bits under strict dtype promotion.
        norm = functools.partial(nnx.RMSNorm, epsilon=epsilon, param_dtype=param_dtype, rngs=rngs)
        out = functools.partial(
            nnx.LinearGeneral, kernel_init=out_kernel_init or kernel_init,
            kernel_metadata=out_kernel_metadata or kernel_metadata, **common,
        )  # fmt: skip
        self.query_down, self.query_norm, self.query_up = project(in_features, Q), norm(Q), project(Q, (num_heads, D))
        self.kv, self.kv_norm = project(in_features, D), norm(D)
        entries = functools.partial(
            Entries, project, norm, position_bias_init, param_dtype, in_features, ratio, self.overlap, rngs=rngs
        )
        self.entries = entries(D)
        self._make_indexer(project, entries)
        self.sinks = nnx.Param(jnp.zeros(num_heads, param_dtype))
        self.out_down = out(num_heads // num_groups * D, (num_groups, R))
        self.out_up = out(num_groups * R, self.out_features)
        self.cached = nnx.data(None)

    def __call__(self, inputs, *, seq_lengths=None, cu_seqlens=None, decode=None):
        """The layer's output for every token.

        Args:
            inputs: `[*B, T, in_features]`, or packed `[T, in_features]` with `cu_seqlens`.
            seq_lengths: int `[*B]`: how many of the T tokens of each sequence there are; the others may hold anything,
                give output 0 and are not remembered.
            cu_seqlens: int `[M + 1]`, offsets of packed sequences. Not with `decode`.
            decode: the tokens follow those in the cache, and are put into it: a prompt, a part of it, or one token at a
                time. None takes the constructor's.

        Returns:
            `[*B, T, out_features]`.

        Raises:
            ValueError, TypeError: shapes and dtypes that do not fit; `decode` without a cache.
        """
        decode = self.decoding(decode)
        if cu_seqlens is None:
            x, batch = self.checked(inputs)
            seq_lengths = checked_lengths(seq_lengths, batch, x.shape[1])
        elif inputs.ndim != 2 or decode:
            raise ValueError(
                f"cu_seqlens are for packed inputs [T, {self.in_features}] and no cache; inputs have shape "
                f"{inputs.shape}, decode={decode}"
            )
        else:
            x, batch = inputs, ()
        latent = rms_norm(self.query_down(x), self.query_norm.scale[...], self.epsilon)
        query = self.query_up(latent)
        query = rms_norm(query, jnp.ones((), query.dtype), self.epsilon)
        kv = rms_norm(self.kv(x), self.kv_norm.scale[...], self.epsilon)
        options = dict(
            scale=self.scale, window=self.window, sinks=self.sinks[...], rotary=self.rotary, eps=self.epsilon,
            seq_lengths=seq_lengths, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        cache = self.cached.get_value() if decode else None
        out = self._attend(query, kv, x, latent, cache, options)
        if decode:
            out, cache = out
            self.cached.set_value(cache)
        down = jnp.moveaxis(self.out_down.kernel[...], 1, 0).astype(out.dtype)
        y = grouped_output(out, down, self.out_up.kernel[...].astype(out.dtype))
        return y if cu_seqlens is not None else y.reshape(*batch, *y.shape[1:])

    def init_cache(self, input_shape, dtype=None, *, kv_format=None, page_size=64):
        """An empty cache, a `jattn.CompressedCache`.

        Args:
            input_shape: `(*batch, max_length, in_features)`, as in Flax. Tokens past max_length are not kept, and their
                output is that of a token that sees nothing.
            dtype: of the rows, that of the computation; None is the layer's.
            kv_format: None, or "v4_584": window and entries in bytes, in pages of `page_size` rows.
            page_size: of `kv_format`.

        Raises:
            ValueError: another number of features, sizes that the format has no room for.
        """
        B, max_length = self.cache_shape(input_shape)
        cache = CompressedCache.zeros(
            B, max_length, self.head_dim, ratio=self.ratio, overlap=self.overlap, window=self.window,
            dtype=self.cache_dtype(dtype), kv_format=kv_format, page=page_size,
            rotary_dim=0 if self.rotary is None else self.rotary.dim, **self._index_cache(),
        )  # fmt: skip
        self.cached = nnx.Cache(cache)

    def has_cache(self):
        """Whether `init_cache` was called."""
        return self.cached is not None


class CompressedSparseAttention(_CompressedLayer):
    """Compressed sparse attention (CSA): the last tokens, and the entries that an indexer picks.

    One row a token and one an entry serve all heads, as key and as value. No gradient reaches the indexer through the
    selection: its parameters, `index_query`, `index_weights` and `index_entries`, are trained by `jattn.indexer_kl`.

    Args:
        num_heads: N.
        in_features: of the inputs.
        qkv_features: N times the channels D of a query and a row; None is `in_features`.
        out_features: None is `in_features`.
        ratio: m, tokens a block; an entry is made of two blocks.
        top_k: entries that a query attends to.
        index_heads, index_head_dim: of the indexer.
        index_format: of `jattn.indexer_quantize`, for the indexer's queries and keys; None rounds nothing.
        query_latent_features: of the latent of the queries; None is `in_features`.
        window: tokens that are seen raw, a query's own included.
        num_groups, group_features: heads are projected in groups to so many numbers each, and those to the output; None
            is as many as a group has.
        rotary: a `jattn.Rotary` of everything in the layer, or None.
        scale: of the scores; None is D ** -0.5.
        epsilon: of the norms.
        dtype: of the computation, inferred from inputs and parameters if None.
        param_dtype, precision, kernel_init, out_kernel_init, kernel_metadata, out_kernel_metadata: as in
            `flax.nnx.MultiHeadAttention`; the layer has no biases.
        position_bias_init: of what is added to the scores of the tokens of a block, `[m, channels]`.
        decode: default of the call's argument; `init_cache` makes the cache.
        rngs: `nnx.Rngs`.

    Raises:
        ValueError: feature counts that do not divide.

    Example:
        >>> import jax.numpy as jnp
        >>> import jattn.nnx
        >>> from flax import nnx
        >>> layer = jattn.nnx.CompressedSparseAttention(
        ...     num_heads=4, in_features=64, top_k=4, index_heads=4, index_head_dim=8, window=16,
        ...     rotary=jattn.Rotary(8), rngs=nnx.Rngs(0))
        >>> x = jnp.ones((2, 40, 64))
        >>> layer(x).shape
        (2, 40, 64)
        >>> layer.init_cache((2, 1024, 64))
        >>> prompt, token = layer(x[:, :39], decode=True), layer(x[:, 39:], decode=True)
        >>> prompt.shape, token.shape
        ((2, 39, 64), (2, 1, 64))

    Source: DeepSeek-V4, compressed sparse attention.
    """

    overlap = True

    def __init__(
        self, num_heads, in_features, qkv_features=None, out_features=None, *, top_k, index_heads, index_head_dim,
        index_format=None, ratio=4, **options,
    ):  # fmt: skip
        self.top_k, self.index_heads, self.index_head_dim = top_k, index_heads, index_head_dim
        self.index_format = index_format
        super().__init__(num_heads, in_features, qkv_features, out_features, ratio=ratio, **options)

    def _make_indexer(self, project, entries):
        self.index_query = project(self.query_latent_features, (self.index_heads, self.index_head_dim))
        self.index_weights = project(self.in_features, self.index_heads)
        self.index_entries = entries(self.index_head_dim)

    def _attend(self, query, kv, x, latent, cache, options):
        weights = self.index_weights(x)
        factor = jnp.asarray((self.index_heads * self.index_head_dim) ** -0.5, weights.dtype)
        index = EntryIndex(self.index_query(latent), weights * factor, self.index_entries(x))
        return csa_attention(
            query, kv, self.entries(x), index, cache, top_k=self.top_k, index_format=self.index_format, **options
        )

    def _index_cache(self):
        return dict(index_dim=self.index_head_dim, index_format=self.index_format)


class HeavilyCompressedAttention(_CompressedLayer):
    """Heavily compressed attention (HCA): the last tokens, and one entry for each complete block of tokens before.

    Args:
        ratio: m, tokens a block.
        num_heads, in_features, ..., rngs: as in `CompressedSparseAttention`, without those of an indexer.

    Raises:
        ValueError: feature counts that do not divide.

    Example:
        >>> import jax.numpy as jnp
        >>> import jattn.nnx
        >>> from flax import nnx
        >>> layer = jattn.nnx.HeavilyCompressedAttention(num_heads=4, in_features=64, ratio=8, rngs=nnx.Rngs(0))
        >>> layer(jnp.ones((2, 40, 64))).shape
        (2, 40, 64)

    Source: DeepSeek-V4, heavily compressed attention.
    """

    overlap = False

    def __init__(self, num_heads, in_features, qkv_features=None, out_features=None, *, ratio=128, **options):
        super().__init__(num_heads, in_features, qkv_features, out_features, ratio=ratio, **options)

    def _make_indexer(self, project, entries):
        """There is none."""

    def _attend(self, query, kv, x, latent, cache, options):
        return hca_attention(query, kv, self.entries(x), cache, **options)

    def _index_cache(self):
        return {}


class Entries(nnx.Module):
    """What entries of `channels` are made of: the projections, position bias and norm of `jattn.compress`."""

    def __init__(self, project, norm, position_bias_init, param_dtype, features, ratio, overlap, channels, *, rngs):
        width = 2 * channels if overlap else channels
        self.kv, self.gate = project(features, width), project(features, width)
        self.position_bias = nnx.Param(position_bias_init(rngs.params(), (ratio, width), param_dtype))
        self.norm = norm(channels)

    def __call__(self, x):
        return EntrySource(self.kv(x), self.gate(x), self.position_bias[...], self.norm.scale[...])
