"""Compiles a profile of a traced job to a program."""

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp

from .._misc import quoted
from ..data import located
from ..program import Program, Sets, assemble, variability_of
from ..workload import Kernel, Segment
from ._profile import Profile, WorkerMean
from ._step_graph import CONSTANT, StepGraph, step_graph


_SCOPES = {"", "self", "dp", "pp", "last", "world"}


def compile_profile(profile: Profile) -> Program:
    """Compiles the profile of a traced job to a program, on the workers that were traced.

    The graph has all replicas, and each worker has its own mean latencies, because workers differ
    and wait for one another before, in and after the pipeline. Microbatches are numbered
    consecutively over all replicas.

    **Arguments:**

    - `profile`: from `fit_profile` or `load_profile`.

    **Returns:**

    A [`Program`][] with one replica. Its ranks are the workers, `dp_rank * pp + stage`.

    **Raises:**

    `ValueError` if the profile lacks the mean of an op, or if its parts do not fit together.
    """
    pp, parts = profile.layout.pp, [m for m in profile.means if m.kind.startswith(CONSTANT)]
    constants = {(m.kind.removeprefix(CONSTANT), m.dp_rank * pp + m.stage) for m in parts}
    with located(f"Profile `{profile.name}`"):
        _check_outline(profile)
        variability = variability_of(profile.variability)
    step = step_graph(profile.job, profile.outline, constants=constants)
    with located(f"Profile `{profile.name}`"):
        _check_rows(profile, step)
    if profile.sets:
        length = min(len(profile.sets[0]), profile.schedule.num_microbatches)
        sets = Sets(jnp.asarray(profile.sets, float), length)
        variability = dataclasses.replace(variability, microbatch=sets)
    blocks, loadings = {}, {}
    nodes = zip(means_of_ops(profile, step), step.kind, step.twin, step.computes, strict=True)
    chosen = []
    for (row, factor), kind, twin, alone in nodes:
        size = f"dp_rank {row.dp_rank} stage {row.stage}{' twin' * twin}"
        size += f" x {factor!r}" if factor != 1 else ""
        kernel = Kernel(kind, size, 0.0 if twin else row.mean_s * factor)
        # An op of several workers belongs to no rank and to no microbatch's data.
        segment = Segment(((kernel, 1),)) if alone else Segment((), kernel)
        chosen.append(blocks.setdefault((kind, size), ((segment, 1),)))
        loadings[kind, size] = 1.0 if twin else row.loading
    program = assemble(step.graph, chosen, variability=variability)
    if all(row.loading == 1 for row in profile.means):
        return program
    table = program.latencies
    kernels = zip(table.kind, table.sizes, strict=True)
    loading = [loadings[table.kinds[kind], size] for kind, size in kernels]
    table = dataclasses.replace(table, loading=jnp.asarray(loading, table.mean.dtype))
    return dataclasses.replace(program, latencies=table)


def means_of_ops(profile: Profile, step: StepGraph) -> Iterator[tuple[WorkerMean, float]]:
    """For each op the row of its mean, and its factor by the position of its microbatch."""
    rows = {(row.kind, row.dp_rank, row.stage): row for row in profile.means}
    factors = {(p.kind, p.stage, p.microbatch): p.factor for p in profile.positions}
    for kind, call, worker in zip(step.kind, step.call, step.graph.rank.tolist(), strict=True):
        d, s = divmod(worker, profile.layout.pp)
        if (kind, d, s) not in rows:
            raise ValueError(
                f"Profile `{profile.name}` has no mean of `{kind}` on dp_rank {d}, stage {s}; "
                "add it to `means.csv`."
            )
        yield rows[kind, d, s], factors.get((kind, s, call), 1.0)


def _check_outline(profile: Profile) -> None:
    dp, pp = profile.layout.dp, profile.layout.pp
    for call in (*profile.outline.before, *profile.outline.after):
        table = call.waits_for
        if len(table) != dp or any(len(row) != pp for row in table):
            raise ValueError(
                f"`waits_for` of `{call.op}` must have {dp} rows of {pp} entries, one for each "
                "dp_rank and stage."
            )
        unknown = sorted({call.scope}.union(*table) - _SCOPES)
        if unknown:
            raise ValueError(
                f"`{call.op}` has the scope `{unknown[0]}`; allowed are `self`, `dp`, `pp`, `last` "
                "and `world`."
            )


def _check_rows(profile: Profile, step: StepGraph) -> None:
    """Refuses rows that no op uses."""
    ops = set(zip(step.kind, step.graph.stage.tolist(), step.call, strict=True))
    for row in profile.positions:
        if (row.kind, row.stage, row.microbatch) not in ops:
            raise ValueError(
                f"a row of `positions.csv` is of `{quoted(row.kind)}` of stage {row.stage} for "
                f"microbatch {row.microbatch}, which no step has; remove it."
            )
    workers = set(zip(step.kind, step.graph.rank.tolist(), strict=True))
    for row in profile.means:
        is_part = row.kind.startswith(CONSTANT)
        where = f"`{quoted(row.kind)}` on dp_rank {row.dp_rank}, stage {row.stage}"
        if (row.kind, row.dp_rank * profile.layout.pp + row.stage) not in workers:
            unit = "compute" if is_part else "op"
            raise ValueError(
                f"a row of `means.csv` is of {where}, where no {unit} is of this kind; correct or "
                "remove it."
            )
        if is_part and row.loading != 1:
            raise ValueError(
                f"in `means.csv`, {where} has the loading {row.loading:g}, but data do not act on "
                "a constant part; leave it out."
            )
