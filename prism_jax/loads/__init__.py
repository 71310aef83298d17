from ._expert_load import (
    Fullest as Fullest,
    Loads as Loads,
    Unevenness as Unevenness,
    fullest as fullest,
    mean_of_fullest as mean_of_fullest,
    with_draws as with_draws,
)
