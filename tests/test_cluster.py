import itertools as it

import msgspec
import numpy as np
import pytest

from prism_jax.cluster import (
    Group,
    Routing,
    collective_latency,
    compute_latency,
    dispatch_latency,
    find_link,
    find_send_link,
    group_of,
    send_recv_latency,
)
from prism_jax.cluster._collective import ranks_per_domain, torus_share
from prism_jax.data import Cluster, Kernels, Layout, list_names, load_cluster, load_kernels
from prism_jax.data._kernels import Efficiency, Overlap


def _perfect(*efficiency: Efficiency) -> Kernels:
    """A profile in which all is as fast as the hardware's figures."""
    return Kernels(efficiency, (), Overlap(contention=0.0, data_parallel=1.0))


def _without_latency(cluster: Cluster) -> Cluster:
    links = tuple(msgspec.structs.replace(link, latency_s=0.0) for link in cluster.links)
    return msgspec.structs.replace(cluster, links=links)


@pytest.fixture(scope="module")
def h100():
    return _without_latency(load_cluster("dgx-h100", 512))


@pytest.mark.parametrize(
    ("size", "stride", "link"),
    [
        (1, 1, "nvlink"),
        (4, 1, "nvlink"),
        (8, 1, "nvlink"),
        (2, 4, "nvlink"),
        (16, 1, "infiniband"),
        (2, 8, "infiniband"),
        (128, 4, "infiniband"),
        # Groups of three consecutive ranks: some lie across two nodes of eight.
        (3, 1, "infiniband"),
    ],
)
def test_the_innermost_link_that_holds_a_group(h100, size, stride, link):
    assert find_link(h100, Group("any", size, stride)).name == link


def test_groups_follow_the_order_of_ranks():
    layout = Layout(tp=4, cp=2, dp=16, pp=8)
    assert group_of("tp", layout) == Group("tp", 4, 1)
    assert group_of("cp", layout) == Group("cp", 2, 4)
    assert group_of("dp", layout) == Group("dp", 32, 4)
    assert group_of("all", layout) == Group("all", 1024, 1)
    experts = Layout(tp=4, dp=16, ep=8, etp=2)
    assert group_of("etp", experts) == Group("etp", 2, 1)
    assert group_of("ep", experts) == Group("ep", 8, 2)
    assert group_of("edp", experts) == Group("edp", 4, 16)


def test_gpus_of_a_rack_share_nvlink():
    rack = load_cluster("gb200-nvl72", 144)
    assert find_link(rack, Group("tp", 8)).name == "nvlink"
    assert find_link(rack, Group("dp", 9, 8)).name == "nvlink"
    assert find_link(rack, Group("dp", 16, 8)).name == "infiniband"
    assert ranks_per_domain(Group("dp", 16, 8), rack.links[0]) == 9


def test_pipeline_ranks_within_a_node(h100):
    assert find_send_link(h100, Layout(tp=4, pp=2), 0, 1).name == "nvlink"
    assert find_send_link(h100, Layout(tp=4, pp=4), 1, 2).name == "infiniband"
    assert find_send_link(h100, Layout(tp=4, pp=4), 2, 3).name == "nvlink"
    assert find_send_link(h100, Layout(tp=4, pp=4), 3, 0).name == "infiniband"
    assert find_send_link(h100, Layout(tp=8, pp=2), 1, 0).name == "infiniband"


@pytest.mark.parametrize(
    ("kind", "passes"),
    [("all_gather", 1), ("reduce_scatter", 1), ("all_to_all", 1), ("all_reduce", 2)],
)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_ring_within_a_node(h100, kind, passes, size):
    num_bytes = 1e9
    found = collective_latency(kind, num_bytes, Group("tp", size), h100, _perfect())
    assert found == pytest.approx(passes * (size - 1) / size * num_bytes / 450e9)


def test_a_group_of_one_is_free(h100):
    assert collective_latency("all_reduce", 1e9, Group("tp", 1), h100, _perfect()) == 0


def test_one_rank_per_node(h100):
    found = collective_latency("reduce_scatter", 1e9, Group("dp", 16, 8), h100, _perfect())
    assert found == pytest.approx(15 / 16 * 1e9 / 50e9)


