"""The gallery of masks: docs/gallery.md and docs/gallery.png, drawn by the masks themselves.

`./run python docs/gallery.py` rewrites both.
"""

import hashlib
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
T, S = 24, 24

# What the lines below name.
SETUP = """\
import jax.numpy as jnp
from jattn import masks

documents = jnp.array([0] * 9 + [1] * 5 + [2] * 10)  # which document each of 24 tokens belongs to
drafts = jnp.array([-1, 0, 0, 1, 1, 2, 2, 3])        # the parent of each draft token
kept = jnp.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool)
entries = jnp.zeros((24, 24), bool).at[::3, ::5].set(True)"""

# (name, code, sentence, and T, S, query_offset where they are not 24, 24, 0)
MASKS = [
    ("Causal", "masks.causal()", "A query sees the keys up to its own position."),
    (
        "The last queries of a sequence",
        "masks.causal()",
        "With `query_offset=16`, eight queries stand at the end of 24 keys, as in a chunk of a prompt.",
        (8, 24, 16),
    ),
    ("Window", "masks.window(4)", "A query sees the keys at a distance of at most four, on both sides."),
    (
        "Sliding window",
        "masks.causal() & masks.window(5, 0)",
        "A query sees its own position and the five before it: local attention of a language model.",
    ),
    (
        "Look ahead",
        "masks.window(None, 3)",
        "A bound that is None is no bound: everything before, and three keys ahead, as in streaming speech.",
    ),
    (
        "Prefix",
        "masks.prefix(8)",
        "The first eight keys are seen by all, the others causally: a prefix language model.",
    ),
    ("Lengths", "masks.lengths(17)", "Only the first 17 keys exist; the others are padding, whatever they hold."),
    ("Segments", "masks.segments(documents)", "Packed documents do not see each other."),
    (
        "Causal documents",
        "masks.causal() & masks.segments(documents)",
        "Packed documents of a language model; equal numbers belong together.",
    ),
    (
        "Blocks",
        "masks.blocks(kept, 6)",
        "Block-sparse attention: one bool says whether a block of 6 x 6 is seen.",
    ),
    (
        "Causal blocks",
        "masks.causal() & masks.blocks(kept, 6)",
        "Chosen blocks, and within those on the diagonal the causal rule.",
    ),
    (
        "Dense",
        "masks.dense(entries)",
        "Any array of bools, for rules that are none; it needs memory for T x S of them.",
    ),
    (
        "Predicate",
        "masks.predicate(lambda b, n, t, s: (t - s) % 4 == 0)",
        "A rule of one's own, written for one element: dilated attention, every fourth key.",
    ),
    (
        "Tree",
        "masks.tree(drafts)",
        "Eight draft tokens with `query_offset=16`: each sees the 16 keys in the cache, its ancestors and itself.",
        (8, 24, 16),
    ),
    (
        "First keys and a window",
        "masks.causal() & (masks.window(5, 0) | masks.predicate(lambda b, n, t, s: s < 2))",
        "`|` joins: a window that never loses sight of the first two keys.",
    ),
    (
        "Not",
        "~masks.window(3)",
        "`~` turns a mask around: all keys but the near ones.",
    ),
]


def entries():
    """(name, code, sentence, mask, (T, S, query_offset)) of each mask."""
    names = {}
    exec(SETUP, names)
    for name, code, sentence, *shape in MASKS:
        yield name, code, sentence, eval(code, names), shape[0] if shape else (T, S, 0)


def page():
    """The text of gallery.md."""
    parts = [
        "# Masks",
        "<!-- written by docs/gallery.py -->",
        "Every mask of `jattn.masks`, as `mask.draw` and `mask.plot` draw it. Rows are queries, columns are keys, and\n"
        "what is filled is seen. A mask is the argument `mask=` of an op; tiles that `mask.classify` finds hidden are\n"
        "skipped.",
        "![the masks of this page](gallery.png)",
        f"The lines below are evaluated after these:\n\n```python\n{SETUP}\n```",
    ]
    for name, code, sentence, mask, (queries, keys, offset) in entries():
        where = f"{queries}, {keys}" + (f", query_offset={offset}" if offset else "")
        drawn = mask.draw(queries, keys, offset).rsplit("\n", 1)[0]  # without the legend, which the page has once
        parts += [f"## {name}", sentence, f"```python\n{code}\n```", f"`.draw({where})`:\n\n```text\n{drawn}\n```"]
    return "\n\n".join(parts) + "\n"


def fingerprint():
    """Of what the picture shows, which it carries: names and elements of all masks."""
    found = hashlib.sha256()
    for name, _, _, mask, shape in entries():
        found.update(f"{name} {shape}".encode() + np.packbits(np.asarray(mask.materialize(*shape))).tobytes())
    return found.hexdigest()


def picture(path):
    """Writes gallery.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(4, 4, figsize=(9, 9.6), layout="constrained")
    for axes, (name, _, _, mask, shape) in zip(grid.flat, entries(), strict=True):
        mask.plot(*shape, ax=axes)
        axes.set_title(name, fontsize=9)
        axes.set_aspect("equal")
        axes.set(xlabel="", ylabel="", xticks=range(0, shape[1], 8), yticks=range(0, shape[0], 8))
    figure.supxlabel("key s")
    figure.supylabel("query t")
    figure.savefig(path, dpi=80, metadata={"Description": fingerprint(), "Software": None})
    pyplot.close(figure)


def main():
    (HERE / "gallery.md").write_text(page())
    picture(HERE / "gallery.png")


if __name__ == "__main__":
    main()
