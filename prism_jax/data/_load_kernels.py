"""Profiles of kernels, read from `kernels/`."""

import itertools as it
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import ClassVar, TypeVar

import msgspec

from .._files import shown
from .._misc import quoted, unknown_name
from ._hardware import Cluster, Device
from ._kernels import Efficiency, Kernels, Overlap, Source
from ._operators import Operators
from ._priors import load_priors
from ._read import (
    data_folder,
    find_file,
    is_path,
    list_names,
    located,
    read_rows,
    read_struct,
    write_toml,
)
from ._shapes import Shapes, ShapeTable, read_shapes, write_shapes
from ._types import Label, Name, NonNegative, Positive, Text
from ._variations import Law, Variation, check_variation, read_variations, replace_variations


# Used for machines without a folder of their own, because efficiencies and factors have no unit.
_DEFAULT = {"device": "h100-sxm", "cluster": "dgx-h100"}

# Whose kernels were measured op by op; and which of these belong to its own table of products.
_MEASURED = "h200-sxm"
_SAME_DIE = "h100-sxm"  # What devices with the compute die of the H200 have as their kernels.
_PRODUCTS = ("gemm-output", "gemm-unaligned")

_T = TypeVar("_T", bound=msgspec.Struct)


class EfficiencyRow(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"variant": "dtype"}
):
    """A row of a device's `efficiency.csv`."""

    kernel: Name
    size: Positive
    efficiency: Positive
    variant: Label = ""
    latency_s: NonNegative = 0.0


class CollectiveRow(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    rename={"variant": "link", "size": "bytes"},
):
    """A row of a cluster's `efficiency.csv`."""

    kernel: Name
    size: Positive
    efficiency: Positive
    variant: Label = ""
    latency_s: ClassVar[float] = 0.0


