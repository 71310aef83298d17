from ._placed import (
    Placed as Placed,
    placed as placed,
    ready_slopes as ready_slopes,
    replicas_ready as replicas_ready,
)
from ._placement import Placement as Placement, place as place
