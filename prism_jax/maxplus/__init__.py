from ._lanes import (
    Lanes as Lanes,
    bucket as bucket,
    in_lanes as in_lanes,
    places as places,
    to_lanes as to_lanes,
)
from ._levels import Levels as Levels, to_levels as to_levels
from ._paths import (
    critical_places as critical_places,
    latest_ends as latest_ends,
    place_ends as place_ends,
    place_latencies as place_latencies,
)
from ._propagate import (
    AbstractOpLaw as AbstractOpLaw,
    Latencies as Latencies,
    propagate as propagate,
)
