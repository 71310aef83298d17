# Is a measured step time normal, and what explains it? `_causes` says how each cause would change a
# step, `_evidence` what measured steps and traces show, `_diagnose` weighs all of this, and
# `_changes` tries what could be set otherwise.
from ._changes import quickest_change as quickest_change
from ._diagnose import (
    Diagnosis as Diagnosis,
    diagnose as diagnose,
    diagnose_ranks as diagnose_ranks,
    hypotheses as hypotheses,
)
