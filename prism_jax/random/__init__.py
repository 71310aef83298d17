from ._elementary import exp as exp
from ._threefry import (
    KeyData as KeyData,
    Stream as Stream,
    check_key as check_key,
    counters as counters,
    fold as fold,
    key_data as key_data,
    normal_pairs as normal_pairs,
    normals as normals,
    uniforms as uniforms,
)
