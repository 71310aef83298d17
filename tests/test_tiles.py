"""Tiles side by side, as on an accelerator, on a CPU; and what is kept of tiles."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_jax.replica import _tiles, tiles


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


_TRACES_ONCE = """
import pathlib, sys, jax.numpy as jnp, numpy as np, prism_jax as prism
from prism_jax.replica import _kept, tiles
traced = []


def columns(shared, ids):
    traced.append(ids)
    return {"columns": ids[:, None] * jnp.exp(shared)}


def result():
    _kept._kept.clear()
    batches = tiles(columns, jnp.linspace(0, 1, 3), 1000, per_batch=8, size=128)
    return np.concatenate([batch.samples()["columns"] for batch in batches])


expected = result()
assert len(traced) == 1
prism.keep_compiled()
assert np.array_equal(result(), expected) and len(traced) == 2
assert np.array_equal(result(), expected) and len(traced) == 2
(entry,) = pathlib.Path(sys.argv[1]).glob("*/*/columns-*-trace")
entry.write_bytes(entry.read_bytes()[:100])  # As of a full disk.
assert np.array_equal(result(), expected) and len(traced) == 3
assert np.array_equal(result(), expected) and len(traced) == 3
"""


def test_a_traced_function_is_kept_with_what_is_compiled_of_it(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {"PRISM_JAX_CACHE": str(tmp_path), "XLA_FLAGS": ""}
    command = [sys.executable, "-c", _TRACES_ONCE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
