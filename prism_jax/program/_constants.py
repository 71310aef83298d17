"""Constant parts of ops, such as a sleep: ops of their own before them."""

import dataclasses
from collections.abc import Collection

import numpy as np

from ._step_graph import StepGraph


CONSTANT = "constant "  # Before the kind of the op that it is a part of.


def with_constants(step: StepGraph, kinds: Collection[tuple[str, int]]) -> StepGraph:
    """The graph with another op before each op of these kinds on these workers, whose kind begins
    with `constant`. It waits for what the op waited for, and is not compute.
    """
    nodes = zip(step.kind, step.members, step.computes.tolist(), strict=True)
    split = np.array([own and (kind, members[0]) in kinds for kind, members, own in nodes])
    if not split.any():
        return step
    ops = np.arange(len(split))
    of = np.repeat(ops, 1 + split)  # The old op of each new one.
    new = ops + np.cumsum(split)
    first = np.zeros(len(of), bool)
    first[new[split] - 1] = True

    def mapped(old: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(new[list(old)].tolist())

    graph = step.graph
    before = (
        mapped(graph.predecessors[op]) if begins or not split[op] else (int(new[op]) - 1,)
        for op, begins in zip(of.tolist(), first.tolist(), strict=True)
    )
    columns = {
        field.name: getattr(graph, field.name)[of]
        for field in dataclasses.fields(graph)
        if isinstance(getattr(graph, field.name), np.ndarray)
    }
    kind = [
        CONSTANT * begins + step.kind[op] for op, begins in zip(of, first.tolist(), strict=True)
    ]
    columns["phase"] = np.where(first, kind, columns["phase"])
    graph = dataclasses.replace(
        graph,
        **columns,
        predecessors=tuple(before),
        orders=tuple(map(mapped, graph.orders)),
        last=tuple(map(mapped, graph.last)),
    )
    names = ("op", "calls", "call", "members", "twin")
    repeated = {name: tuple(getattr(step, name)[op] for op in of) for name in names}
    return StepGraph(graph, tuple(kind), **repeated)
