"""Tiles side by side, as on an accelerator, on a CPU; and on which devices tiles run."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_jax.engine import simulate
from prism_jax.replica import _tiles, on_accelerator, tiles

from .helpers import rich_program


def _columns(shared, ids):
    """Something of 64 numbers for each sample."""
    return ids[:, None].astype(shared.dtype) + shared


@pytest.mark.parametrize("memory", [2**33, 2**20])
def test_only_the_tiles_that_are_needed_run_and_no_more_than_fit(monkeypatch, memory):
    """By the bytes that the backend says of the very program that runs."""
    lowered, compiled = [], _tiles._compiled
    monkeypatch.setattr(_tiles, "on_accelerator", lambda: True)
    monkeypatch.setattr(_tiles, "_memory", lambda: memory)
    monkeypatch.setattr(_tiles, "_compiled", lambda *x: lowered.append(compiled(*x)) or lowered[-1])
    shared, size, devices = jnp.arange(64.0)[None], 16, len(jax.devices())
    batches = [*tiles(_columns, shared, 16 * 40 + 5, per_batch=64, size=size)]
    found = np.concatenate([batch.samples() for batch in batches])
    assert np.array_equal(found, np.arange(len(found))[:, None] + np.asarray(shared))
    for batch in batches:
        needed = -(-batch.count // (size * devices))
        assert needed <= len(batch.arrays) // devices < 2 * needed
        held = lowered[0].func.lower(
            *lowered[0].args,
            np.zeros(devices, np.int32),
            np.zeros((len(batch.arrays), size), np.uint32),
            [],
        )
        parts = held.compile().memory_analysis()
        whole = parts.argument_size_in_bytes + parts.output_size_in_bytes + parts.temp_size_in_bytes
        assert whole <= memory / 4
    assert (len(batches) == 1) == (memory == 2**33)


def test_tiles_run_on_the_platform_of_the_default_device(monkeypatch):
    """On a CPU where JAX would take a GPU, with the bits of a CPU."""

    def times():
        steps = simulate(rich_program(4), num_samples=500, key=jax.random.key(3)).histogram
        return steps.times.tobytes(), steps.counts.tobytes()

    cpus, gpu, without = jax.devices(), SimpleNamespace(platform="gpu"), times()
    monkeypatch.setattr(jax, "devices", lambda platform=None: cpus if platform == "cpu" else [gpu])
    assert on_accelerator()
    for device in ("cpu", cpus[-1]):
        with jax.default_device(device):
            assert not on_accelerator()
            assert [*_tiles._mesh().devices] == cpus
            assert times() == without
