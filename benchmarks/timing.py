"""Wall time of compiled functions, measured in turns."""

import statistics
import time

import jax


def seconds(function):
    """One call, its result waited for."""
    start = time.perf_counter()
    jax.block_until_ready(function())
    return time.perf_counter() - start


def interleaved(functions, repeats=9, budget=60.0):
    """The median seconds of each of `functions`: name -> function without arguments, called once already.

    Every round calls each once, so that whatever else the machine does meets all of them alike. Rounds stop after
    `repeats` or, from the third on, when `budget` seconds are over.
    """
    taken = {name: [] for name in functions}
    end = time.perf_counter() + budget
    for number in range(repeats):
        if number >= 3 and time.perf_counter() > end:
            break
        for name, function in functions.items():
            taken[name].append(seconds(function))
    return {name: statistics.median(times) for name, times in taken.items()}
