"""What the classes of ops consist of: kernels, segments, branches and waits; and loads."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, Real

from .._padding import AnyArray
from ..loads import Loads, Unevenness
from ..workload import Block, Branches, Kernel, Load, Row, Segment, rows_of


class Overlaps(eqx.Module):
    """Branches, and the classes that contain them.

    **Attributes:**

    - `compute`: the compute of members in the branches: 1 for the segment with all of their compute
        up to the end of the branches, and -1 for the segment with their compute before the
        branches; or 1 for the class of a block within the branches.
    - `communication`: how often each kernel runs in each row of collectives.
    - `slowdowns`: as in `workload.Branches`.
    - `classes`: how often a class contains the branches.
    """

    compute: Real[AnyArray, "branches inner"]
    communication: Real[AnyArray, "branches collectives kernels"]
    slowdowns: tuple[tuple[float, float], ...] | Float[AnyArray, "branches 2"]
    classes: Real[AnyArray, "classes branches"]


class Waits(eqx.Module):
    """Classes that several groups of GPUs run, at whose end all of them wait. A wait follows those
    that its class contains.

    **Attributes:**

    - `within`: the class.
    - `count`, `size`: how many groups run it, and how many GPUs each has.
    - `classes`: how often a class contains the wait.
    - `group`: the group of GPUs of which these groups are parts; of a plan.
    """

    within: Int[AnyArray, " waits"]
    count: Real[AnyArray, " waits"]
    size: Real[AnyArray, " waits"]
    classes: Real[AnyArray, "waits classes"]
    group: Int[AnyArray, " waits"] | None = None


class Blocks(eqx.Module):
    """The kernels of each class of ops.

    After the classes of ops come those of blocks within branches. If each class is one kernel that
    keeps its own law, nothing is collapsed, and all but the first two is `None`.

    **Attributes:**

    - `direct`: the kernel of a class that is one kernel and keeps its own law, or -1.
    - `compute`: whether the factor of the rank applies to a class.
    - `segments`: how often each kernel runs in a segment, on each member.
    - `members`: how many members run a segment.
    - `class_segments`: how often a class contains a segment.
    - `class_collectives`: how often it contains a collective.
    - `branches`: branches that overlap with compute of members; `None` if there are none.
    - `outer_branches`: branches that overlap with blocks, which are classes; `None` for none.
    - `waits`: `None` if there are none.
    - `group`: the group of GPUs of the members of a segment; of a plan.
    """

    direct: Int[AnyArray, " classes"] = eqx.field(metadata={"fill": -1})
    compute: Bool[AnyArray, " classes"]
    segments: Real[AnyArray, "segments kernels"] | None = None
    members: Real[AnyArray, " segments"] | None = None
    class_segments: Real[AnyArray, "classes segments"] | None = None
    class_collectives: Real[AnyArray, "classes kernels"] | None = None
    branches: Overlaps | None = None
    outer_branches: Overlaps | None = None
    waits: Waits | None = None
    group: Int[AnyArray, " segments"] | None = None


def lay_out_blocks(classes: Sequence[tuple[Block, int]], kernels: Mapping[Kernel, int]) -> Blocks:
    """The contents of classes; none if each class is one kernel that keeps its own law: there may
    be as many of these as ops.
    """
    known = dict(zip(classes, range(len(classes)), strict=True))
    number = _Numbers(kernels, {}, {}, known, {}, {})
    contained: list[tuple[Counter[int], ...]] = []
    direct, compute = [], []
    todo = list(number.classes)
    for block, members in todo:
        contained.append(tuple(Counter() for _ in range(5)))
        for segment, repeats in block:
            for counts, items in zip(contained[-1], number.parts(segment, members), strict=True):
                for item in items:
                    counts[item] += repeats
        compute.append(any(row and by for part, _ in block for row, by in rows_of(part)))
        calls = count_calls(block, 1)
        single = sum(calls.values()) == 1 and (members == 1 or not compute[-1])
        direct.append(kernels[next(iter(calls))] if single else -1)
        if len(number.classes) > len(todo):  # Those of blocks within branches.
            todo += [*number.classes][len(todo) :]
    blocks = Blocks(np.array(direct, np.int64), np.array(compute, bool))
    if min(direct, default=-1) >= 0:
        return blocks
    runs = np.zeros((len(number.segments), len(kernels)), np.int64)
    for (run, _), s in number.segments.items():
        for kernel, count in run:
            runs[s, kernels[kernel]] += count
    columns = [*zip(*contained, strict=True)] or [()] * 5
    of_segments, of_collectives, of_branches, of_outer, of_waits = columns
    within, count, size = np.array([*number.waits], np.int64).reshape(-1, 3).T
    waits = Waits(within, count, size, _counts(of_waits, len(number.waits)).T)
    return dataclasses.replace(
        blocks,
        segments=runs,
        members=np.array([members for _, members in number.segments], np.int64),
        class_segments=_counts(of_segments, len(runs)),
        class_collectives=_counts(of_collectives, len(kernels)),
        branches=_branches(number.branches, of_branches, len(runs), kernels),
        outer_branches=_branches(number.outer_branches, of_outer, len(direct), kernels),
        waits=waits if len(within) else None,
    )


_Known = dict[tuple[int, int, Branches], int]


class _Numbers(NamedTuple):
    """Different kernels, rows of members, branches, classes, branches around classes, and waits at
    the end of classes, numbered as they are added.

    Branches are identified by the row before them, the row up to their end (-1 for none), and their
    contents; branches around a class, by -1 and the class; waits by the class, how many groups run
    it, and their size.
    """

    kernels: Mapping[Kernel, int]
    segments: dict[tuple[Row, int], int]
    branches: _Known
    classes: dict[tuple[Block, int], int]
    outer_branches: _Known
    waits: dict[tuple[int, int, int], int]

    def parts(self, segment: Segment, members: int) -> tuple[list[int], ...]:
        """The contents of a class with this segment: the number of the row that members run alone,
        that of its collective, and those of its branches, of branches around classes, and of waits
        at the end of classes.
        """
        waits = [self._wait(segment, members)] if segment.before else []
        members = segment.members or members
        row, branches = segment.kernels, []
        before = alone = self._row(row, members)
        for sides in segment.branches:
            if sides.within:
                break
            # Members do not wait for one another between branches.
            row += sides.compute
            key = (before, before := self._row(row, members), sides)
            branches.append(self.branches.setdefault(key, len(self.branches)))
        outer = [self._outer(sides, members) for sides in segment.branches if sides.within]
        collectives = [] if segment.collective is None else [self.kernels[segment.collective]]
        if outer:
            return [], collectives, [], outer, []
        return [alone] if alone >= 0 else [], collectives, branches, [], waits

    def _row(self, row: Row, members: int) -> int:
        return self.segments.setdefault((row, members), len(self.segments)) if row else -1

    def _wait(self, segment: Segment, members: int) -> int:
        # Those that are within it first, so that each follows those that it needs.
        for inner, _ in segment.before:
            if inner.before:
                self._wait(inner, members)
        size = max(inner.members or members for inner, _ in segment.before)
        within = self.classes.setdefault((segment.before, members), len(self.classes))
        key = (within, (segment.members or size) // size, size)
        return self.waits.setdefault(key, len(self.waits))

    def _outer(self, sides: Branches, members: int) -> int:
        within = self.classes.setdefault((sides.within, members), len(self.classes))
        return self.outer_branches.setdefault((-1, within, sides), len(self.outer_branches))


def _branches(
    known: _Known, contained: Sequence[dict[int, int]], inner: int, kernels: Mapping[Kernel, int]
) -> Overlaps | None:
    """Branches as arrays, with `inner` segments or classes as their compute."""
    if not known:
        return None
    compute = np.zeros((len(known), inner), np.int64)
    most = max(len(branches.communication) for *_, branches in known)
    communication = np.zeros((len(known), most, len(kernels)), np.int64)
    for b, (alone, whole, branches) in enumerate(known):
        if whole != alone:
            compute[b, whole] += 1
            if alone >= 0:
                compute[b, alone] -= 1
        for row, run in enumerate(branches.communication):
            for kernel, count in run:
                communication[b, row, kernels[kernel]] += count
    slowdowns = tuple(branches.slowdowns for *_, branches in known)
    return Overlaps(compute, communication, slowdowns, _counts(contained, len(known)))


def _counts(contained: Sequence[dict[int, int]], number: int) -> Int[np.ndarray, "classes items"]:
    """How often each class contains each of `number` items."""
    counts = np.zeros((len(contained), number), np.int64)
    for c, contains in enumerate(contained):
        for item, count in contains.items():
            counts[c, item] = count
    return counts


def count_calls(block: Block, members: int) -> dict[Kernel, int]:
    """How often a block calls each kernel: compute by every member, a collective once."""
    calls: Counter[Kernel] = Counter()
    for segment, repeats in block:
        for row, by_member in rows_of(segment):
            for kernel, count in row:
                calls[kernel] += repeats * count * (members if by_member else 1)
    return +calls


def count_layers(block: Block) -> int:
    """How many layers with uneven loads a forward has: as often as each load is on the kernel that
    runs once in a layer.
    """
    counts: dict[Load, int] = {}
    for kernel, calls in count_calls(block, 1).items():
        if kernel.load is not None:
            counts[kernel.load] = min(calls, counts.get(kernel.load, calls))
    return sum(counts.values())


def expert_loads(kernels: Sequence[Kernel], layers: np.ndarray, dtype: DTypeLike) -> Loads | None:
    """The loads of a program's kernels; `None` if all loads are equal. `layers` as there."""
    loads = list(dict.fromkeys(kernel.load for kernel in kernels if kernel.load is not None))
    if not loads:
        return None
    sizes = np.array([(x.members, x.counts, x.experts, x.split) for x in loads])
    return Loads(
        *sizes.T,
        capacity=tuple(float(x.capacity) for x in loads),
        shares=_shares(loads),
        kernels=np.array([[k.load == x for k in kernels] for x in loads]).astype(np.int64),
        layers=layers,
        unevenness=Unevenness(
            jnp.asarray([x.concentration for x in loads], dtype), jnp.ones(len(loads), dtype)
        ),
    )


def _shares(loads: Sequence[Load]) -> Any:
    """The popularities of experts, by member, if some are known."""
    if not any(load.popularity for load in loads):
        return None
    room = (max(load.members for load in loads), max(load.experts for load in loads))
    shares = np.full((len(loads), *room), -1.0)
    for row, load in zip(shares, loads, strict=True):
        if load.popularity:
            of_experts = np.reshape(load.popularity, (load.members, load.experts))
            row[: load.members, : load.experts] = of_experts / np.sum(of_experts)
    return tuple(tuple(map(tuple, members)) for members in shares.tolist())
