"""The README's table of what each implementation runs, asked of the implementations themselves.

    ./run python docs/support_table.py      rewrites the table in README.md
"""

from pathlib import Path

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct as Array

import jattn
from jattn import _dispatch, masks, mods

README = Path(__file__).resolve().parents[1] / "README.md"
START, END = "<!-- support table: ./run python docs/support_table.py -->", "<!-- end of support table -->"


def ask(op, *arguments, **options):
    """name -> None or the reason for refusing this call on any machine, by every implementation of `op`."""
    with jax.enable_x64(True):
        problem = jattn.explain(*arguments, op=op, **options).problem
    return {name: _dispatch.why_not(problem, name) for name in _dispatch.names(op)}


def attention(dtype="bfloat16", T=1024, S=1024, N=8, K=8, H=128, D=128, **options):
    return ask("attention", *(Array(shape, dtype) for shape in ((2, T, N, H), (2, S, K, H), (2, S, K, D))), **options)


def ragged(**options):
    """8 sequences packed into 4096 rows."""
    return ask("ragged_attention", *[Array((4096, 8, 128), "bfloat16")] * 3, Array((9,), "int32"), **options)


def decode(stored="bfloat16", **options):
    """One query for each of 2 sequences, against contiguous caches of 1024."""
    cache = Array((2, 1024, 8, 128), stored)
    if stored != "bfloat16":
        cache = jattn.Quantized(cache, Array((2, 1024, 8), "float32"))
    return ask("decode_attention", Array((2, 1, 8, 128), "bfloat16"), cache, cache, Array((2,), "int32"), **options)


def paged(*packed, query=(2, 1, 8, 128), **options):
    """2 sequences in a pool of 128 pages of 16."""
    pages, tables, lengths = Array((128, 16, 8, 128), "bfloat16"), Array((2, 64), "int32"), Array((2,), "int32")
    cache = jattn.PagedCache(pages, pages, tables, lengths)
    return ask("paged_attention", Array(query, "bfloat16"), cache, *packed, **options)


def kda(dtype="bfloat16", H=128, **options):
    """2 sequences of 1024, or with `cu_seqlens` 8 packed into 4096; kernels take the same calls of all six ops."""
    tokens = (4096,) if "cu_seqlens" in options else (2, 1024)
    key, value, beta = (Array((*tokens, *heads), dtype) for heads in ((8, H), (8, 128), (8,)))
    return ask("linear.kda", key, key, value, key, beta, **options)


def kda_step(dtype="bfloat16", H=128):
    """One token of each of 2 sequences."""
    key, value, beta = (Array((2, 1, *heads), dtype) for heads in ((8, H), (8, 128), (8,)))
    return ask("linear.kda_step", key, key, value, key, beta, Array((2, 8, H, 128), "float32"))


def gain(score, b, n, t, s, value):
    return score * value


def stride(b, n, t, s):
    return (t - s) % 4 == 0


def rows():
    """(what is asked for, name -> None or reason); where nothing else is said, bfloat16, T = S, N = K, H = D = 128."""
    lengths, heads = Array((2,), "int32"), Array((8,), "float32")
    yield "bfloat16", attention()
    yield "float16", attention("float16")
    yield "float32", attention("float32")
    yield "float64", attention("float64")
    yield "grouped heads (N = 8, K = 2)", attention(K=2)
    yield "T = 17, S = 1000", attention(T=17, S=1000)
    yield "H = 192, D = 128", attention(H=192)
    yield "H = D = 40", attention(H=40, D=40)
    yield "causal", attention(is_causal=True)
    yield "window", attention(local_window_size=(255, 0))
    yield "lengths", attention(query_seq_lengths=lengths, key_value_seq_lengths=lengths)
    yield "query_offset, one a sequence", attention(query_offset=lengths, is_causal=True)
    yield "segment ids (packed documents)", attention(segment_ids=Array((2, 1024), "int32"))
    yield "prefix", attention(mask=masks.prefix(lengths))
    yield "block-sparse mask", attention(mask=masks.blocks(Array((8, 8), "bool"), 128))
    yield "predicate mask", attention(mask=masks.predicate(stride))
    yield "any bool mask", attention(mask=Array((2, 8, 1024, 1024), "bool"))
    yield "bias, with its gradient", attention(bias=Array((8, 1024, 1024), "float32"))
    yield "score_mod with arrays", attention(score_mod=mods.score_mod(gain, jnp.ones((8, 1, 1))))
    yield "relative_bias", attention(score_mod=mods.relative_bias(jnp.ones((8, 255))))
    yield "soft cap", attention(logits_soft_cap=30.0)
    yield "sinks", attention(sinks=heads)
    yield "dropout", attention(dropout_rate=0.1, dropout_key=Array((2,), "uint32"))
    yield "deterministic=True", attention(deterministic=True)
    yield "`ragged_attention`", ragged()
    yield "`ragged_attention`, causal", ragged(is_causal=True)
    yield "`decode_attention`", decode()
    yield "`decode_attention`, int8 cache", decode("int8")
    yield "`decode_attention`, fp8 cache", decode("float8_e4m3fn")
    yield "`paged_attention`", paged()
    yield "`paged_attention`, packed chunks", paged(Array((3,), "int32"), query=(600, 8, 128))
    yield "`paged_attention`, tree", paged(query=(2, 8, 8, 128), mask=masks.tree([-1, 0, 0, 1, 1, 2, 2, 3]))
    yield "`jattn.linear`, all six ops", kda()
    yield "`jattn.linear`, float16", kda("float16")
    yield "`jattn.linear`, float32", kda("float32")
    yield "`jattn.linear`, H = 40", kda(H=40)
    yield "`jattn.linear`, H = 192", kda(H=192)
    yield "`jattn.linear`, packed", kda(cu_seqlens=Array((9,), "int32"))
    yield "`jattn.linear`, segment ids", kda(segment_ids=Array((2, 1024), "int32"))
    yield "`jattn.linear`, checkpoints", kda(checkpoints=[64, 512])
    yield '`jattn.linear`, `mode="recurrent"`', kda(mode="recurrent")
    yield "`jattn.linear`, all six steps", kda_step()
    yield "`jattn.linear`, steps, float32", kda_step("float32")
    yield "`jattn.linear`, steps, H = 40", kda_step(H=40)


def table():
    """The Markdown between the two markers."""
    asked = list(rows())
    names = list(dict.fromkeys(name for _, answers in asked for name in answers))
    reasons = list(dict.fromkeys(reason for _, answers in asked for reason in answers.values() if reason))

    def cell(answers, name):
        reason = answers.get(name, "")
        return "yes" if reason is None else f"no ({reasons.index(reason) + 1})" if reason else "no"

    lines = [["call", *(f'`"{name}"`' for name in names)], ["---"] * (len(names) + 1)]
    lines += [[what, *(cell(answers, name) for name in names)] for what, answers in asked]
    notes = [f"{i}. {reason}" for i, reason in enumerate(reasons, 1)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), *([""] if notes else []), *notes])


def within(text):
    """`text` before the table, the table, and after it."""
    before, rest = text.split(START)
    old, after = rest.split(END)
    return before, old.strip(), after


def main():
    before, _, after = within(README.read_text())
    README.write_text(f"{before}{START}\n\n{table()}\n\n{END}{after}")


if __name__ == "__main__":
    main()
