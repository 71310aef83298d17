from ._expert_load import (
    Fullest as Fullest,
    Loads as Loads,
    Unevenness as Unevenness,
    fullest as fullest,
    loads_of as loads_of,
    mean_of_fullest as mean_of_fullest,
)
