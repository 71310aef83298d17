"""Chakra execution traces. The files are made here, by the public schema: none is recorded."""

import json
import struct

import numpy as np
import pytest

from prism_jax.trace import contents, read_profile_traces, read_rank_traces
from prism_jax.trace._chakra import _nodes as _nodes_of

from .test_kineto import _events
from .test_trace import _job, _made_trace, _plain


def _varint(value):
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _field(number, value):
    if isinstance(value, bytes):
        return _varint(number << 3 | 2) + _varint(len(value)) + value
    return _varint(number << 3) + _varint(value)


def _attribute(name, value):
    number = 27 if isinstance(value, bool) else 9 if isinstance(value, int) else 29
    content = value.encode() if isinstance(value, str) else value % 2**64
    return _field(1, name.encode()) + _field(number, content)


def _protobuf(nodes, **metadata):
    """Length-delimited messages: the metadata, then the nodes."""
    parts = [b"".join(_field(2, _attribute(k, v)) for k, v in metadata.items())]
    for id, name, type, before, start, duration, attributes in nodes:
        part = (_field(1, id) if id else b"") + _field(2, name.encode()) + _field(3, type)
        part += _field(4, b"".join(map(_varint, before)))  # Packed.
        part += _field(6, start) + _field(7, duration) + _field(8, _field(1, b"[]"))
        parts.append(part + b"".join(_field(10, _attribute(k, v)) for k, v in attributes.items()))
    return b"".join(_varint(len(part)) + part for part in parts)


_NAMES = {4: "COMP_NODE", 7: "COMM_COLL_NODE"}


def _json(nodes, **metadata):
    """As Chakra's own converter writes it: objects one after the other, long numbers as texts."""

    def attributes(given):
        keys = {bool: "boolVal", int: "int64Val", str: "stringVal"}
        return [
            {"name": k, keys[type(v)]: str(v) if type(v) is int else v} for k, v in given.items()
        ]

    objects = [{"version": "0.0.4", "attr": attributes(metadata)}]
    for id, name, type_, before, start, duration, own in nodes:
        node = {"id": str(id)} if id else {}
        node |= {"name": name, "type": _NAMES[type_], "attr": attributes(own)}
        node |= {"ctrlDeps": [str(b) for b in before], "startTimeMicros": str(start)}
        objects.append(node | {"durationMicros": str(duration)})
    return "\n".join(json.dumps(x, indent=2) for x in objects).encode()


def _nodes(events):
    """What a converter makes of Kineto's events: the host's ranges and launches, and what they
    launch, in whole microseconds."""
    nodes, launches = [], {}
    for number, e in enumerate(events):
        start = round(e["ts"])
        times = (start, round(e["ts"] + e["dur"]) - start)
        link = e["args"].get("correlation")
        if e["cat"] == "kernel":
            collective = e["args"].get("Collective name")
            own = {"stream": e["tid"]}
            if collective:
                kind = {"allreduce": 0, "allgather": 2, "reducescatter": 7}[collective]
                own |= {
                    "comm_type": kind,
                    "comm_size": 8,
                    "pg_name": str(e["args"]["Process Group Name"]),
                }
            before = [launches[link]] if link in launches else []
            type_ = 7 if collective else 4
            nodes.append((number, e["name"], type_, before, *times, own))
        else:
            name = f"aten::{e['name']}" if e["cat"] == "cuda_runtime" else e["name"]
            nodes.append((number, name, 4, [], *times, {"is_cpu_op": True}))
            if link is not None:
                launches[link] = number
    return nodes


@pytest.fixture(scope="module")
def made():
    return _made_trace(_job(), 5, _plain)


