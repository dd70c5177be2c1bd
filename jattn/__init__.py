"""jattn: exact attention for JAX."""

from jattn import debug as debug
from jattn import masks as masks
from jattn import mods as mods
from jattn._version import __version__ as __version__
from jattn.attention import attention as attention
from jattn.decode import decode_attention as decode_attention
from jattn.explain import explain as explain
from jattn.paged import PagedCache as PagedCache
from jattn.paged import append as append
from jattn.paged import copy_pages as copy_pages
from jattn.paged import gather as gather
from jattn.paged import paged_attention as paged_attention
from jattn.pages import OutOfPages as OutOfPages
from jattn.pages import PageAllocator as PageAllocator
from jattn.partials import empty as empty
from jattn.partials import merge as merge
from jattn.quantize import Quantized as Quantized
from jattn.quantize import dequantize as dequantize
from jattn.quantize import quantize as quantize
from jattn.ragged import ragged_attention as ragged_attention
from jattn.rope import LinearScaling as LinearScaling
from jattn.rope import Llama3Scaling as Llama3Scaling
from jattn.rope import rope as rope
from jattn.sequence import SequenceLayout as SequenceLayout
from jattn.sequence import allgather_attention as allgather_attention
from jattn.sequence import hybrid_attention as hybrid_attention
from jattn.sequence import ring_attention as ring_attention
from jattn.sequence import sequence_attention as sequence_attention
from jattn.sequence import ulysses_attention as ulysses_attention

__all__ = [
    "LinearScaling",
    "Llama3Scaling",
    "OutOfPages",
    "PageAllocator",
    "PagedCache",
    "Quantized",
    "SequenceLayout",
    "allgather_attention",
    "append",
    "attention",
    "copy_pages",
    "debug",
    "decode_attention",
    "dequantize",
    "empty",
    "explain",
    "gather",
    "hybrid_attention",
    "masks",
    "merge",
    "mods",
    "paged_attention",
    "quantize",
    "ragged_attention",
    "ring_attention",
    "rope",
    "sequence_attention",
    "ulysses_attention",
]
