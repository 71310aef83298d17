"""Profiles of kernels: their efficiencies relative to the hardware's limits, and how much they
vary; and changes to them that were learned from measured step times.
"""

import functools as ft
import math
from typing import Annotated, TypeAlias

import msgspec

from .._estimate import Estimate
from .._summary import Column, Shown, Table
from ._operators import Operators
from ._read import located
from ._shapes import Shapes, ShapeTable, shape_key
from ._types import Count, Fraction, Label, NonNegative, Number, Positive, Text
from ._variations import Variation, check_variation, replace_variations


# The order of the rows and columns of a covariance.
_LEVEL = {
    "compute": "compute takes this many times as long",
    "network": "collectives between nodes take this many times as long",
    "constant_s": "seconds added to each step",
    "growth": "compute takes (replicas)^this times as long",
}
LEVEL = (*_LEVEL,)

_Exponent: TypeAlias = Annotated[float, msgspec.Meta(ge=-1, le=1)]
_Longer: TypeAlias = Annotated[float, msgspec.Meta(gt=-1, le=10)]
_Row: TypeAlias = tuple[Number, Number, Number, Number]


class Efficiency(msgspec.Struct, frozen=True, cache_hash=True):
    """The efficiency of a kernel: the share of a peak rate that it reaches, by its size.

    **Attributes:**

    - `kernel`: the kind of kernel.
    - `variant`: the dtype of compute, or the link of a collective; empty for any.
    - `sizes`: increasing sizes, in FLOPs for `gemm`, `convolution` and `attention`, and in bytes
        for all other kernels.
    - `values`: the efficiency at each size.
    - `latency_s`: the overhead of each call, in seconds.
    """

    kernel: str
    variant: str
    sizes: tuple[float, ...]
    values: tuple[float, ...]
    latency_s: float = 0.0

    def at(self, size: float) -> float:
        """The efficiency at `size`: interpolated over the size's logarithm, constant beyond the
        ends.
        """
        sizes, values = self.sizes, self.values
        if size <= sizes[0]:
            return values[0]
        for i in range(1, len(sizes)):
            if size <= sizes[i]:
                weight = math.log(size / sizes[i - 1]) / math.log(sizes[i] / sizes[i - 1])
                return (1 - weight) * values[i - 1] + weight * values[i]
        return values[-1]


