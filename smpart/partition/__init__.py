"""Lanes of one device: splits, work, backends. Useful alone; imports no torch."""

from smpart.partition.device import Device
from smpart.partition.lanes import Body, BodyFactory, Lanes
from smpart.partition.line import Line
from smpart.partition.shape import ModelShape, Shape
from smpart.partition.split import Side, Split
from smpart.partition.work import Completion, LaneFault, Work

__all__ = [
    "Body",
    "BodyFactory",
    "Completion",
    "Device",
    "LaneFault",
    "Lanes",
    "Line",
    "ModelShape",
    "Shape",
    "Side",
    "Split",
    "Work",
]
