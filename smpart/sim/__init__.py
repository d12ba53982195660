"""What a GPU really costs: the truth that virtual lanes are priced by. Shares no code with any predictor."""

from smpart.sim.dimensions import Dimensions, dimensions
from smpart.sim.gpus import PEAKS, Peaks
from smpart.sim.host import Host
from smpart.sim.models import DIMENSIONS, MODELS, built_in
from smpart.sim.roofline import RooflineCost
from smpart.sim.silicon import SiliconCost

__all__ = [
    "DIMENSIONS",
    "MODELS",
    "PEAKS",
    "Dimensions",
    "Host",
    "Peaks",
    "RooflineCost",
    "SiliconCost",
    "built_in",
    "dimensions",
]
