"""Classes of protocol buffers, from the few fields that are read."""

from typing import Any

from .._installed import needed


_CLASSES: dict[int, dict[str, Any]] = {}


def message_classes(schema: dict[str, str]) -> dict[str, Any]:
    """A class for each message of a schema. It has a text for each: the type, name and number of
    its fields, with a `*` if there are several. Of fields whose names end in `_val` a message has
    one.
    """
    if id(schema) in _CLASSES:
        return _CLASSES[id(schema)]
    names = ("descriptor_pb2", "descriptor_pool", "message_factory")
    descriptor_pb2, descriptor_pool, message_factory = (
        needed(f"google.protobuf.{name}") for name in names
    )
    file = descriptor_pb2.FileDescriptorProto(name="read.proto", syntax="proto3")
    for message, fields in schema.items():
        table = file.message_type.add(name=message)
        for kind, name, number in map(str.split, fields.split(",")):
            field = table.field.add(name=name, number=int(number))
            field.label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
            kind = kind.rstrip("*")
            if kind in schema:
                field.type, field.type_name = field.TYPE_MESSAGE, kind
            else:
                field.type = field.Type.Value(f"TYPE_{kind.upper()}")
            if name.endswith("_val"):
                field.oneof_index = 0
        if "_val " in fields:
            table.oneof_decl.add(name="value")
    pool = descriptor_pool.DescriptorPool()
    return _CLASSES.setdefault(id(schema), message_factory.GetMessages([file], pool=pool))
