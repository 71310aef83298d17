"""All that runs on devices lowers for CUDA and TPU, without such a device."""

import pathlib
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import prism_jax as prism
from benchmarks import on_device
from prism_jax import _devices
from prism_jax.engine._critical_paths import _latencies
from prism_jax.engine._explicit import _explicit_tile
from prism_jax.engine._gradient import _entries_tile, _replica_vjp, _step_vjp
from prism_jax.engine._pools import (
    _counted_on_device,
    _step_tile,
    _sums_on_device,
    drawn_pools,
    pool_of,
    room_of,
)
from prism_jax.engine._run import prepare, prepare_together, step_tile
from prism_jax.engine._sampling import (
    Draws,
    _replica_tile,
    _tile_of_plans,
    pilot_key,
)
from prism_jax.engine._together import _figures_on_device, _steps_of_plans
from prism_jax.latency import Gamma
from prism_jax.maxplus import _propagate
from prism_jax.placement._placed import _last_tile, _ready_tile, _slope_tile
from prism_jax.replica import _tiles, leading_axes, without_graph, without_ops, without_steps
from prism_jax.schedule import GPipe
from prism_jax.step import Room
from prism_jax.step._pool import _arrange_on_device, _Picks, _slowest_on_device
from tools.compile_for import longest_turn

from .helpers import rich_program


@pytest.fixture(scope="module")
def table():
    """The functions of a program with all laws."""
    return tiled_functions(rich_program(4, schedule=GPipe(2, 1)))


def tiled_functions(program: prism.Program):
    """Of each function, what its tiles share, and the dtype and shape of what a sample has besides
    its number.
    """
    run = prepare(program, jr.key(0))
    plan, key, sinks = run.plan, run.key, run.plan.structure.sinks
    ranks, after = plan.structure.ranks, (without_graph(plan), key)
    whole, ids = (np.int32,), (np.uint32,)
    lead = leading_axes(program, plan, pilot_key())
    real = plan.dtype
    ends = real, len(sinks.first)
    (drawn,) = drawn_pools(run, [Draws(0, 64, 64)])
    pool = pool_of(run, drawn, 2, room_of(run, [drawn.draws]))
    on_gpus = (plan, key, np.uint32(8)), (real, ranks), ids, ids, whole
    stalls = plan.tables.stall_shares is not None
    joint = prepare_together([program, program], jr.key(0))
    assert joint is not None
    return {
        _replica_tile: ((without_steps(plan), lead, key), ids),
        _tile_of_plans: ((without_steps(joint.plan), key), ids),
        _steps_of_plans: ((joint.plan_of_steps, pool, key),),
        step_tile: ((without_ops(plan), key), ids, ends, whole),
        _step_vjp: ((after[0], None, key), ids, (real,), whole, whole, (real,)),
        _replica_vjp: ((plan, lead, key), ids, whole, (real,)),
        **({_entries_tile: ((plan, key), ids, whole)} if stalls else {}),
        _latencies.__wrapped__: ((plan, lead, key),),
        _step_tile: ((without_ops(plan), (pool,), key),),
        _explicit_tile: ((without_steps(plan), key), ids, ids),
        _last_tile: (after, whole),
        _ready_tile: on_gpus,
        _slope_tile: on_gpus,
    }


def test_the_table_has_all_functions_that_share_a_plan(table):
    files = pathlib.Path(prism.__file__).parent.rglob("*.py")
    named = [re.findall(r"^def (\w+)\(shared, ", file.read_text(), re.M) for file in files]
    assert {name for names in named for name in names} == {run.__name__ for run in table}


