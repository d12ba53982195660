"""Times that others published, as truths for estimators: none of them measured by smpart."""

from __future__ import annotations

from smpart.bench.truths.aiconfigurator import aiconfigurator
from smpart.bench.truths.rtx4090 import rtx4090
from smpart.bench.truths.sm_scaling import sm_scaling
from smpart.bench.truths.truth import Truth
from smpart.sim.published import DATA_VARIABLE, data_folder

__all__ = ["DATA_VARIABLE", "Truth", "aiconfigurator", "data_folder", "rtx4090", "sm_scaling"]