def test_several_ranks_per_node_share_the_way_out(h100):
    # Eight adapters per node, each with a ring past every rank for an eighth.
    found = collective_latency("all_gather", 8e9, Group("dp", 64, 1), h100, _perfect())
    assert found == pytest.approx(max(63 / 64 * 1e9 / 50e9, 7 / 8 * 8e9 / 450e9))
    # All-to-all has no such shortcut.
    found = collective_latency("all_to_all", 8e9, Group("dp", 64, 1), h100, _perfect())
    assert found == pytest.approx(7 / 8 * 8e9 / 50e9)


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize(("groups", "most"), [(1, 1), (2, 1), (4, 2), (8, 3), (16, 5), (8, 8)])
def test_tokens_go_once_to_each_rank_and_each_node(h100, copies, groups, most):
    """Of eight ranks in one node, or in two, with two experts each: by all choices of groups and of
    experts within them."""
    token_bytes, experts = 1e9, 16
    each = experts // groups
    choices = [
        choice
        for chosen in it.combinations(range(groups), most)
        for choice in it.combinations([e for e in range(experts) if e // each in chosen], copies)
    ]
    routing = Routing(copies, experts, groups, most)

    def distinct(each: int) -> float:
        return sum(len({one // each for one in choice}) for choice in choices) / len(choices)

    found = dispatch_latency("deepep", token_bytes, routing, Group("ep", 8), h100, _perfect())
    assert found == pytest.approx(7 / 8 * token_bytes * distinct(2) / 450e9)
    # Every other rank of a node: each has an adapter of its own.
    far = dispatch_latency("deepep", token_bytes, routing, Group("ep", 8, 2), h100, _perfect())
    outside, inside = 1 / 2 * distinct(8) / 50e9, 3 / 4 * distinct(2) / 450e9
    assert far == pytest.approx(token_bytes * max(outside, inside))


def test_tokens_of_deepseek_v3_come_to_four_nodes_at_most():
    """Of eight, to which eight of 256 experts would come to 5.3."""
    free, limited = Routing(8, 256), Routing(8, 256, 8, 4)
    assert limited.parts_met(8) < 4 < 5 < free.parts_met(8)
    # All groups are no limit.
    assert Routing(8, 256, 8, 8).parts_met(8) == pytest.approx(free.parts_met(8))
    assert Routing(8, 256, 8, 8).parts_met(4) == pytest.approx(free.parts_met(4))


@pytest.mark.parametrize(
    ("routing", "parts"),
    [
        (Routing(2, 12, 3, 2), 4),  # Groups that lie across two parts.
        (Routing(2, 12, 3, 2), 2),
        (Routing(3, 12, 6, 3), 4),
        (Routing(2, 12, 4, 1), 3),
        (Routing(2, 12, 3, 2), 12),
        (Routing(2, 12, 6, 3), 3),  # These nest.
        (Routing(2, 12, 2, 1), 4),
        (Routing(3, 12), 4),
    ],
)
def test_parts_met_are_those_of_all_choices(routing, parts):
    each, size = routing.experts // routing.groups, routing.experts // parts
    met = [
        len({expert // size for expert in chosen})
        for groups in it.combinations(range(routing.groups), routing.most_groups)
        for chosen in it.combinations(
            [expert for expert in range(routing.experts) if expert // each in groups],
            routing.copies,
        )
    ]
    assert routing.parts_met(parts) == pytest.approx(np.mean(met), abs=1e-12)


_V5P, _V6E = load_cluster("tpu-v5p", 128), load_cluster("tpu-v6e", 16)


@pytest.mark.parametrize(
    ("cluster", "size", "share"),
    [
        (_V5P, 512, 1),  # All three axes of 8 x 8 x 8.
        (_V5P, 64, 2 / 3),
        (_V5P, 8, 1 / 3),
        (_V6E, 64, 1 / 2),  # 8 x 8 chips are lines, whose ends are not joined.
        (load_cluster("tpu-v6e", 64), 256, 1),
        (load_cluster("dgx-h100", 4), 8, 1),
    ],
)
def test_a_group_has_its_axes_of_a_torus(cluster, size, share):
    kernels = Kernels((), (), Overlap(contention=0.0, data_parallel=1.0), ())
    link, group = cluster.links[0], Group("dp", size)
    assert find_link(cluster, group) is link
    rate = share * link.bandwidth_bytes_per_s
    expected = (size - 1) / size * 1e12 / rate
    found = collective_latency("all_gather", 1e12, group, cluster, kernels)
    assert found == pytest.approx(expected + (size - 1) * link.latency_s)


def test_all_to_all_crosses_a_quarter_of_each_ring():
    """Each of 512 chips sends to all; on a ring of 8 the mean distance is 2, on three axes 6."""
    assert torus_share("all_to_all", _V5P.links[0], 512, _V5P) == pytest.approx(1 / 6)


def test_latency_counts_hops():
    cluster = load_cluster("dgx-h100", 512)
    found = collective_latency("all_gather", 1e-9, Group("dp", 16, 4), cluster, _perfect())
    assert found == pytest.approx(7 * 1e-5 + 8 * 3e-6)
    found = collective_latency("all_reduce", 1e-9, Group("tp", 8), cluster, _perfect())
    assert found == pytest.approx(2 * 7 * 3e-6)


@pytest.mark.parametrize("size", [2, 8, 16, 72])
def test_a_switch_of_more_than_eight_has_the_hops_of_eight(size):
    """Where it reduces or forwards; all-gathers and reduce-scatters are rings of any size."""
    rack, perfect, group = load_cluster("gb300-nvl72", 18), _perfect(), Group("any", size)
    hop = rack.links[0].latency_s
    for kind, hops in (
        ("all_gather", size - 1),
        ("reduce_scatter", size - 1),
        ("all_to_all", min(size - 1, 7)),
        ("hybridep", min(size - 1, 7)),
        ("all_reduce", 2 * min(size - 1, 7)),
    ):
        found = collective_latency(kind, 0, group, rack, perfect)
        assert found == pytest.approx(hops * hop, rel=1e-12)


def test_send_recv(h100):
    assert send_recv_latency(1e9, h100.links[1], h100, _perfect()) == pytest.approx(1e9 / 50e9)


def test_efficiency_depends_on_size(h100):
    table = Efficiency("all_gather", "nvlink", (1e6, 1e8), (0.2, 0.8))
    found = collective_latency("all_gather", 1e7, Group("tp", 2), h100, _perfect(table))
    assert found == pytest.approx(0.5 * 1e7 / (0.5 * 450e9))


@pytest.mark.parametrize("size", [1, 4, 16, 64, 256, 1024, 16384])
def test_all_reduce_of_eight_gpus_is_as_measured(size):
    # Bus bandwidths of 8 A100 and 8 H200, from which the efficiencies were derived.
    a100 = {1: 18, 4: 72, 16: 106, 64: 172, 256: 194, 1024: 229, 16384: 235}
    h200 = {1: 40, 4: 107, 16: 220, 64: 347, 256: 436, 1024: 464, 16384: 482}
    for name, measured in (("dgx-a100", a100), ("dgx-h200", h200)):
        cluster = load_cluster(name, 1)
        num_bytes = size * 2**20
        seconds = collective_latency(
            "all_reduce", num_bytes, Group("tp", 8), cluster, load_kernels(cluster)
        )
        bus = 2 * 7 / 8 * num_bytes / seconds / 1e9
        assert bus == pytest.approx(measured[size], rel=0.03 if size > 1 else 0.1)


def test_all_gathers_over_a_network_are_near_a_measurement(shared):
    polars = pytest.importorskip("polars")
    path = shared / "data/collectives/nccl_all_gather.csv"
    rows = polars.read_csv(path).rename(str.strip).rows(named=True)
    cluster = load_cluster("dgx-h100", 512)
    kernels = load_kernels(cluster)
    for row in rows:
        num_bytes = row["size(MB)"] * 2**20
        seconds = num_bytes / row["out algbw(GB/s)"] / 1e9
        found = collective_latency(
            "all_gather", num_bytes, Group("dp", row["GPUs"]), cluster, kernels
        )
        # Another network (EFA), so only roughly: within a factor of two.
        if num_bytes >= 2**29:
            assert 0.5 < found / seconds < 2


def test_collectives_between_nodes_beside_measurements(shared):
    """Of all-to-alls the table is that of these rows; rings and trees are 1.3 to 1.5 off."""
    from validation.parts import collective_rows

    errors: dict[str, list[float]] = {}
    for row in collective_rows(shared / "data/collectives"):
        errors.setdefault(row["kind"], []).append(row["error"])
    assert abs(np.median(errors["all_to_all"])) < 0.07
    for kind, most in (("all_to_all", 1.1), ("all_gather", 1.55), ("all_reduce", 1.35)):
        assert np.exp(np.mean(np.abs(errors[kind]))) < most


def test_roofline(h100):
    device = h100.device
    assert compute_latency("gemm", "bf16", 989.4e9, 1.0, device, _perfect()) == pytest.approx(1e-3)
    assert compute_latency("gemm", "fp8", 1978.9e9, 1.0, device, _perfect()) == pytest.approx(1e-3)
    assert compute_latency("gemm", "fp8", 1.0, 3.35e9, device, _perfect()) == pytest.approx(1e-3)
    assert compute_latency("norm", "", 0, 3.35e9, device, _perfect()) == pytest.approx(1e-3)
    gemm = Efficiency("gemm", "fp8", (1e9, 1e11), (0.25, 0.75), latency_s=1e-5)
    move = Efficiency("elementwise", "", (1e6, 1e8), (0.4, 0.8), latency_s=2e-5)
    kernels = _perfect(gemm, move)
    assert compute_latency("gemm", "fp8", 1e10, 1.0, device, kernels) == pytest.approx(
        1e10 / (0.5 * 1978.9e12) + 1e-5
    )
    assert compute_latency("norm", "", 0, 1e7, device, kernels) == pytest.approx(
        1e7 / (0.6 * 3.35e12) + 2e-5
    )


def test_what_no_switch_reduces_is_no_faster_than_its_link():
    num_bytes = 2**34
    for name in list_names("cluster"):
        machine = load_cluster(name, 1)
        link, ranks = machine.links[0], machine.devices_per_node
        kernels = load_kernels(machine)
        all_reduce = collective_latency(
            "all_reduce", num_bytes, Group("dp", ranks), machine, kernels
        )
        bus = 2 * (ranks - 1) / ranks * num_bytes / all_reduce
        # Switches of NVLink reduce, so that a device sends less than without them.
        most = 1.1 if link.name == "nvlink" else 1.0
        rate = link.bandwidth_bytes_per_s * torus_share("all_reduce", link, ranks, machine)
        assert 0.5 < bus / rate < most, name
