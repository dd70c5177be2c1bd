"""Kimi Delta Attention, Gated DeltaNet, latent and compressed attention for `flax.linen`.

With `decode=True` the tokens of a call follow those in the collection `cache`, and are put into it: a prompt, a part of
it, or one token at a time. As in Flax, a call that finds no cache, such as `init`, makes an empty one, with as much
room as its inputs are long, and does not put its tokens in.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

import jattn.nnx
from jattn import _flax
from jattn.linen._bridge import Bridge
from jattn.nnx import delta

__all__ = [
    "CompressedSparseAttention",
    "GatedDeltaNet",
    "HeavilyCompressedAttention",
    "KimiDeltaAttention",
    "MultiHeadLatentAttention",
]

default_kernel_init = nn.initializers.lecun_normal()
zeros_init = nn.initializers.zeros_init()


class _DeltaLayer(Bridge):
    cache_fields = ("state_dtype",)

    num_heads: int
    qkv_features: int | None = None
    out_features: int | None = None
    num_qk_heads: int | None = None
    value_head_dim: int | None = None
    conv_kernel_size: int = 4
    gate: str = "softplus"
    lower_bound: float = -5.0
    beta_activation: str = "sigmoid"
    mode: str = "chunk"
    residuals: str = "save"
    implementation: str | None = None
    epsilon: float = 1e-6
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Any = default_kernel_init
    out_kernel_init: Any = None
    conv_kernel_init: Any = delta.conv_init
    bias_init: Any = zeros_init
    out_bias_init: Any = None
    use_bias: bool = False
    decode: bool = False
    state_dtype: Any = None

    @nn.compact
    def __call__(self, inputs, *, segment_ids=None, seq_lengths=None, state_indices=None):
        """The layer's output for every token.

        Args:
            inputs: `[*B, T, features]`.
            segment_ids: int `[*B, T]` or `[T]`: wherever it changes, state and convolutions start anew. Not with
                `decode`.
            seq_lengths: int `[*B]`, with `decode`: how many of the T tokens of each sequence there are; the others may
                hold anything, give output 0 before the projection, and are not remembered.
            state_indices: int `[B]`, with `decode`: the row of the cache that each sequence has, no two alike; None is
                row by row. A sequence whose index is negative or past the cache is left out.

        Returns:
            `[*B, T, out_features]`. With `decode` there are no derivatives for T up to 32.

        Raises:
            ValueError, TypeError: shapes and dtypes that do not fit, feature counts that do not divide.
        """
        return self.run(inputs, segment_ids=segment_ids, seq_lengths=seq_lengths, state_indices=state_indices)


class KimiDeltaAttention(_DeltaLayer):
    """Kimi Delta Attention: a state a head that decays by channel, instead of a cache that grows.

    The layer is `jattn.nnx.KimiDeltaAttention`, with its parameters under the same names.

    Args:
        num_heads, qkv_features, ..., use_bias: as there. Boxes of initialisers (`nn.with_partitioning`) are kept.
        decode: the tokens follow those in the collection `cache`, whose size does not depend on their number. A call
            that finds none, such as `init`, makes an empty one for its batch, and does not put its tokens in.
        state_dtype: of cached states: float32 (None; float64 for a float64 layer) or bfloat16, rounded once a call.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import jattn.linen
        >>> layer = jattn.linen.KimiDeltaAttention(num_heads=4, decode=True)
        >>> x = jnp.ones((2, 40, 64))
        >>> variables = layer.init(jax.random.key(0), x)
        >>> prompt, cache = layer.apply(variables, x[:, :39], mutable=["cache"])
        >>> token, cache = layer.apply(variables | cache, x[:, 39:], mutable=["cache"])
        >>> prompt.shape, token.shape
        ((2, 39, 64), (2, 1, 64))

    Source: Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture" (2025).
    """

    layer = jattn.nnx.KimiDeltaAttention


class GatedDeltaNet(_DeltaLayer):
    """Gated DeltaNet: a state a head that decays by one number a token.

    The layer is `jattn.nnx.GatedDeltaNet`, with its parameters under the same names.

    Args:
        num_heads, ..., state_dtype: as in `KimiDeltaAttention`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import jattn.linen
        >>> layer = jattn.linen.GatedDeltaNet(num_heads=4, num_qk_heads=2)
        >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 40, 64)))
        >>> y.shape
        (2, 40, 64)

    Sources: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule" (2024); Qwen3-Next for
    fewer heads of query and key.
    """

    layer = jattn.nnx.GatedDeltaNet


class MultiHeadLatentAttention(Bridge):
    """Multi-head latent attention (MLA), with an output gate if asked for.

    The layer is `jattn.nnx.MultiHeadLatentAttention`, with its parameters under the same names.

    Args:
        num_heads, qkv_features, ..., use_bias: as there. Boxes of initialisers (`nn.with_partitioning`) are kept.
        decode: the tokens follow those in the collection `cache`. A call that finds none, such as `init`, makes an
            empty one, with as much room as its inputs are long, and does not put its tokens in.
        page_size, num_pages: for a cache in pages, as in `MultiHeadAttention`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import jattn.linen
        >>> layer = jattn.linen.MultiHeadLatentAttention(num_heads=4, gated=True, decode=True)
        >>> x = jnp.ones((2, 40, 64))
        >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 1024, 64)))
        >>> prompt, cache = layer.apply(variables, x[:, :39], mutable=["cache"])
        >>> token, cache = layer.apply(variables | cache, x[:, 39:], mutable=["cache"])
        >>> prompt.shape, token.shape
        ((2, 39, 64), (2, 1, 64))

    Sources: DeepSeek-V2 (2024), section 2.1; Kimi K3 for the gate.
    """

    layer, cache_fields, fixed = jattn.nnx.MultiHeadLatentAttention, ("page_size", "num_pages"), {"keep_rngs": False}

    num_heads: int
    qkv_features: int | None = None
    latent_features: int | None = None
    rope_features: int | None = None
    query_latent_features: int | None = None
    value_head_dim: int | None = None
    gated: bool = False
    rope: Any = True
    scale: float | None = None
    epsilon: float = 1e-6
    is_causal: bool = True
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    implementation: str | None = None
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Any = default_kernel_init
    out_kernel_init: Any = None
    use_bias: bool = False
    decode: bool = False
    page_size: int | None = None
    num_pages: int | None = None

    def __post_init__(self):
        self.rope = _flax.rope_options(self.rope)  # hashable, as modules must be for nn.jit
        super().__post_init__()

    @nn.compact
    def __call__(
        self,
        inputs,
        *,
        mask=None,
        segment_ids=None,
        input_positions=None,
        deterministic=None,
        dropout_rng=None,
        seq_lengths=None,
        block_tables=None,
    ):
        """The layer's output for every token.

        Args:
            inputs: `[*B, T, features]`.
            mask: as in `MultiHeadAttention`; with `decode` a `jattn.masks` rule made of positions.
            segment_ids: int `[*B, T]`; a query sees keys of its own segment. Not with `decode`.
            input_positions: int `[*B, T]`, for rope; None counts from 0, or from the tokens that are in the cache.
            deterministic: True turns dropout off; None takes the field.
            dropout_rng: a jax.random key for dropout; None takes the stream `dropout`.
            seq_lengths: int `[*B]`, with `decode`: how many of the T tokens of each sequence there are; the others may
                hold anything, and are not remembered.
            block_tables: int `[B, W]`, for a cache in pages: entry w of row b is the page of tokens w · page_size and
                following of sequence b.

        Returns:
            `[*B, T, features]`. With `decode` there are no derivatives for few tokens, and what is behind the room in
            the cache is not kept and has no meaning: `jattn.debug.check_lengths` finds it in `cache_index`.

        Raises:
            ValueError, TypeError: shapes and dtypes that do not fit, feature counts that do not divide, dropout without
                `deterministic`. NotImplementedError: dropout with `decode`, positions without rope, `use_bias`.
        """
        dropout = {}
        if self.dropout_rate != 0.0:
            dropout["deterministic"] = nn.merge_param("deterministic", self.deterministic, deterministic)
            if not dropout["deterministic"]:
                key = self.make_rng("dropout") if dropout_rng is None else dropout_rng
                dropout["rngs"] = lambda: key
        return self.run(
            inputs, mask=mask, segment_ids=segment_ids, input_positions=input_positions, seq_lengths=seq_lengths,
            block_tables=block_tables, **dropout,
        )  # fmt: skip


class _CompressedLayer(Bridge):
    cache_fields = ("kv_format", "page_size")

    num_heads: int
    qkv_features: int | None = None
    out_features: int | None = None
    ratio: int = 4
    query_latent_features: int | None = None
    window: int = 128
    num_groups: int = 1
    group_features: int | None = None
    rotary: Any = None
    scale: float | None = None
    epsilon: float = 1e-6
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Any = default_kernel_init
    out_kernel_init: Any = None
    position_bias_init: Any = zeros_init
    decode: bool = False
    kv_format: str | None = None
    page_size: int = 64

    @nn.compact
    def __call__(self, inputs, *, seq_lengths=None, cu_seqlens=None):
        """The layer's output for every token.

        Args:
            inputs: `[*B, T, features]`, or packed `[T, features]` with `cu_seqlens`.
            seq_lengths: int `[*B]`: how many of the T tokens of each sequence there are; the others may hold anything,
                give output 0 and are not remembered.
            cu_seqlens: int `[M + 1]`, offsets of packed sequences. Not with `decode`.

        Returns:
            `[*B, T, out_features]`.

        Raises:
            ValueError, TypeError: shapes and dtypes that do not fit, feature counts that do not divide.
        """
        return self.run(inputs, seq_lengths=seq_lengths, cu_seqlens=cu_seqlens)


class CompressedSparseAttention(_CompressedLayer, kw_only=True):
    """Compressed sparse attention (CSA): the last tokens, and the entries that an indexer picks.

    The layer is `jattn.nnx.CompressedSparseAttention`, with its parameters under the same names.

    Args:
        num_heads, qkv_features, ..., top_k, index_heads, index_head_dim, index_format: as there. Boxes of initialisers
            (`nn.with_partitioning`) are kept.
        decode: the tokens follow those in the collection `cache`, a `jattn.CompressedCache`. A call that finds none,
            such as `init`, makes an empty one, with as much room as its inputs are long, and puts no tokens in.
        kv_format, page_size: None, or "v4_584" for window and entries in bytes, in pages of `page_size` rows.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import jattn.linen
        >>> layer = jattn.linen.CompressedSparseAttention(
        ...     num_heads=4, top_k=4, index_heads=4, index_head_dim=8, window=16, rotary=jattn.Rotary(8), decode=True)
        >>> x = jnp.ones((2, 40, 64))
        >>> variables = layer.init(jax.random.key(0), jnp.ones((2, 1024, 64)))
        >>> prompt, cache = layer.apply(variables, x[:, :39], mutable=["cache"])
        >>> token, cache = layer.apply(variables | cache, x[:, 39:], mutable=["cache"])
        >>> prompt.shape, token.shape
        ((2, 39, 64), (2, 1, 64))

    Source: DeepSeek-V4, compressed sparse attention.
    """

    layer = jattn.nnx.CompressedSparseAttention

    top_k: int
    index_heads: int
    index_head_dim: int
    index_format: str | None = None


class HeavilyCompressedAttention(_CompressedLayer):
    """Heavily compressed attention (HCA): the last tokens, and one entry for each complete block of tokens before.

    The layer is `jattn.nnx.HeavilyCompressedAttention`, with its parameters under the same names.

    Args:
        ratio: m, tokens a block.
        num_heads, ..., page_size: as in `CompressedSparseAttention`, without those of an indexer.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> import jattn.linen
        >>> layer = jattn.linen.HeavilyCompressedAttention(num_heads=4, ratio=8)
        >>> y, variables = layer.init_with_output(jax.random.key(0), jnp.ones((2, 40, 64)))
        >>> y.shape
        (2, 40, 64)

    Source: DeepSeek-V4, heavily compressed attention.
    """

    layer = jattn.nnx.HeavilyCompressedAttention

    ratio: int = 128
