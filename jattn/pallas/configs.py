"""Tile configurations of the kernels: what is legal, what was measured to be fastest, and a rule for the rest.

Keyed by compute capability and problem class, never by a marketing name. A row's comment holds its measurement.
"""

import dataclasses
import itertools

SHARED_MEMORY_BYTES = {(9, 0): 232_448}  # usable by one thread block
_RESERVED_BYTES = 1024  # barriers and alignment


def padded_width(width: int) -> int:
    """Columns that a head dim occupies in shared memory: whole slabs of 64."""
    return -(-width // 64) * 64


@dataclasses.dataclass(frozen=True)
class TileConfig:
    """How the forward kernel cuts the problem.

    Attributes:
        warpgroups: consumer warpgroups; each owns 64 query rows of a tile.
        block_k: keys per step, a multiple of 16.
        stages: key and value blocks in shared memory at once.
        cross_tile: start the next tile's first product with this tile's last one (needs a second query buffer).
        own_out: stage the output in memory of its own, else through the query's.
        lazy_rescale: rescale the accumulator only when the maximum grew by more than 2^8.
        edge_turns: the first and last product of a tile take turns between warpgroups too.
        release_after: share of a block's exponentials that come before its keys are released. The compiler puts the
            wait for the value product right behind that release, so this places the wait; 0 leaves it to the compiler.
        section_mb: keys and values, in MiB, that the tiles running at one time share in L2.
    """

    warpgroups: int = 2
    block_k: int = 128
    stages: int = 2
    cross_tile: bool = True
    own_out: bool = True
    lazy_rescale: bool = False
    edge_turns: bool = True
    release_after: float = 0.0
    section_mb: int = 16

    def __post_init__(self):
        if self.warpgroups not in (1, 2, 3):
            raise ValueError(f"warpgroups={self.warpgroups} must be 1, 2 or 3")
        if self.block_k % 16 or not 16 <= self.block_k <= 256:
            raise ValueError(f"block_k={self.block_k} must be a multiple of 16 of at most 256")
        if self.stages not in (2, 4):
            raise ValueError(f"stages={self.stages} must be 2 or 4")
        if self.cross_tile and not self.own_out:
            raise ValueError("cross_tile=True needs own_out=True: the query buffer holds the next tile")

    @property
    def rows(self) -> int:
        """Query rows of a tile."""
        return 64 * self.warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of (consumers, producer); their sum over the block stays within 65,536."""
        return {1: (240, 24), 2: (240, 24), 3: (160, 24)}[self.warpgroups]

    def shared_bytes(self, head_dim: int, value_dim: int) -> int:
        """Shared memory that 16-bit inputs of these head dims need."""
        h, d = padded_width(head_dim), padded_width(value_dim)
        queries = self.rows * h * (2 if self.cross_tile else 1)
        out = self.rows * d if self.own_out else 0
        return 2 * (queries + out + self.stages * self.block_k * (h + d)) + 4 * self.rows + _RESERVED_BYTES

    def accumulator_registers(self, value_dim: int) -> int:
        """Registers per thread of the score tile, the weights, and the accumulator."""
        return self.block_k // 2 + self.block_k // 4 + value_dim // 2

    def why_not(self, head_dim: int, value_dim: int, capability: tuple[int, int] = (9, 0)) -> str | None:
        """The reason why the forward kernel cannot run these head dims with this config, or None."""
        needed, available = self.shared_bytes(head_dim, value_dim), SHARED_MEMORY_BYTES[capability]
        if needed > available:
            return f"needs {needed} bytes of shared memory for head dims ({head_dim}, {value_dim}), over {available}"
        if not self.own_out and padded_width(value_dim) > padded_width(head_dim):
            return f"own_out=False needs a query as wide as the output, but {head_dim} < {value_dim}"
        if self.accumulator_registers(value_dim) > self.registers[0] - _OTHER_REGISTERS:
            return f"would spill: {self.accumulator_registers(value_dim)} registers for tiles"
        return None


@dataclasses.dataclass(frozen=True)
class BackwardConfig:
    """How the backward kernel cuts the problem.

    Attributes:
        block_q: queries per step, 64 or, for head dims to 64, 128.
        keys: of a tile, 128 or, for wide and for mixed head dims, 64.
        separate: form dp only when the weights are known, for want of registers.
        section_mb: queries, their cotangents and sums of dq, in MiB, that the tiles running at one time share in L2.
    """

    block_q: int = 64
    keys: int = 128
    separate: bool = False
    section_mb: int = 32

    WARPGROUPS = 2


def backward_config(
    head_dim: int, value_dim: int, *, features: int = 0, modifier: bool = False, dropout: bool = False,
    deterministic: bool = False, packed: bool = False,
) -> BackwardConfig:  # fmt: skip
    """The config of the backward kernel.

    Args:
        features: how many there are of bias, modifier, soft cap, dropout and a mask with a rule. Each needs registers.
    """
    widths = {padded_width(head_dim), padded_width(value_dim)}
    if widths not in ({64}, {128}):
        return BackwardConfig(keys=64)
    if widths == {64}:
        small = modifier or dropout or features >= 3 or (deterministic and packed)
        return BackwardConfig(block_q=64 if small else 128, separate=features > 0 and not small)
    return BackwardConfig(block_q=64, separate=modifier or dropout or features >= 3)


_OTHER_REGISTERS = 32  # scores, weights and accumulator of 128 registers fit 160 without spills

_FULL = dict(block_k=80, cross_tile=False, own_out=False, lazy_rescale=True)
# (capability, padded head dim, padded value dim, bounded) -> config; see docs/performance.md for the measurements.
_MEASURED: dict[tuple, TileConfig] = {
    ((9, 0), 64, 64, True): TileConfig(warpgroups=3, release_after=0.25),
    ((9, 0), 64, 64, False): TileConfig(warpgroups=3),
    ((9, 0), 128, 128, True): TileConfig(release_after=0.6),
    ((9, 0), 128, 128, False): TileConfig(
        block_k=176, cross_tile=False, own_out=False, edge_turns=False, release_after=0.75
    ),
    ((9, 0), 256, 256, True): TileConfig(**_FULL),
    ((9, 0), 256, 256, False): TileConfig(**_FULL),
}
# Below this query length, tiles of 192 rows leave multiprocessors idle: 2 warpgroups ran in 0.90 of the time of 3.
_SHORT = 2048
# A last block of 176 keys that is mostly empty costs more than blocks of 128: at 4096 keys (3% waste) 128 ran in 0.98
# of the time, at 16384 (1% waste) 176 did.
_WASTE = 1.02


def forward_config(
    head_dim: int, value_dim: int, *, query_length: int, key_length: int, bounded: bool, features: int = 0,
    capability=(9, 0),
) -> TileConfig:  # fmt: skip
    """The config of the forward kernel for a problem class.

    Args:
        bounded: whether the mask cuts keys off by their distance (causal, windows).
        features: how many there are of bias, modifier, soft cap, dropout and a mask with a rule. Each needs registers.
    """
    key = capability, padded_width(head_dim), padded_width(value_dim), bounded
    if features or key not in _MEASURED:
        return best_legal(head_dim, value_dim, features=features, capability=capability)
    measured = _MEASURED[key]
    if measured.block_k > 128 and -(-key_length // measured.block_k) * measured.block_k > _WASTE * key_length:
        return TileConfig(lazy_rescale=True, release_after=0.75)
    if measured.warpgroups == 3 and query_length < _SHORT:
        return dataclasses.replace(measured, warpgroups=2)
    return measured


def candidates() -> list[TileConfig]:
    """Every config worth considering, before it is known whether a problem can use it."""
    overlap = ((True, True), (False, True), (False, False))
    grid = itertools.product(range(32, 193, 16), overlap)
    return [TileConfig(block_k=k, cross_tile=cross, own_out=own, lazy_rescale=True) for k, (cross, own) in grid]


def best_legal(head_dim: int, value_dim: int, *, features: int = 0, capability=(9, 0)) -> TileConfig:
    """The largest legal block of keys up to 128, and with it the most overlap that fits. Three or more features at once
    spill with more than 64 keys, and 32 when the accumulator is wide."""
    limit = 128 if features < 3 else 64 if value_dim <= 128 else 32
    legal = [c for c in candidates() if c.block_k <= limit and c.why_not(head_dim, value_dim, capability) is None]
    return max(legal, key=lambda c: (c.block_k, c.cross_tile, c.own_out))