@pytest.mark.parametrize(("suffix", "write"), [("et", _protobuf), ("json", _json)])
def test_a_chakra_trace_has_the_same_ops(tmp_path, made, suffix, write):
    for rank in range(4):
        content = write(_nodes(_events(made, rank % 2, rank // 2)), world_size=4)
        (tmp_path / f"chakra.{rank}.{suffix}").write_bytes(content)
    trace = read_profile_traces(tmp_path, made.job, "chakra")
    assert trace.steps.tolist() == made.steps.tolist()
    for op, end in made.end.items():
        np.testing.assert_allclose(trace.end[op] - 1e-4, end, atol=2.1e-6)
    found = contents(read_rank_traces(tmp_path, "chakra"))
    assert found.ranks == (0, 1, 2, 3)
    assert found.clocks.matched == 5 * 3
    (tmp_path / f"chakra.3.{suffix}").unlink()
    assert contents(read_rank_traces(tmp_path, "chakra")).missing == (3,)
    notes = read_profile_traces(tmp_path, made.job, "chakra").notes
    assert "replica 1, stage 1, rank 3" in notes[0]


def test_a_node_on_which_no_operator_of_the_host_depends_is_an_op_by_itself(tmp_path):
    nodes = [(1, "forward-compute", 4, [], 10, 5, {}), (2, "optimizer", 4, [1], 20, 5, {})]
    (tmp_path / "rank0.et").write_bytes(_protobuf(nodes))
    found = contents(read_rank_traces(tmp_path, "chakra"))
    assert found.ops == {"forward-compute": 1, "optimizer": 1, "load-data": 1}


def test_numbers_are_read_as_the_schema_writes_them(tmp_path):
    def read(attribute):
        node = _field(1, 1) + _field(2, b"a") + _field(10, _field(1, b"n") + attribute)
        metadata = _field(2, _attribute("rank", 0))
        parts = [metadata, node]
        (tmp_path / "a.et").write_bytes(b"".join(_varint(len(p)) + p for p in parts))
        with open(tmp_path / "a.et", "rb") as file:
            *_, node = _nodes_of(file)
        return node.attributes["n"]

    assert read(_field(9, -3 % 2**64)) == -3  # int64
    assert read(_field(15, 5)) == -3  # sint32
    assert read(_varint(3 << 3 | 1) + struct.pack("<d", 2.5)) == 2.5
    assert read(_varint(5 << 3 | 5) + struct.pack("<f", 2.5)) == 2.5
    assert read(_varint(19 << 3 | 5) + struct.pack("<I", 7)) == 7
    assert read(_varint(23 << 3 | 5) + struct.pack("<i", -7)) == -7
    assert read(_field(27, 1)) is True
    assert read(_field(31, b"bytes")) is None


@pytest.mark.parametrize(("suffix", "write"), [("et", _protobuf), ("json", _json)])
def test_a_node_without_an_id_has_the_default_of_the_schema(tmp_path, suffix, write):
    """Zero, which is not written; other nodes depend on it by that number."""
    nodes = [
        (0, "forward-compute", 4, [], 10, 5, {"is_cpu_op": True}),
        (1, "gemm", 4, [0], 20, 7, {"stream": 7}),
    ]
    (tmp_path / f"rank0.{suffix}").write_bytes(write(nodes, rank=0))
    (trace,) = read_rank_traces(tmp_path, "chakra")
    assert trace.spans.names == ("forward-compute", "launch", "gemm")


_ONE = [(1, "a", 4, [], 10, 5, {}), (2, "b", 4, [1], 20, 5, {})]
_UNTIMED = [(1, "a", 4, [], 0, 0, {}), (2, "b", 4, [1], 0, 0, {})]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.et", _protobuf(_ONE)[:-3], "ends within a node"),
        ("a.et", _protobuf(_UNTIMED), "none of its 2 nodes has a duration"),
        ("a.et", _protobuf([]), "it has no nodes"),
        ("a.et", b"", "it has no nodes"),
        ("a.et", b"{}{}{}", "it "),
        ("a.et", b"\x02\x0f\x0f\x02\x0f\x0f", "not a Chakra execution trace"),
        ("a.et", b"\xff" * 40, "not a Chakra execution trace"),
        ("a.et", _protobuf([(1, "a", 4, [], 2**63, 5, {})]), "beyond any clock"),
        ("a.json", _json(_ONE)[:-30], "ends within a node"),
        ("a.json", _json(_UNTIMED), "none of its 2 nodes has a duration"),
        ("a.et", _protobuf([(i, "a", 4, [], 0, 5, {}) for i in (1, 2)]), "all start at 0"),
        ("a.json", b"no", "not a Chakra execution trace"),
        ("a.json", b'{"traceEvents": []}', "not a Chakra execution trace"),
        ("a.json", b'[{"id": "x"}]', "not a Chakra execution trace"),
        ("a.json", b'[{"id": Infinity, "name": "a"}]', "not a Chakra execution trace"),
        ("a.json", b'[{"id": 1, "name": "a", "dataDeps": [Infinity]}]', "not a Chakra"),
        ("a.json", b'[{"name": "a", "startTimeMicros": 1e308, "durationMicros": 9}]', "any clock"),
        ("a.json", b'[{"name": "a", "startTimeMicros": Infinity, "durationMicros": 9}]', "clock"),
        ("a.et", _protobuf(_ONE, world_size=10**8), "`world_size` is 100000000"),
        ("a.json", b"[3]", "not a Chakra execution trace"),
        ("a.json", b"\xff\xfe", "not a Chakra execution trace"),
    ],
)
def test_bad_chakra_traces_are_refused_in_one_sentence(tmp_path, refused, name, content, message):
    (tmp_path / name).write_bytes(content)
    error = refused(["trace", str(tmp_path / name), "--format", "chakra"])
    assert message in error


def test_any_bytes_are_read_or_refused(tmp_path):
    """Each byte of a good file changed, one at a time."""
    good, refusals = _protobuf(_ONE, rank=0), []
    for place in range(len(good)):
        for change in (1, 0x80):
            bad = bytearray(good)
            bad[place] ^= change
            (tmp_path / "rank0.et").write_bytes(bad)
            try:
                contents(read_rank_traces(tmp_path, "chakra"))
            except ValueError as error:
                refusals.append(str(error))
    assert refusals
    assert "\n" not in "".join(refusals)


@pytest.mark.parametrize("format", ["kineto", "chakra"])
@pytest.mark.parametrize(
    "trace",
    [
        {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": [{"id": 1, "name": "aten::mm"}]},
        {"workload_graph": [{"Id": 1, "Name": "aten::mm", "runtime": 20}]},
    ],
)
def test_an_execution_trace_without_times_is_refused_with_what_joins_it(trace, format, tmp_path):
    (tmp_path / "rank0.json").write_text(json.dumps(trace))
    with pytest.raises(ValueError, match="by `chakra_trace_link`, convert that to Chakra"):
        list(read_rank_traces(tmp_path, format))
