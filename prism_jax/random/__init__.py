from ._elementary import exp as exp
from ._stream import Stream as Stream
from ._threefry import (
    KeyData as KeyData,
    check_key as check_key,
    fold as fold,
    key_data as key_data,
)
from ._variates import counters as counters, normals as normals, uniforms as uniforms
