"""Draws with matplotlib into SVG that is part of the page: its text is text, and its ink is the page's own.

Whatever is drawn in `INK` becomes the colour of the text around it, so one drawing does for light, dark and print.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from smpart.errors import BackendUnavailable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#123457"
"""Stands for the page's colour of text; no colour that anything else is drawn in."""

_STYLE = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "grid.alpha": 0.2,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color"), INK
    ),
    "grid.color": INK,
    "hatch.color": INK,
}


def draw(
    name: str,
    paint: Callable[[list[Axes]], None],
    *,
    size: tuple[float, float],
    columns: int = 1,
    rows: int = 1,
    share_x: bool = False,
) -> str:
    """SVG markup of a grid of axes that `paint` draws on.

    Args:
        name: what it shows, for those who cannot see it; differs from that of the page's other drawings.
        paint: gets the axes, row by row.
        size: inches.

    Raises:
        BackendUnavailable: matplotlib is missing.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise BackendUnavailable("matplotlib is missing: pip install 'smpart[profile]'") from None
    buffer = io.StringIO()
    style: dict[Any, Any] = {**_STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False, sharex=share_x)
        paint(grid.ravel().tolist())
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    return _inlined(buffer.getvalue(), name)


def _inlined(svg: str, name: str) -> str:
    """Markup for within HTML: no prologue, no metadata, no namespaces, no names that another drawing has too."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    return svg.replace(INK, "currentColor").replace("<svg", f'<svg role="img" aria-label="{escape(name)}"', 1)


def heat(
    axis: Axes,
    values: NDArray[np.float64],
    rows: Sequence[str],
    columns: Sequence[str],
    show: Callable[[float], str],
    limits: tuple[float, float],
) -> None:
    """A heat map with its values written in; NaN stays blank.

    Args:
        values: float64[rows, columns].
        show: a value as its cell's text.
        limits: the values of the palest and the darkest cell.
    """
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    palette, norm = colormaps["YlGnBu"], Normalize(*limits, clip=True)
    axis.pcolormesh(np.ma.masked_invalid(values), cmap=palette, norm=norm, edgecolors="none")
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            red, green, blue, _ = palette(norm(value))
            colour = "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"
            axis.text(column + 0.5, row + 0.5, show(float(value)), color=colour, ha="center", va="center", size=8)
    tilted: dict[str, Any] = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if len(columns) > 4 else {}
    axis.set_xticks(np.arange(len(columns)) + 0.5, columns, **tilted)
    axis.set_yticks(np.arange(len(rows)) + 0.5, rows)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
