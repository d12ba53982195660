"""A page: sections of text, tables and pictures, rendered into one HTML file that loads nothing from anywhere."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import ClassVar

from smpart.errors import BackendUnavailable

TEMPLATE = "page.html.j2"


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph."""

    kind: ClassVar[str] = "text"
    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """Attributes:
    head: names of the columns.
    rows: cells; the first of each names its row.
    caption: what it shows, one sentence.
    """

    kind: ClassVar[str] = "table"
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A picture as SVG markup that smpart itself drew (see `smpart.bench.pages.ink`)."""

    kind: ClassVar[str] = "drawing"
    svg: str
    caption: str


@dataclass(frozen=True, slots=True)
class Image:
    """A PNG file."""

    kind: ClassVar[str] = "image"
    path: Path
    caption: str

    @property
    def uri(self) -> str:
        """The file itself, as a data URI."""
        return f"data:image/png;base64,{base64.b64encode(self.path.read_bytes()).decode()}"


Block = Text | Table | Drawing | Image


@dataclass(frozen=True, slots=True)
class Section:
    """Attributes:
    title: in plain words; it is the heading, and an entry of the table of contents.
    blocks: what is in it, in order.
    """

    title: str
    blocks: Sequence[Block]

    @property
    def anchor(self) -> str:
        """The title as a link's target."""
        return "-".join("".join(c if c.isalnum() else " " for c in self.title.lower()).split())


@dataclass(frozen=True, slots=True)
class Page:
    """Attributes:
    title: of the whole page.
    subtitle: what was measured where, one line.
    tiles: the few figures to see first: name, value, and what it means.
    """

    title: str
    subtitle: str
    sections: Sequence[Section]
    tiles: Sequence[tuple[str, str, str]] = field(default=())

    def html(self) -> str:
        """The page. Raises `BackendUnavailable` if jinja2 is missing."""
        try:
            from jinja2 import Environment, StrictUndefined
        except ImportError:
            raise BackendUnavailable("jinja2 is missing: pip install 'smpart[profile]'") from None
        environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        source = resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
        return environment.from_string(source).render(page=self)


def percent(value: float | None) -> str:
    """A share in percent, three significant digits; a dash for None.

    >>> percent(0.01234), percent(None)
    ('1.23 %', '–')
    """
    return "–" if value is None else f"{100 * value:.3g} %"  # noqa: RUF001 (a dash in a table)
