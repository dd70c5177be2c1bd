"""Who computes attention on a GPU: each says what it cannot do, so that no call is a wrong one.

A provider takes a case and gives a function of (query, key, value, arrays), or raises Refused with the reason.
"""

import importlib

import jax

import jattn

SCORES_LIMIT = 10e9  # bytes of float32 scores that jax.nn's xla implementation may hold
_MASKED = ("documents 1024", "prefix 512", "blocks 25%")
_BIASED = ("bias [T,S]", "bias [1,S]")


class Refused(Exception):
    pass


def _require(condition, reason):
    if not condition:
        raise Refused(reason)


def _module(name):
    try:
        return importlib.import_module(name)
    except Exception as error:  # a peer built for another machine fails in its own way
        raise Refused(f"cannot be imported: {type(error).__name__}: {error}") from None


def jattn_(case):
    return lambda q, k, v, arrays: jattn.attention(q, k, v, **case.keywords(arrays))


def _shared(case, arrays):
    """The keywords of `jax.nn.dot_product_attention`: masks and bias have four axes there."""
    dense = {name: arrays[name][None, None] for name in ("mask", "bias") if name in arrays}
    lengths = {name: x for name, x in arrays.items() if name == "key_value_seq_lengths"}
    return case.shape.options | dense | lengths


def _jax_nn(implementation):
    def attention(q, k, v, keywords):
        return jax.nn.dot_product_attention(q, k, v, implementation=implementation, **keywords)

    return lambda case: lambda q, k, v, arrays: attention(q, k, v, _shared(case, arrays))


def cudnn(case):
    _require(case.feature in ("", "key lengths", *_MASKED, *_BIASED), f"has no {case.feature}")
    return _jax_nn("cudnn")(case) if case.shape.H == case.shape.D else _cudnn_with_value_width(case)


def _cudnn_with_value_width(case):
    """jax.nn wants one head dim; what it calls does not."""
    _require(not case.feature and not case.shape.window, "H != D with masks of its own is not tried")
    fused = _module("jax._src.cudnn.fused_attention_stablehlo")
    mask = fused.MaskType.CAUSAL if case.shape.causal else fused.MaskType.NO_MASK

    def attention(q, k, v, arrays):
        out = fused.dot_product_attention(q, k, v, scale=case.shape.H**-0.5, mask_type=mask)
        return out[0] if isinstance(out, tuple | list) else out

    return attention


def xla(case):
    shape = case.shape
    size = 4 * shape.B * shape.N * shape.T * shape.S
    _require(size <= SCORES_LIMIT, f"would hold {size / 1e9:.0f} GB of scores")
    _require(shape.H == shape.D, f"takes one head dim, not ({shape.H}, {shape.D})")
    _require(case.feature in ("", "key lengths", *_MASKED, *_BIASED), f"has no {case.feature}")
    return _jax_nn("xla")(case)


def fa3(case):
    shape = case.shape
    _require(case.feature in ("", "documents 1024"), f"has no {case.feature}")
    _require(shape.H == shape.D, f"takes one head dim, not ({shape.H}, {shape.D})")
    _require(shape.H in (64, 128, 192, 256), f"takes no head dim {shape.H}")
    _require(shape.T == shape.S, "aligns causal masks to the last key")
    package = _module("dew_flash_attn")
    if case.feature:
        return _fa3_documents(case, package)
    window = shape.window or (-1, -1)
    return lambda q, k, v, arrays: package.flash_mha(q, k, v, is_causal=shape.causal, window_size=window)


def _fa3_documents(case, package):
    from benchmarks.cases import DOCUMENT

    shape = case.shape

    def attention(q, k, v, arrays):
        starts = jax.numpy.arange(0, shape.B * shape.S + 1, DOCUMENT, dtype=jax.numpy.int32)
        packed = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
        return package.flash_mha_varlen(*packed, starts, max_seqlen=DOCUMENT, is_causal=shape.causal).reshape(shape.out)

    return attention


def tokamax(case):
    _require(case.feature not in ("dropout 0.1", "lse", "ALiBi"), f"has no {case.feature}")
    package = _module("tokamax")
    cap = {"logits_soft_cap": 20.0} if case.feature == "soft cap 20" else {}

    def attention(q, k, v, arrays):
        return package.dot_product_attention(q, k, v, implementation="mosaic", **_shared(case, arrays), **cap)

    return attention


def jla(case):
    shape = case.shape
    _require(shape.causal, "is causal only")
    _require(case.feature in ("", "documents 1024"), f"has no {case.feature}")
    _require((shape.H, shape.D) in ((64, 64), (128, 128), (192, 128)), f"takes no head dims ({shape.H}, {shape.D})")
    _require(shape.window is None or shape.window[1] == 0, "has windows to the left only")
    package = _module("jla.ops.mosaic_gpu.attention")
    window = None if shape.window is None else shape.window[0] + 1

    def attention(q, k, v, arrays):
        return package.flash_attention(q, k, v, segment_ids=arrays.get("segment_ids"), sliding_window=window)

    return attention


PROVIDERS = {"jattn": jattn_, "fa3": fa3, "cudnn": cudnn, "tokamax": tokamax, "jla": jla, "xla": xla}


def build(name, case):
    """The provider's function for a case, or None with the reason printed."""
    try:
        return PROVIDERS[name](case)
    except Refused as reason:
        print(f"  {name} {reason}", flush=True)
        return None
