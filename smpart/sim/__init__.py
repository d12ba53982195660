"""What a GPU really costs: the truth that virtual lanes are priced by. Shares no code with any predictor."""

from smpart.sim.gpus import PEAKS, Peaks
from smpart.sim.models import MODELS, built_in
from smpart.sim.roofline import RooflineCost

__all__ = ["MODELS", "PEAKS", "Peaks", "RooflineCost", "built_in"]
