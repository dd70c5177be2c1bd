"""jattn in `flax.nnx`: an `attention_fn` for Flax's own modules, and layers on jattn's ops."""

from jattn.nnx.attention import MultiHeadAttention as MultiHeadAttention
from jattn.nnx.attention import attention_fn as attention_fn
from jattn.nnx.attention import make_attention_fn as make_attention_fn
from jattn.nnx.compressed import CompressedSparseAttention as CompressedSparseAttention
from jattn.nnx.compressed import HeavilyCompressedAttention as HeavilyCompressedAttention
from jattn.nnx.delta import GatedDeltaNet as GatedDeltaNet
from jattn.nnx.delta import KimiDeltaAttention as KimiDeltaAttention
from jattn.nnx.latent import MultiHeadLatentAttention as MultiHeadLatentAttention

__all__ = [
    "CompressedSparseAttention",
    "GatedDeltaNet",
    "HeavilyCompressedAttention",
    "KimiDeltaAttention",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "attention_fn",
    "make_attention_fn",
]
