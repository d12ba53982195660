"""The loop and the user's engine."""

from smpart.engine.core import EngineCore
from smpart.engine.deployment import Deployment
from smpart.engine.engine import Engine, wrap
from smpart.engine.handle import Handle
from smpart.engine.request import FinishReason, Request, RequestOutput, RequestTimes

__all__ = [
    "Deployment",
    "Engine",
    "EngineCore",
    "FinishReason",
    "Handle",
    "Request",
    "RequestOutput",
    "RequestTimes",
    "wrap",
]
