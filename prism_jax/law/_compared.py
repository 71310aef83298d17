"""Equality of records that hold arrays and figures that may not be known."""

import dataclasses

import msgspec


class AbstractCompared:
    """A dataclass whose instances are equal if all their fields are, bit by bit: a figure that is
    not known equals another, and is neither infinite nor zero.
    """

    def __eq__(self, other: object) -> bool:
        return _bits(self) == _bits(other) if type(other) is type(self) else NotImplemented


def _bits(record) -> bytes:
    fields = {x.name: getattr(record, x.name) for x in dataclasses.fields(record) if x.compare}
    return msgspec.msgpack.encode(fields, enc_hook=lambda array: array.tolist())
