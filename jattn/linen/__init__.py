"""jattn in `flax.linen`: an `attention_fn` for Flax's own modules, and layers on jattn's ops."""

from jattn.linen.attention import MultiHeadAttention as MultiHeadAttention
from jattn.linen.attention import MultiHeadDotProductAttention as MultiHeadDotProductAttention
from jattn.linen.attention import attention_fn as attention_fn
from jattn.linen.attention import make_attention_fn as make_attention_fn
from jattn.linen.layers import CompressedSparseAttention as CompressedSparseAttention
from jattn.linen.layers import GatedDeltaNet as GatedDeltaNet
from jattn.linen.layers import HeavilyCompressedAttention as HeavilyCompressedAttention
from jattn.linen.layers import KimiDeltaAttention as KimiDeltaAttention
from jattn.linen.layers import MultiHeadLatentAttention as MultiHeadLatentAttention

__all__ = [
    "CompressedSparseAttention",
    "GatedDeltaNet",
    "HeavilyCompressedAttention",
    "KimiDeltaAttention",
    "MultiHeadAttention",
    "MultiHeadDotProductAttention",
    "MultiHeadLatentAttention",
    "attention_fn",
    "make_attention_fn",
]
