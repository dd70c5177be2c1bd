"""jattn: exact attention for JAX."""

from jattn import debug as debug
from jattn import linear as linear
from jattn import masks as masks
from jattn import mods as mods
from jattn._version import __version__ as __version__
from jattn.attention import attention as attention
from jattn.compressed import EntryIndex as EntryIndex
from jattn.compressed import EntrySource as EntrySource
from jattn.compressed import csa_attention as csa_attention
from jattn.compressed import grouped_output as grouped_output
from jattn.compressed import hca_attention as hca_attention
from jattn.compressed import window_indices as window_indices
from jattn.compressed_cache import CompressedCache as CompressedCache
from jattn.compressed_cache import Rows584 as Rows584
from jattn.compressed_tokens import CompressState as CompressState
from jattn.compressed_tokens import Rotary as Rotary
from jattn.compressed_tokens import YarnScaling as YarnScaling
from jattn.compressed_tokens import compress as compress
from jattn.compressed_tokens import visible_entries as visible_entries
from jattn.decode import decode_attention as decode_attention
from jattn.explain import explain as explain
from jattn.indexer import IndexerWeights as IndexerWeights
from jattn.indexer import hadamard as hadamard
from jattn.indexer import indexer_dequantize as indexer_dequantize
from jattn.indexer import indexer_kl as indexer_kl
from jattn.indexer import indexer_logits as indexer_logits
from jattn.indexer import indexer_project as indexer_project
from jattn.indexer import indexer_quantize as indexer_quantize
from jattn.indexer import indexer_scores as indexer_scores
from jattn.indexer import indexer_select as indexer_select
from jattn.indexer import topk_select as topk_select
from jattn.mla import MLAInputs as MLAInputs
from jattn.mla import MLAWeights as MLAWeights
from jattn.mla import mla_absorbed as mla_absorbed
from jattn.mla import mla_decode as mla_decode
from jattn.mla import mla_output as mla_output
from jattn.mla import mla_prefill as mla_prefill
from jattn.mla import mla_preprocess as mla_preprocess
from jattn.mla import mla_values as mla_values
from jattn.mla import pack_latent as pack_latent
from jattn.mla import unpack_latent as unpack_latent
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
from jattn.sequence_cache import sequence_append as sequence_append
from jattn.sequence_cache import sequence_decode_attention as sequence_decode_attention
from jattn.sequence_cache import sequence_paged_attention as sequence_paged_attention
from jattn.sequence_linear import sequence_linear_attention as sequence_linear_attention
from jattn.sparse import page_rows as page_rows
from jattn.sparse import sparse_attention as sparse_attention
from jattn.sparse import sparse_weights as sparse_weights

__all__ = [
    "CompressState",
    "CompressedCache",
    "EntryIndex",
    "EntrySource",
    "IndexerWeights",
    "LinearScaling",
    "Llama3Scaling",
    "MLAInputs",
    "MLAWeights",
    "OutOfPages",
    "PageAllocator",
    "PagedCache",
    "Quantized",
    "Rotary",
    "Rows584",
    "SequenceLayout",
    "YarnScaling",
    "allgather_attention",
    "append",
    "attention",
    "compress",
    "copy_pages",
    "csa_attention",
    "debug",
    "decode_attention",
    "dequantize",
    "empty",
    "explain",
    "gather",
    "grouped_output",
    "hadamard",
    "hca_attention",
    "hybrid_attention",
    "indexer_dequantize",
    "indexer_kl",
    "indexer_logits",
    "indexer_project",
    "indexer_quantize",
    "indexer_scores",
    "indexer_select",
    "linear",
    "masks",
    "merge",
    "mla_absorbed",
    "mla_decode",
    "mla_output",
    "mla_prefill",
    "mla_preprocess",
    "mla_values",
    "mods",
    "pack_latent",
    "page_rows",
    "paged_attention",
    "quantize",
    "ragged_attention",
    "ring_attention",
    "rope",
    "sequence_append",
    "sequence_attention",
    "sequence_decode_attention",
    "sequence_linear_attention",
    "sequence_paged_attention",
    "sparse_attention",
    "sparse_weights",
    "topk_select",
    "ulysses_attention",
    "unpack_latent",
    "visible_entries",
    "window_indices",
]