class Overlap(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How well communication overlaps with compute on a cluster.

    **Attributes:**

    - `contention`: the share of the compute units that an overlapped collective takes. An
        overlapped collective therefore costs this share of its own latency. Below one.
    - `data_parallel`: the share of parameter gathering that is overlapped, of all that could be.
    """

    contention: Annotated[float, msgspec.Meta(ge=0, lt=1)]
    data_parallel: Fraction


class Constant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number that was chosen rather than measured, and why."""

    name: Text
    value: Text
    reason: Text


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the numbers of a folder of `kernels/` are from.

    **Attributes:**

    - `who`, `when`, `software`, `licence`: who made the measurements, when, with which software,
        and under which licence they are.
    - `sample_counts`: how many samples each figure is from.
    - `constants`: the numbers that were chosen rather than measured, and why.
    - `overlap`: how well communication overlaps with compute; for clusters only.
    - `variability`: the folder of `kernels/` whose laws these kernels have, which then have none of
        their own.
    - `name`: the name of the folder.
    - `stands_in_for`: the machine without a folder of its own for which these numbers are used;
        empty if they are the machine's own.
    """

    who: Text
    when: Text
    software: Text
    licence: Text
    sample_counts: dict[str, int]
    constants: tuple[Constant, ...] = ()
    overlap: Overlap | None = None
    variability: Text | None = None
    name: str = ""
    stands_in_for: str = ""


# A job has some hundred kernels of few kinds.
@ft.lru_cache(maxsize=128)
def _of_kernel(tables: tuple[Efficiency, ...], kernel: str) -> dict[str, Efficiency]:
    """The tables of a kernel by variant."""
    return {table.variant: table for table in tables if table.kernel == kernel}


# For a dtype without a table: the dtype whose efficiency is used in its place.
STANDS_IN = {"fp4": "mxfp8", "mxfp8": "fp8", "fp32": "tf32", "tf32": "bf16"}


class Kernels(msgspec.Struct, frozen=True):
    """The profile of the compute kernels of a device and the collectives of a cluster.

    **Attributes:**

    - `efficiency`: the efficiencies of compute kernels and collectives.
    - `variability`: the laws around the mean latencies.
    - `overlap`: how well communication overlaps with compute.
    - `sources`: where the numbers are from.
    - `compute`: a factor on the mean latency of every compute kernel.
    - `network`: a factor on the latency of all parts of collectives between nodes.
    - `growth`, `num_replicas`: with `dp` replicas, compute takes `(dp / num_replicas) ** growth`
        times as long.
    - `constant_s`: the time that a step of any size takes besides its kernels, in seconds.
    - `constant_share`: the largest part that `constant_s` may be of what the fullest pipeline rank
        runs in a step, with its exposed collectives; `None` for no limit.
    - `floor_s`: the shortest time of a compute kernel, in seconds.
    - `shapes`: the latencies of the device's kernels by shape; empty if they were not
        measured.
    - `operators`: the lists of kernels of a framework that runs each operator as kernels of its
        own; `None` for kernels that are fused.
    """

    efficiency: tuple[Efficiency, ...]
    variability: tuple[Variation, ...]
    overlap: Overlap
    sources: tuple[Source, ...] = ()
    compute: float = 1.0
    network: float = 1.0
    growth: float = 0.0
    num_replicas: int = 1
    constant_s: float = 0.0
    constant_share: float | None = None
    floor_s: float = 0.0
    shapes: Shapes = {}
    operators: Operators | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each machine for which the numbers of another are used."""
        return tuple(
            f"the {source.stands_in_for} has no table of kernels of its own, so the table of "
            f"`{source.name}` is used (its key `kernels` chooses the table), and true step times "
            "may differ."
            for source in self.sources
            if source.stands_in_for
        )

    def find_efficiency(self, kernel: str, variant: str) -> Efficiency | None:
        """The efficiencies of `kernel` for `variant`, for its substitute, or for any variant."""
        known = _of_kernel(self.efficiency, kernel)
        while variant not in known and variant in STANDS_IN:
            variant = STANDS_IN[variant]
        return known.get(variant, known.get(""))

    def find_shapes(self, kernel: str, dtype: str) -> tuple[ShapeTable, ...]:
        """The tables by shape of `kernel` for a dtype, for its substitute, or for any dtype, in the
        order of their cases; none if there are none.
        """
        dtype = "bf16" if dtype == "fp16" else dtype
        while shape_key(kernel, dtype) not in self.shapes and dtype in STANDS_IN:
            dtype = STANDS_IN[dtype]
        tables = self.shapes.get(shape_key(kernel, dtype), ())
        return tables or self.shapes.get(shape_key(kernel, ""), ())

    def find_variation(self, component: str, kernel: str = "") -> Variation | None:
        """The law of `component` for `kernel`; `None` if there is none."""
        for variation in self.variability:
            if variation.component == component and variation.kernel == kernel:
                return variation
        return None


class Uncertainty(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The uncertainty of a calibration.

    **Attributes:**

    - `covariance`: the covariance of the four parameters of the level, in the order `compute`,
        `network`, `constant_s`, `growth`: the logarithms of the two factors, the constant in
        seconds, and the exponent.
    - `prior`: the parameters about which the step times say little, so that their values come from
        other systems.
    - `level`: the standard deviation of the logarithm of the level of a run around the level that
        these parameters give.
    - `spread`: the standard deviation of the logarithm of the spread of a run's steps at another
        scale.
    - `variability`: how much longer the median of the calibrated steps is than a step without
        variability, as a share.
    - `num_steps`: the number of measured steps, of all scales.
    - `of`: the class of jobs that they are of, as in `expected_error`. Jobs of another class do not
        have this uncertainty. Empty for any class.
    """

    covariance: tuple[_Row, _Row, _Row, _Row]
    prior: tuple[Text, ...] = ()
    level: NonNegative = 0.0
    spread: NonNegative = 0.0
    variability: _Longer = 0.0
    num_steps: Count = 1
    of: tuple[Text, ...] = ()


class Calibrated(Shown, msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Changes to the kernels of a job, from `calibrate`; a table of the job file.

    **Attributes:**

    - `source`: which measurements the changes come from.
    - `compute`: a factor on the mean latency of every compute kernel.
    - `variability`: laws that replace those of the kernels' profile for the same component and
        kind.
    - `rates`: factors on the mean latency of kernels by their kinds in tables of efficiencies.
    - `network`: a factor on the latency of all parts of collectives between nodes.
    - `constant_s`: the time that a step takes besides its kernels, in seconds.
    - `growth`, `num_replicas`: as in `Kernels`.
    - `uncertainty`: the uncertainty of these values.
    """

    source: Text
    compute: Positive = 1.0
    variability: tuple[Variation, ...] = ()
    network: Positive = 1.0
    constant_s: NonNegative = 0.0
    growth: _Exponent = 0.0
    num_replicas: Count = 1
    uncertainty: Uncertainty | None = None
    rates: dict[Label, Positive] = {}

    @property
    def level(self) -> dict[str, Estimate]:
        """The values of the level, with their standard errors."""
        figures = {}
        for i, name in enumerate(LEVEL):
            value, known = getattr(self, name), self.uncertainty
            error = math.nan if known is None else known.covariance[i][i] ** 0.5
            # The uncertainty of the two factors is that of their logarithms.
            figures[name] = Estimate(value, error * value if name in LEVEL[:2] else error)
        return figures

    def summary(self) -> Table:
        prior = () if self.uncertainty is None else self.uncertainty.prior
        rows = [
            {"name": name, "value": value, "what": f"{_LEVEL[name]}{' (prior)' * (name in prior)}"}
            for name, value in self.level.items()
        ]
        notes = [
            "(prior): mostly from other systems, because these steps determine little of it; runs "
            "at other scales would"
        ]
        columns = (Column("level", "name"), "value", Column("meaning", "what"))
        return Table(columns, rows, "What calibration changed", notes if prior else ())


def apply_calibrated(kernels: Kernels, calibrated: Calibrated, where: str) -> Kernels:
    """The kernels with the changes.

    **Raises:**

    A `ValueError` for an invalid law: see `check_variation`.
    """
    with located(where):
        for variation in calibrated.variability:
            check_variation(variation)
    level = {name: getattr(calibrated, name) for name in (*LEVEL, "num_replicas")}
    laws = replace_variations(kernels.variability, calibrated.variability)
    rates = calibrated.rates
    tables = tuple(_slower(table, rates.get(table.kernel, 1.0)) for table in kernels.efficiency)
    changes = {**level, "constant_share": None, "variability": laws, "efficiency": tables}
    return msgspec.structs.replace(kernels, **changes)


def _slower(table: Efficiency, factor: float) -> Efficiency:
    """A table of kernels that take so many times as long."""
    values, latency_s = tuple(v / factor for v in table.values), table.latency_s * factor
    return msgspec.structs.replace(table, values=values, latency_s=latency_s)
