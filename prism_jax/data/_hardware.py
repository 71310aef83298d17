"""Machines: devices, and clusters of them."""

import itertools as it
from typing import Annotated, Any

import msgspec

from ._types import (
    AtLeastOne,
    Count,
    Fraction,
    Kelvin,
    Label,
    Name,
    NonNegative,
    Positive,
    Text,
    Watts,
)
from ._variations import Law


_MOST = 10**9  # The largest value of any count in a file.


class Power(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an accelerator draws, and what lowers its clock. See `clock_factor`.

    **Attributes:**

    - `limit_w`: the power that it may draw.
    - `rated_w`: the limit at which the efficiencies of its kernels were measured; at this limit
        nothing changes.
    - `static_w`: what it draws at any clock: leakage, and what else does not compute.
    - `gemm_w`, `attention_w`: what it would draw in matrix products and in attention at the highest
        clock; above the limit, the clock falls.
    - `moving_w`: what it draws in kernels that only move bytes, which the clock does not slow.
    - `leakage_sigma`: how much `static_w` differs between devices of one temperature: the standard
        deviation of its logarithm.
    - `leakage_per_k`: how much the logarithm of `static_w` grows with each kelvin.
    - `temperature_k`: the standard deviation of the temperature between devices, in kelvins.
    - `warmer_k`: how much warmer than usual all of them are, as their inlets are; in kelvins.
    - `exponent`: the power of the clock that dynamic power grows with: voltage grows with the
        clock, and power with the clock times the square of the voltage.
    - `source`: where the numbers are from.
    """

    limit_w: Watts
    rated_w: Watts
    static_w: Watts
    gemm_w: Watts
    attention_w: Watts
    moving_w: Watts
    leakage_sigma: Fraction
    leakage_per_k: Fraction
    temperature_k: Annotated[float, msgspec.Meta(ge=0, le=100)]
    warmer_k: Kelvin = 0.0
    exponent: AtLeastOne = 3.0
    source: str = ""


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a host has for each of its accelerators: the way to what a job offloads.

    **Attributes:**

    - `link_bytes_per_s`: the bandwidth of the link between them, in each direction.
    - `memory_bytes_per_s`: an accelerator's share of the bandwidth of the host's memory, which
        bounds an optimizer that runs on the host.
    """

    link_bytes_per_s: Positive
    memory_bytes_per_s: Positive


class Device(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One accelerator.

    **Attributes:**

    - `memory_bytes`: the size of its main memory, as its driver reports it: 79.1 GiB of 80 GB.
    - `memory_bandwidth_bytes_per_s`: the bandwidth of its main memory.
    - `peak_flop_per_s`: the peak rate for each dtype, without sparsity.
    - `name`: the name of the device.
    - `title`: what the device is called in headers; by default its name.
    - `kernels`: the folder of `kernels/` with its efficiencies and variability, or the path of one,
        seen from the device's file; by default the folder with the name of the device.
    - `source`: where the numbers are from.
    - `power`: what it draws; `None` if that was not measured.
    - `host`: the host's memory and the link to it; `None` if they are not known.
    - `laws`: laws of this device in place of those of its kernels: how much its GPUs differ.
    """

    memory_bytes: Positive
    memory_bandwidth_bytes_per_s: Positive
    peak_flop_per_s: dict[Name, Positive]
    name: Label = ""
    title: Label = ""
    kernels: Text | None = None
    source: str = ""
    power: Power | None = None
    host: Host | None = None
    laws: tuple[Law, ...] = ()


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A network level that joins groups of consecutive ranks.

    **Attributes:**

    - `name`: the name of the link.
    - `group`: how many consecutive ranks it joins.
    - `bandwidth_bytes_per_s`: the bandwidth per device and direction.
    - `latency_s`: the latency of one hop.
    - `axes`: of a torus, how many axes it has, over whose links, two for each, the bandwidth is
        shared out; 0 for a switch.
    - `rings_from`: of how many devices on the axes are rings; those of fewer are lines.
    """

    name: Name
    group: Count
    bandwidth_bytes_per_s: Positive
    latency_s: NonNegative = 1e-5
    axes: Annotated[int, msgspec.Meta(ge=0, le=6)] = 0
    rings_from: Count = 1


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes of equal devices, and the links between them.

    **Attributes:**

    - `device`: the accelerator.
    - `num_nodes`: the number of nodes; of a job, by default as many as its GPUs need.
    - `devices_per_node`: the number of devices in each node.
    - `links`: the links, innermost first; the last one joins all devices.
    - `name`: the name of its family.
    - `kernels`: the folder of `kernels/` with the efficiencies and variability of its collectives,
        or the path of one, seen from the cluster's file.
    - `source`: where the numbers are from.
    - `network`: the class of the network, a file of `kernels/networks/`: `dedicated` to the job, or
        `shared` with others; or the path of one, seen from the cluster's file.
    - `load`: how many nodes others keep busy in the job's part of a shared network, over the usual
        number.
    """

    device: Device
    num_nodes: Count
    devices_per_node: Count
    links: tuple[Link, ...]
    name: Label = ""
    kernels: Text | None = None
    source: str = ""
    network: Text = "dedicated"
    load: NonNegative = 1.0

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    @property
    def host(self) -> Host:
        """The host of a device; a `ValueError` of one sentence if it is not known."""
        if self.device.host is None:
            raise ValueError(
                f"`training.offload` needs a host, and that of the device `{self.device.name}` is "
                "not known; add `[host]` to the device's file, or leave `offload` out."
            )
        return self.device.host


def check_cluster(cluster: Cluster) -> None:
    """Raises a `ValueError` of one sentence if the links of a cluster do not nest, or if its device
    draws less than at rest.
    """
    if not cluster.links:
        raise ValueError("the key `links` is empty; give at least one link.")
    if len({link.name for link in cluster.links}) < len(cluster.links):
        raise ValueError("`links` has two links with one name; rename one of them.")
    for inner, outer in it.pairwise(cluster.links):
        if outer.group <= inner.group:
            raise ValueError(
                f"the `group` of the link `{outer.name}` is {outer.group}, not more than that of "
                f"`{inner.name}` before it ({inner.group}); list links innermost first."
            )
    if not cluster.device.peak_flop_per_s:
        raise ValueError("`peak_flop_per_s` is empty; give one dtype at least.")
    if (power := cluster.device.power) is None:
        return
    for name in ("limit_w", "rated_w", "gemm_w", "attention_w", "moving_w"):
        if getattr(power, name) <= power.static_w:
            raise ValueError(
                f"`power.{name}` is {getattr(power, name):g} W, not more than the "
                f"{power.static_w:g} W that the device draws at any clock (`static_w`); raise it."
            )


def sized(table: dict[str, Any], num_nodes: int | None = None) -> dict[str, Any]:
    """The table of a cluster with `num_nodes` nodes, by default the number in the table itself.

    A link without a `group` joins all devices. It is left out if a link before it already does.

    **Raises:**

    A `ValueError` if the number of nodes is not given or is too large.
    """
    table = dict(table)
    if num_nodes is not None:
        table["num_nodes"] = num_nodes
    if "num_nodes" not in table:
        raise ValueError(
            f"the cluster `{table.get('name', '')}` is a family; say how many nodes it has as "
            "`num_nodes`."
        )
    nodes, per_node, links = (table.get(key) for key in ("num_nodes", "devices_per_node", "links"))
    if not isinstance(links, list):
        return table
    # A value that is not a number is refused later, when the table is converted.
    devices = nodes * per_node if type(nodes) is int and type(per_node) is int else 1
    if devices > _MOST:
        raise ValueError(
            f"`num_nodes` = {nodes} with {per_node} devices each is more than the {_MOST:,} "
            "devices that a cluster may have; give fewer."
        )
    kept: list[Any] = []
    for link in links:
        if isinstance(link, dict) and "group" not in link:
            if kept and _joined(kept[-1]) >= devices:
                continue
            link = {**link, "group": max(devices, 1)}
        kept.append(link)
    return {**table, "links": kept}


def _joined(link: Any) -> int:
    group = link.get("group") if isinstance(link, dict) else None
    return group if type(group) is int else 0
