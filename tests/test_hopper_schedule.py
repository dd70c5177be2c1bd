"""The schedule table and the tile configs of the Hopper kernels."""

import numpy as np
import pytest

from jattn.pallas import configs, schedule


@pytest.mark.parametrize("pairs, tiles, blocks", [(1, 1, 1), (64, 32, 132), (6, 5, 30), (7, 9, 4)])
@pytest.mark.parametrize("causal", [False, True])
def test_every_tile_is_worked_on_once(pairs, tiles, blocks, causal):
    costs = tuple(float(t + 1 if causal else tiles) for t in range(tiles))
    section = schedule.section_size(pairs, 1, 1 << 20, 4 << 20)
    table = schedule.table(pairs, costs, section, blocks)
    items, counts = table[:-2], table[-2]
    assert sorted(items[items >= 0]) == list(range(pairs * tiles))
    assert (counts >= 1).all() and counts.sum() == pairs * tiles
    for block in range(blocks):
        assert (items[: counts[block], block] >= 0).all() and (items[counts[block] :, block] < 0).all()


def test_causal_work_is_balanced():
    """FA3's shapes: dealing tiles in order leaves the busiest block 26% over the mean."""
    costs = tuple(float(t + 1) for t in range(32))
    table = schedule.table(64, costs, schedule.section_size(64, 1, 2 << 20, 16 << 20), 132)
    items = table[:-2]
    time = np.where(items >= 0, np.asarray(costs)[items % 32] + schedule.TILE_OVERHEAD, 0).sum(0)
    assert time.max() < 1.02 * time.mean()


def test_huge_grids_are_dealt_without_simulation():
    table = schedule.table(8, tuple(float(t + 1) for t in range(8193)), 1, 132)
    assert np.array_equal(np.sort(table[:-2][table[:-2] >= 0]), np.arange(8 * 8193))


@pytest.mark.parametrize(
    "groups, copies, tiles, section, blocks",
    [(1, 1, 1, 1, 1), (2, 3, 5, 3, 7), (1, 8, 40, 2, 132), (4, 16, 32, 8, 132)],
)
def test_tiles_of_run_time_cost_are_dealt_once_and_evenly(groups, copies, tiles, section, blocks):
    costs = np.random.default_rng(0).integers(0, 9, (groups, tiles)).astype(np.int32)
    costs[0, 0] = 9
    table = np.asarray(schedule.deal(costs, copies, section, blocks))
    items, counts = table[:-2], table[-2]
    lists = [items[: counts[b], b] for b in range(blocks)]
    each = np.repeat(costs, copies, axis=0).reshape(-1)
    existing, worked = np.flatnonzero(each), np.concatenate(lists)
    assert set(existing) <= set(worked) and len(worked) == max(len(existing), blocks)
    assert all((np.diff(x // tiles // section) >= 0).all() for x in lists)
    time = np.array([each[x].sum() for x in lists])
    assert time.max() <= time.mean() + 9


@pytest.mark.parametrize("group", [1, 4])
def test_sections_divide_the_pairs(group):
    for pairs in (group, 6 * group, 16 * group):
        assert pairs % schedule.section_size(pairs, group, 3 << 20, 16 << 20) == 0


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(warpgroups=4), "warpgroups=4"),
        (dict(block_k=72), "block_k=72"),
        (dict(stages=3), "stages=3"),
        (dict(cross_tile=True, own_out=False), "own_out"),
    ],
)
def test_illegal_configs_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        configs.TileConfig(**changes)


def test_configs_say_what_does_not_fit():
    assert "shared memory" in configs.TileConfig(block_k=176).why_not(128, 128)
    assert "own_out" in configs.TileConfig(cross_tile=False, own_out=False, block_k=64).why_not(64, 128)
    assert "spill" in configs.TileConfig(warpgroups=3, block_k=144).why_not(64, 64)


@pytest.mark.parametrize("features", [0, 1, 3])
@pytest.mark.parametrize("bounded", [False, True])
def test_every_head_dim_has_a_legal_config(features, bounded):
    for head in range(8, 257, 8):
        for value in {head, 64, 128, 256}:
            for length in (1, 4096, 16384):
                config = configs.forward_config(
                    head, value, query_length=length, key_length=length, bounded=bounded, features=features
                )
                assert config.why_not(head, value) is None