class Network(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A class of networks; its laws replace those of the cluster's kernels."""

    source: Text
    laws: tuple[Law, ...] = ()


def load_network(name: str | os.PathLike[str], load: float = 1.0) -> tuple[Variation, ...]:
    """The laws of a class of networks by its name or the path of a file. The more others load a
    shared one, the longer spells of congestion last, in proportion.

    **Raises:**

    A `ValueError` of one sentence that names the file and the key.
    """
    path = find_file("network", name)
    laws = [law.variation for law in read_struct(path, "network", Network).laws]
    with located(shown(path)):
        for i, law in enumerate(laws):
            check_variation(law)
            if "spell_s" in (of := law.parameters):
                longer = {**of, "spell_s": load * of["spell_s"]}
                laws[i] = msgspec.structs.replace(law, parameters=longer)
    return tuple(laws)


def load_kernels(cluster: Cluster, operators: Operators | None = None) -> Kernels:
    """Loads the profile of a cluster: the compute kernels of its device and its collectives. With
    `operators`, the device has the kernels of their libraries; where these were not measured, its
    own, and of kinds that it lacks the shares of the peak that they reach on an H200.

    For a machine without a folder of its own, the efficiencies of the machine that it names are
    used, or those of an H100 and its cluster; `Kernels.notes` says so. Links are then matched by
    their place, the innermost first. `network`, `growth` and `constant_s` are those of jobs that
    are not calibrated (`kernels/priors.toml`).

    **Raises:**

    A `ValueError` if a file is invalid, or if there is no folder with the name in `kernels`.
    """
    device, of_device = _folder("device", _of_year(cluster.device, operators))
    network, of_network = _folder("cluster", cluster)
    efficiency = _tables(_rows(device, EfficiencyRow), device)
    if operators is not None:
        measured = {table.kernel for table in efficiency}
        usual = data_folder("kernels") / f"{_MEASURED}-{operators.libraries}"
        tables = _tables(_rows(usual, EfficiencyRow), usual)
        efficiency += tuple(
            table for table in tables if table.kernel not in {*measured, *_PRODUCTS}
        )
    efficiency += _tables(_by_place(_rows(network, CollectiveRow), cluster), network)
    path = network / "variability.csv"
    variability, of_links = _variations(device, of_device), read_variations(path)
    if operators is not None:  # A process alone has other steps than one of a cluster.
        variability = replace_variations(of_links, variability)
    else:
        variability += of_links
    laws = [(law.kernel, law.component) for law in variability]
    for i, (kernel, component) in enumerate(laws):
        if laws[i] in laws[:i]:
            raise ValueError(
                f"{shown(path)}: `{quoted(kernel) or 'all kernels'}` has two rows for "
                f"`{component}`; keep one."
            )
    new = [law.variation for law in cluster.device.laws]
    for law in new:
        check_variation(law)
    new += load_network(cluster.network, cluster.load)
    variability = replace_variations(variability, new)
    priors = load_priors()
    return Kernels(
        efficiency,
        variability,
        of_network.overlap or Overlap(contention=0.0, data_parallel=1.0),
        (of_device, of_network),
        network=priors.uncalibrated.network,
        growth=priors.uncalibrated.growth,
        constant_s=priors.uncalibrated.constant_s,
        constant_share=priors.constant_share.value,
        shapes=load_shapes(cluster.device.name),
        operators=operators,
    )


def _of_year(device: Device, operators: Operators | None) -> Device:
    """The device with its kernels in the libraries of operators, if these were measured."""
    name = f"{device.name}-{operators.libraries}" if operators else ""
    names = list_names("profile of kernels")
    if device.kernels is not None and is_path(device.kernels):
        return device
    if name in names:
        return msgspec.structs.replace(device, name=name, kernels=name)
    measured_name = f"{_MEASURED}-{operators.libraries}" if operators else ""
    if measured_name in names and (device.kernels or device.name) == _SAME_DIE:
        return msgspec.structs.replace(device, kernels=measured_name)
    return device


def load_shapes(device: str) -> Shapes:
    """The latencies of a device's kernels by shape, from `kernels/shapes/`; empty if not measured.

    They are seconds, not shares of a peak, so that no other device can borrow them.
    """
    path = data_folder("kernels") / "shapes" / device / "shapes.csv"
    return read_shapes(path) if device and path.is_file() else {}


def save_shapes(
    folder: str | os.PathLike[str], tables: Iterable[ShapeTable], source: Source
) -> None:
    """Writes tables by shape, and where they are from, to a folder that is there."""
    write_shapes(pathlib.Path(folder) / "shapes.csv", tables)
    save_source(folder, source)


def save_source(folder: str | os.PathLike[str], source: Source) -> None:
    """Writes where the numbers of a folder of kernels are from, as its `source.toml`."""
    fields = msgspec.to_builtins(source)
    kept = {key: value for key, value in fields.items() if value != ""}
    write_toml(pathlib.Path(folder) / "source.toml", "source", kept)


def links_without_table(cluster: Cluster) -> tuple[str, ...]:
    """The links whose names are not in the cluster's own tables, so that the efficiencies of the
    link at the same place are used.
    """
    folder, source = _folder("cluster", cluster)
    if source.stands_in_for:  # `Kernels.notes` warns about these.
        return ()
    variants = {row.variant for row in _rows(folder, CollectiveRow)}
    return tuple(link.name for link in cluster.links if link.name not in variants)


def load_source(name: str) -> Source:
    """Where the numbers of `kernels/<name>/` are from."""
    if name not in (names := list_names("profile of kernels")):
        raise ValueError(unknown_name("profile of kernels", name, names))
    return _source_of(data_folder("kernels") / name)


def _source_of(folder: pathlib.Path) -> Source:
    source = read_struct(folder / "source.toml", "source", Source)
    return msgspec.structs.replace(source, name=folder.name)


def load_variability(name: str) -> tuple[Variation, ...]:
    """How much the kernels of `kernels/<name>/` vary."""
    return _variations(data_folder("kernels") / name, load_source(name))


def _variations(folder: pathlib.Path, source: Source) -> tuple[Variation, ...]:
    """The laws of a folder, or of the one that has them for it."""
    if source.variability is not None:
        return load_variability(source.variability)
    return read_variations(folder / "variability.csv")


def _folder(kind: str, machine: Device | Cluster) -> tuple[pathlib.Path, Source]:
    """The folder of the kernels of a machine, and where its numbers are from."""
    kernels, name = machine.kernels, machine.name
    if kernels is not None and is_path(kernels):
        folder = pathlib.Path(kernels)
        if not (folder / "source.toml").is_file():
            raise ValueError(
                f"{shown(folder)}: this is not a folder of kernels with a `source.toml`; give one "
                "as `prism-jax measure` writes it, or the name of a shipped one."
            )
        return folder, _source_of(folder)
    if kernels is None:
        kernels = name if name in list_names("profile of kernels") else _DEFAULT[kind]
    source = load_source(kernels)
    if kernels != name:
        stands_in_for = f"{kind} `{name}`" if name else kind
        source = msgspec.structs.replace(source, stands_in_for=stands_in_for)
    return data_folder("kernels") / kernels, source


def _rows(folder: pathlib.Path, row_type: type[_T]) -> list[_T]:
    return [row for _, row in read_rows(folder / "efficiency.csv", row_type)]


def _by_place(rows: Sequence[CollectiveRow], cluster: Cluster) -> list[CollectiveRow]:
    """The rows of a table for the links of a cluster, whose names may differ from the table's."""
    names = list(dict.fromkeys(row.variant for row in rows if row.variant)) or [""]
    of_links = [row for row in rows if not row.variant]
    for place, link in enumerate(cluster.links):
        known = names[-1] if place else names[0]
        known = link.name if link.name in names else known
        of_link = (row for row in rows if row.variant == known)
        of_links += [msgspec.structs.replace(row, variant=link.name) for row in of_link]
    return of_links


def _tables(
    rows: Sequence[EfficiencyRow | CollectiveRow], folder: pathlib.Path
) -> tuple[Efficiency, ...]:
    tables = []
    ordered = sorted(rows, key=lambda row: (row.kernel, row.variant, row.size))
    for labels, group in it.groupby(ordered, key=lambda row: (row.kernel, row.variant)):
        sizes, values, latencies = zip(
            *((row.size, row.efficiency, row.latency_s) for row in group), strict=True
        )
        if len({*sizes}) < len(sizes):
            raise ValueError(
                f"{shown(folder / 'efficiency.csv')}: `{quoted(labels[0])}` has two rows of one "
                "size; keep one."
            )
        tables.append(Efficiency(*labels, sizes, values, max(latencies)))
    return tuple(tables)
