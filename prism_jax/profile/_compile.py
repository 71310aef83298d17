"""Compiles a profile of a traced job to a program."""

import dataclasses

import jax.numpy as jnp

from .._misc import quoted
from ..data import located
from ..program import Program, Sets, assemble, variability_of
from ..workload import Block, Kernel, Segment
from ._profile import Profile
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
    where = f"Profile `{profile.name}`"
    with located(where):
        _check_outline(profile)
    step = step_graph(profile.job, profile.outline)
    with located(where):
        _check_positions(profile, step)
        if constants := _constants(profile, step):
            step = step_graph(profile.job, profile.outline, constants=constants)
        variability = variability_of(profile.variability)
    if profile.sets:
        length = min(len(profile.sets[0]), profile.schedule.num_microbatches)
        sets = Sets(jnp.asarray(profile.sets, float), length)
        variability = dataclasses.replace(variability, microbatch=sets)
    blocks, loadings = _blocks(profile, step)
    program = assemble(step.graph, blocks, variability=variability)
    if all(row.loading == 1 for row in profile.means):
        return program
    table = program.latencies
    kernels = zip(table.kind, table.sizes, strict=True)
    loading = [loadings[table.kinds[kind], size] for kind, size in kernels]
    table = dataclasses.replace(table, loading=jnp.asarray(loading, table.mean.dtype))
    return dataclasses.replace(program, latencies=table)


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


def _check_positions(profile: Profile, step: StepGraph) -> None:
    ops = set(zip(step.kind, step.graph.stage.tolist(), step.call, strict=True))
    for row in profile.positions:
        if (row.kind, row.stage, row.microbatch) not in ops:
            raise ValueError(
                f"a row of `positions.csv` is of `{quoted(row.kind)}` of stage {row.stage} for "
                f"microbatch {row.microbatch}, which no step has; remove it."
            )


def _constants(profile: Profile, step: StepGraph) -> set[tuple[str, int]]:
    """Refuses rows that no op uses. Returns which ops have a constant part: kind and worker."""
    workers = zip(step.kind, step.graph.rank.tolist(), strict=True)
    ops = dict(zip(workers, step.computes.tolist(), strict=True))
    constants = set()
    for row in profile.means:
        kind = row.kind.removeprefix(CONSTANT)
        constant, key = kind != row.kind, (kind, row.dp_rank * profile.layout.pp + row.stage)
        where = f"`{quoted(row.kind)}` on dp_rank {row.dp_rank}, stage {row.stage}"
        if key not in ops or (constant and not ops[key]):
            unit = "compute" if constant else "op"
            raise ValueError(
                f"a row of `means.csv` is of {where}, where no {unit} is of this kind; correct or "
                "remove it."
            )
        if constant and row.loading != 1:
            raise ValueError(
                f"in `means.csv`, {where} has the loading {row.loading:g}, but data do not act on "
                "a constant part; leave it out."
            )
        if constant:
            constants.add(key)
    return constants


def _blocks(profile: Profile, step: StepGraph) -> tuple[list[Block], dict[tuple[str, str], float]]:
    """The block of each op, and the loadings of kernels, by kind and size, on the factor of their
    microbatch's data.
    """
    pp = profile.layout.pp
    rows = {(row.kind, row.dp_rank, row.stage): row for row in profile.means}
    blocks: dict[tuple[str, str], Block] = {}
    loadings, chosen = {}, []
    factors = {(p.kind, p.stage, p.microbatch): p.factor for p in profile.positions}
    columns = step.kind, step.twin, step.call, step.graph.rank.tolist(), step.computes.tolist()
    for kind, twin, call, worker, alone in zip(*columns, strict=True):
        d, s = divmod(worker, pp)
        factor = factors.get((kind, s, call), 1.0)
        size = f"dp_rank {d} stage {s}"
        size += " twin" if twin else ""
        size += f" x {factor!r}" if factor != 1 else ""
        if (kind, size) not in blocks:
            row = rows.get((kind, d, s))
            if row is None:
                raise ValueError(
                    f"Profile `{profile.name}` has no mean of `{kind}` on dp_rank {d}, stage {s}; "
                    "add it to `means.csv`."
                )
            kernel = Kernel(kind, size, 0.0 if twin else row.mean_s * factor)
            # An op of several workers belongs to no rank and to no microbatch's data.
            segment = Segment(((kernel, 1),)) if alone else Segment((), kernel)
            blocks[kind, size] = ((segment, 1),)
            loadings[kind, size] = 1.0 if twin else row.loading
        chosen.append(blocks[kind, size])
    return chosen, loadings
