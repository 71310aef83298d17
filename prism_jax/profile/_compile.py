"""Compiles a profile of a traced job to a program."""

import dataclasses

import jax.numpy as jnp

from .._misc import quoted
from ..program import (
    CONSTANT,
    Program,
    Sets,
    StepGraph,
    assemble,
    step_graph,
    variability_of,
    with_constants,
)
from ..workload import Block, Kernel, Segment
from ._positions import position_factors
from ._profile import Profile


_TIMES = " x "  # Before the factor of a position, in the size of a kernel.


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
    _check(profile)
    step = step_graph(profile.job, profile.outline)
    _check_positions(profile, step)
    step = with_constants(step, _check_means(profile, step))
    try:
        variability = variability_of(profile.variability)
    except ValueError as error:
        raise ValueError(f"Profile `{profile.name}`: {error}") from None
    if profile.sets:
        length = min(len(profile.sets[0]), profile.schedule.num_microbatches)
        sets = Sets(jnp.asarray(profile.sets, float), length)
        variability = dataclasses.replace(variability, microbatch=sets)
    return _with_loadings(
        profile, assemble(step.graph, _blocks(profile, step), variability=variability)
    )


def _check_means(profile: Profile, step: StepGraph) -> set[tuple[str, int]]:
    """Refuses rows that no op uses. Returns which ops have a constant part: kind and worker."""
    nodes = zip(step.kind, step.members, step.computes.tolist(), strict=True)
    ops = {(kind, members[0]): computes for kind, members, computes in nodes}
    constants = set()
    for row in profile.means:
        kind = row.kind.removeprefix(CONSTANT)
        constant, key = kind != row.kind, (kind, row.dp_rank * profile.layout.pp + row.stage)
        where = f"`{quoted(row.kind)}` on dp_rank {row.dp_rank}, stage {row.stage}"
        if key not in ops or (constant and not ops[key]):
            which = "compute" if constant else "op"
            raise ValueError(
                f"Profile `{profile.name}`: a row of `means.csv` is of {where}, where no {which} "
                "is of this kind; correct or remove it."
            )
        if constant:
            constants.add(key)
            if row.loading != 1:
                raise ValueError(
                    f"Profile `{profile.name}`: in `means.csv`, {where} has the loading "
                    f"{row.loading:g}, but data do not act on a constant part; leave it out."
                )
    return constants


def _with_loadings(profile: Profile, program: Program) -> Program:
    """The program with the loading of each kernel on the factor of its microbatch's data."""
    loadings = {(m.kind, _size(m.dp_rank, m.stage)): m.loading for m in profile.means}
    if all(loading == 1 for loading in loadings.values()):
        return program
    table = program.latencies
    names = (
        (table.kinds[kind], size.partition(_TIMES)[0])
        for kind, size in zip(table.kind.value, table.sizes, strict=True)
    )
    loading = jnp.asarray([loadings.get(name, 1.0) for name in names], table.mean.dtype)
    return dataclasses.replace(program, latencies=dataclasses.replace(table, loading=loading))


def _times(factor: float) -> str:
    return "" if factor == 1 else f"{_TIMES}{factor!r}"


def _size(d: int, s: int) -> str:
    return f"dp_rank {d} stage {s}"


def _blocks(profile: Profile, step: StepGraph) -> list[Block]:
    means = {(m.kind, m.dp_rank, m.stage): m.mean_s for m in profile.means}
    pp = profile.layout.pp
    blocks: dict[tuple, Block] = {}
    chosen = []
    factors = position_factors(step, profile.positions, pp).tolist()
    nodes = zip(step.kind, step.members, step.twin, step.computes.tolist(), factors, strict=True)
    for kind, members, twin, alone, factor in nodes:
        key = (kind, members[0], twin, factor)
        if key not in blocks:
            d, s = divmod(members[0], pp)
            if (kind, d, s) not in means:
                raise ValueError(
                    f"Profile `{profile.name}` has no mean of `{kind}` on dp_rank {d}, stage {s}; "
                    "add it to `means.csv`."
                )
            mean = 0.0 if twin else means[kind, d, s] * factor
            kernel = Kernel(kind, f"{_size(d, s)}{' twin' * twin}{_times(factor)}", mean)
            # An op of several workers belongs to no rank and to no microbatch's data.
            segment = Segment(((kernel, 1),)) if alone else Segment((), kernel)
            blocks[key] = ((segment, 1),)
        chosen.append(blocks[key])
    return chosen


def _check_positions(profile: Profile, step: StepGraph) -> None:
    pp = profile.layout.pp
    nodes = zip(step.kind, step.members, step.call, strict=True)
    ops = {(kind, members[0] % pp, call) for kind, members, call in nodes}
    for one in profile.positions:
        if (one.kind, one.stage, one.microbatch) not in ops:
            raise ValueError(
                f"Profile `{profile.name}`: a row of `positions.csv` is of `{quoted(one.kind)}` of "
                f"stage {one.stage} for microbatch {one.microbatch}, which no step has; remove it."
            )


def _check(profile: Profile) -> None:
    dp, pp = profile.layout.dp, profile.layout.pp
    for call in (*profile.outline.before, *profile.outline.after):
        table = call.waits_for
        scopes = {scope for row in table for scope in row}
        if len(table) != dp or any(len(row) != pp for row in table):
            raise ValueError(
                f"Profile `{profile.name}`: `waits_for` of `{call.op}` must have {dp} rows of {pp} "
                "entries, one for each dp_rank and stage."
            )
        unknown = sorted({*scopes, call.scope} - {"", "self", "dp", "pp", "last", "world"})
        if unknown:
            raise ValueError(
                f"Profile `{profile.name}`: `{call.op}` has the scope `{unknown[0]}`; allowed are "
                "`self`, `dp`, `pp`, `last` and `world`."
            )