def traced_tiles(function, shared, of_sample, *, tiles: int, size: int, wide: bool = True):
    """A function of `tiled_functions` with its tiles, traced for an accelerator."""
    arrays, static = eqx.partition(shared, eqx.is_array)
    leaves, tree = jax.tree.flatten(static)
    # Where they are is no matter.
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
    ids, *inputs = [
        jax.ShapeDtypeStruct((tiles, size, *shape), dtype)
        for dtype, *shape in [(np.uint32,), *of_sample]
    ]
    mesh = _tiles._mesh()
    turns = np.ones(mesh.size, np.int32)
    run = _tiles._jitted(function, mesh, _devices.platform(), wide)
    return run.trace((tuple(leaves), tree), arrays, turns, ids, inputs)


@pytest.mark.parametrize("wide", [False, True])
def test_what_runs_in_tiles_lowers_for_cuda_and_tpu(table, wide):
    for function, (shared, *of_sample) in table.items():
        traced = traced_tiles(function, shared, of_sample, tiles=2, size=128, wide=wide)
        traced.lower(lowering_platforms=("cuda", "tpu"))


def test_on_a_hopper_what_propagates_is_one_kernel_and_the_way_back_another(monkeypatch):
    """But for laws of tables, whose way back is in loops."""
    with jax.enable_x64(False):
        tables = {"gemm": Gamma(1.0, 0.1), "send_recv": Gamma(1.0, 0.3)}
        table = tiled_functions(rich_program(4, schedule=GPipe(2, 1)))
        of_tables = tiled_functions(rich_program(4, schedule=GPipe(2, 1), residual=tables))
        monkeypatch.setattr(_devices, "platform", lambda: "gpu")
        monkeypatch.setattr(_propagate, "on_hopper", lambda: True)
        for function, number, functions in (
            (_replica_tile, 1, table),
            (_tile_of_plans, 1, table),
            (_explicit_tile, 1, table),
            (_replica_vjp, 2, table),
            (_replica_vjp, 1, of_tables),
        ):
            shared, *of_sample = functions[function]
            traced = traced_tiles(function, shared, of_sample, tiles=2, size=128)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            assert text.count("__gpu$xla.gpu.triton") == number
            # Beside it, a CPU has the loops.
            assert "triton" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_what_arranges_and_counts_pools_lowers_for_cuda_and_tpu():
    number = 256
    times, whole = jnp.ones(number, jnp.float32), jnp.ones(number, jnp.int32)
    ends, room = jnp.ones((number, 3), jnp.float32), Room(2 * number, 4, number)
    ids, of_programs = whole.astype(np.uint32), [x[:, None].repeat(3, 1) for x in (times, whole)]
    for traced in (
        _arrange_on_device.trace(ends, times, whole, np.uint32(0), room, True),
        _slowest_on_device.trace(
            _Picks(whole, times, times, times[None]), np.float32(0.5), 2 * number
        ),
        _counted_on_device.trace(times, number),
        _sums_on_device.trace(times, times, whole, ids, whole[:1], times[0], times[:21]),
        _figures_on_device.trace(of_programs[0], *of_programs, ids[None].repeat(3, 0), whole[:1]),
    ):
        traced.lower(lowering_platforms=("cuda", "tpu"))


def test_the_benchmark_on_a_device_has_the_means_of_the_loops():
    value, gradient = on_device.by_tiles(True)
    assert (value["how"], gradient["how"]) == ("loops", "gradient, loops")
    assert value["mean"] == gradient["mean"] > 0


def test_the_longest_turn_of_a_kernel_is_of_a_loop_with_no_other_in_it():
    lines = ["$outer:", *["add.s32 %r1, %r1, 1;"] * 9, "$short:", "add.s32 %r2, %r2, 1;"]
    lines += ["@%p1 bra $short;", "$long:", *["add.s32 %r3, %r3, 1;"] * 4, "@%p2 bra $long;"]
    lines += ["@%p3 bra $end;", "bra.uni $outer;", "$end:", "ret;"]
    text = "\n".join([".entry kernel(", ")", "{", ".reg .b32 %r<4>;", *lines, "}"])
    assert longest_turn(text, "kernel") == 5
