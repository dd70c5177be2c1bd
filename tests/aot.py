"""Compiles a jitted function for an H200 on a machine without a GPU, and reads what ptxas says about it.

Needs the `aot` dependency group. Without a driver the compiler still runs: `data/h200.txtpb` describes the card.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import tempfile

import jax

_TARGET = pathlib.Path(__file__).parent / "data" / "h200.txtpb"


@dataclasses.dataclass(frozen=True)
class Report:
    """What ptxas reported of one compilation. A run of more than one kernel keeps the worst of each number."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    serialized: bool
    text: str

    @property
    def clean(self) -> bool:
        return self.spill_bytes == 0 and self.stack_bytes == 0 and not self.serialized


def devices(count: int):
    """Descriptions of so many H200 of one machine, to compile for."""
    from jax.experimental import topologies

    description = _TARGET.read_text()
    return topologies.get_topology_desc(platform="cuda", target_config=description, topology=f"1x1x{count}").devices


def sharding():
    return jax.sharding.NamedSharding(jax.sharding.Mesh(devices(1), ("x",)), jax.sharding.PartitionSpec())


@contextlib.contextmanager
def _captured_output(path):
    """File descriptors 1 and 2 go to `path`: ptxas writes below Python."""
    saved = os.dup(1), os.dup(2)
    with open(path, "wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        try:
            yield
        finally:
            for number, descriptor in zip((1, 2), saved, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)


def compile_for_h200(function, *arguments, dump_ptx: bool = False, kernels: bool = True) -> Report | None:
    """Compiles `function` for `arguments` (anything with a shape and dtype) and returns the ptxas report, or None for a
    function without Mosaic `kernels`.

    Raises:
        RuntimeError: nothing was compiled by ptxas, or the compiler failed.
    """
    placed = sharding()
    structs = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placed) for a in arguments]
    flags = {"MOSAIC_GPU_DUMP_PTXAS": "1"} | ({"MOSAIC_GPU_DUMP_PTX": "1"} if dump_ptx else {})
    before = {key: os.environ.get(key) for key in flags}
    with tempfile.NamedTemporaryFile(suffix=".log") as log:
        os.environ.update(flags)
        try:
            with _captured_output(log.name):
                jax.jit(function).lower(*structs).compile()
        finally:
            for key, value in before.items():
                os.environ.pop(key) if value is None else os.environ.update({key: value})
        text = pathlib.Path(log.name).read_text(errors="replace")
    return parse(text) if kernels else None


def parse(text: str) -> Report:
    """The report in ptxas' output.

    Raises:
        RuntimeError: there is none.
    """
    registers = [int(x) for x in re.findall(r"Used (\d+) registers", text)]
    if not registers:
        raise RuntimeError(f"ptxas reported nothing: {text[-2000:]!r}")
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    return Report(
        registers=max(registers),
        spill_bytes=max(int(stores) + int(loads) for _, stores, loads in frames),
        stack_bytes=max(int(stack) for stack, _, _ in frames),
        serialized="serialized" in text,
        text=text,
    )
