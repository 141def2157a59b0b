"""Pictures as values: rectangles, polygons and lines of text, and the same as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
LETTER_WIDTH = 0.56  # mean width of a letter of Helvetica or Arial, in font sizes


@dataclass(frozen=True, slots=True)
class Polygon:
    """Corners in pixels from the top left; filled with `color` as "#rrggbb". `about`: what a browser says of
    it."""

    corners: tuple[tuple[float, float], ...]
    color: str
    about: str = ""


@dataclass(frozen=True, slots=True)
class Text:
    """One line; x and y where its baseline starts, has its middle, or ends, by `anchor`: start, middle,
    end."""

    x: float
    y: float
    words: str
    size: float
    color: str
    anchor: str = "start"
    bold: bool = False


Shape = Polygon | Text


@dataclass(frozen=True)
class Picture:
    """Shapes in the order in which they are painted, on white. Sizes in pixels."""

    width: int
    height: int
    shapes: tuple[Shape, ...]


def rectangle(x: float, y: float, width: float, height: float, color: str, about: str = "") -> Polygon:
    """Of which x and y are the upper left corner."""
    return Polygon(((x, y), (x + width, y), (x + width, y + height), (x, y + height)), color, about)


def text_width(words: str, size: float) -> float:
    """About how many pixels the words are wide."""
    return len(words) * size * LETTER_WIDTH


def to_svg(picture: Picture) -> str:
    """The picture as an SVG document."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{picture.width}" height="{picture.height}" '
        f'viewBox="0 0 {picture.width} {picture.height}" font-family="{FONT}">'
    )
    background = f'<rect width="{picture.width}" height="{picture.height}" fill="#ffffff"/>'
    return "\n".join([head, background, *map(_element, picture.shapes), "</svg>", ""])


def _element(shape: Shape) -> str:
    if isinstance(shape, Text):
        weight = ' font-weight="bold"' if shape.bold else ""
        return (
            f'<text x="{_number(shape.x)}" y="{_number(shape.y)}" font-size="{_number(shape.size)}" '
            f'fill="{shape.color}" '
            f'text-anchor="{shape.anchor}"{weight}>{escape(shape.words)}</text>'
        )
    title = f"<title>{escape(shape.about)}</title>" if shape.about else ""
    start, fill = _box(shape.corners), f'fill="{shape.color}"'
    return f"<{start} {fill}>{title}</{start.split()[0]}>" if title else f"<{start} {fill}/>"


def _box(corners: Sequence[tuple[float, float]]) -> str:
    """The element of these corners: a rect, if they are one's as `rectangle` writes them."""
    (x, y), (right, bottom) = corners[0], corners[2 % len(corners)]
    if tuple(corners) == ((x, y), (right, y), (right, bottom), (x, bottom)):
        return (
            f'rect x="{_number(x)}" y="{_number(y)}" width="{_number(right - x)}" '
            f'height="{_number(bottom - y)}"'
        )
    return f'polygon points="{" ".join(f"{_number(x)},{_number(y)}" for x, y in corners)}"'


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
