"""jattn: exact attention for JAX."""

from jattn import debug as debug
from jattn import masks as masks
from jattn import mods as mods
from jattn._version import __version__ as __version__
from jattn.attention import attention as attention
from jattn.explain import explain as explain
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
    "Quantized",
    "SequenceLayout",
    "allgather_attention",
    "attention",
    "debug",
    "dequantize",
    "empty",
    "explain",
    "hybrid_attention",
    "masks",
    "merge",
    "mods",
    "quantize",
    "ragged_attention",
    "ring_attention",
    "rope",
    "sequence_attention",
    "ulysses_attention",
]
