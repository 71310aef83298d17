"""The reference step with NumPy in single precision, on one thread or in processes.

Samples are simulated in chunks, in which each op is a row, contiguous over samples. Durations are
drawn for a few ops at a time. The row of an op's end is reused when no other op waits for it, so
that a chunk fits in the cache of a core. Every operation writes into an existing array.

Normal variates take most of the time. NumPy draws its own one by one, by a ziggurat. Its uniforms
are cheap, and its logarithms, sines and cosines use vector instructions. So the Box-Muller
transform is about three times as fast, and it is the default. Of NumPy's generators, SFC64 is the
fastest.
"""

import functools as ft
from concurrent.futures import ProcessPoolExecutor

import numpy as np

from ._graph import SIGMA, Graph


CHUNK = 8192
"""Samples per chunk, at most."""

ROWS = 8
"""Ops whose durations are drawn together; an even number."""


def makespans(
    graph: Graph,
    num_samples: int,
    seed: int | np.random.SeedSequence,
    *,
    box_muller: bool = True,
) -> np.ndarray:
    """The makespans of `num_samples` steps, on one thread.

    **Arguments:**

    - `graph`, `num_samples`, `seed`: the step, how often it runs, and the seed of the draws.
    - `box_muller`: whether normal variates are made of uniforms or, with `False`, are those of
        `Generator.standard_normal`.
    """
    # As many chunks, of one size: the last one is simulated whole too.
    chunk = -(-num_samples // -(-num_samples // CHUNK))
    rng = np.random.Generator(np.random.SFC64(seed))
    # The exponential of a normal has the median one, so its mean is not.
    scale = (np.exp(-(SIGMA**2) / 2) * np.array(graph.means)[:, None]).astype(np.float32)
    row_of, num_rows = _assign_rows(graph)
    waits = [[row_of[p] for p in before] for before in graph.predecessors]
    ends = list(np.empty((num_rows, chunk), np.float32))
    durations = np.empty((ROWS, chunk), np.float32)
    scratch = np.empty((ROWS // 2, chunk), np.float32)
    result = np.empty(num_samples, np.float32)
    for begin in range(0, num_samples, chunk):
        for op, (row, before) in enumerate(zip(row_of, waits, strict=True)):
            if op % ROWS == 0:
                _draw(rng, durations, scratch if box_muller else None)
                block = durations[: graph.num_ops - op]
                np.multiply(block, scale[op : op + ROWS], out=block)
            _end(ends, row, before, durations[op % ROWS])
        part = result[begin : begin + chunk]
        part[:] = ends[row_of[-1]][: len(part)]
    return result


def makespans_in(
    pool: ProcessPoolExecutor, graph: Graph, num_samples: int, seed: int, *, box_muller: bool = True
) -> np.ndarray:
    """The same as `makespans`, with equal parts simulated by two processes."""
    sizes = [num_samples // 2, num_samples - num_samples // 2]
    of_part = ft.partial(makespans, graph, box_muller=box_muller)
    return np.concatenate(list(pool.map(of_part, sizes, np.random.SeedSequence(seed).spawn(2))))


def _draw(rng: np.random.Generator, out: np.ndarray, scratch: np.ndarray | None) -> None:
    """Fills an array with log-normal variates of median one; a scratch array means Box-Muller."""
    if scratch is None:
        rng.standard_normal(dtype=np.float32, out=out)
        np.multiply(out, np.float32(SIGMA), out=out)
    else:
        rng.random(dtype=np.float32, out=out)
        radius, angle = out[: len(scratch)], out[len(scratch) :]
        # A uniform may be zero, but is never one.
        np.subtract(np.float32(1), radius, out=radius)
        np.log(radius, out=radius)
        np.multiply(radius, np.float32(-2 * SIGMA**2), out=radius)
        np.sqrt(radius, out=radius)
        np.multiply(angle, np.float32(2 * np.pi), out=angle)
        np.sin(angle, out=scratch)
        np.cos(angle, out=angle)
        np.multiply(radius, angle, out=angle)
        np.multiply(radius, scratch, out=radius)
    np.exp(out, out=out)


def _end(ends: list[np.ndarray], row: int, before: list[int], duration: np.ndarray) -> None:
    """Writes the end of an op, whose row may be that of an op which it waits for."""
    if not before:
        ends[row][:] = duration
        return
    start = ends[before[0]]
    for other in before[1:]:
        start = np.maximum(start, ends[other], out=ends[row])
    np.add(start, duration, out=ends[row])


def _assign_rows(graph: Graph) -> tuple[list[int], int]:
    """For each op the row that holds its end, and the number of rows."""
    last_use = {p: op for op, before in enumerate(graph.predecessors) for p in before}
    row_of: list[int] = []
    free: list[int] = []
    for op, before in enumerate(graph.predecessors):
        free += [row_of[p] for p in before if last_use[p] == op]
        row_of.append(free.pop() if free else 1 + max(row_of, default=-1))
    return row_of, 1 + max(row_of)
