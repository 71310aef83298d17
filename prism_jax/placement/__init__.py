from ._placement import Placement as Placement, place as place
