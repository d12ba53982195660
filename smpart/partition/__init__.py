"""Lanes of one device: splits, work, backends. Useful alone; imports no torch."""

from smpart.partition.backend import Backend, Placement
from smpart.partition.device import Device
from smpart.partition.lanes import Body, BodyFactory, Lanes
from smpart.partition.line import Line
from smpart.partition.model_config import model_shape
from smpart.partition.registry import backends, open_backend
from smpart.partition.shape import ModelShape, Shape
from smpart.partition.split import Side, Split
from smpart.partition.work import Completion, LaneFault, Work

__all__ = [
    "Backend",
    "Body",
    "BodyFactory",
    "Completion",
    "Device",
    "LaneFault",
    "Lanes",
    "Line",
    "ModelShape",
    "Placement",
    "Shape",
    "Side",
    "Split",
    "Work",
    "backends",
    "model_shape",
    "open_backend",
]
