"""How long a forward takes: a prior from physics, corrected online. Useful alone; imports no torch.

`Predictor` is the two-method contract that policies plan with; `RooflinePrior` knows the model and the device,
`OnlinePredictor` corrects it with what really happened and gives upper bounds that cover.
"""

from smpart.predictor.calibrate import calibrate
from smpart.predictor.estimate import NOTHING, Estimate, Predictor
from smpart.predictor.online import OnlinePredictor, Prior
from smpart.predictor.prior import Rates, RooflinePrior

__all__ = ["NOTHING", "Estimate", "OnlinePredictor", "Predictor", "Prior", "Rates", "RooflinePrior", "calibrate"]
