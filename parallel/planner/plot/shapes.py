"""Pictures as values: rectangles, polygons and lines of text, as SVG, or as PNG painted by Pillow, which
TensorBoard brings (from 2.20 on)."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
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


SCALE = 2  # pixels of the PNG for one of the picture: sharp on dense screens
SMOOTH = 2  # painted so much larger and shrunk: thin bars keep their share of a pixel
ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}  # Pillow's names, on the baseline
FONT_SIZE = 0.95  # Pillow's own font is a little larger than Helvetica of the same size


def to_png(picture: Picture) -> bytes:
    """The picture as a PNG file. Needs Pillow, which nothing else here does."""
    from PIL import Image, ImageDraw

    large = SCALE * SMOOTH
    image = Image.new("RGB", (picture.width * large, picture.height * large), "#ffffff")
    draw = ImageDraw.Draw(image)
    for shape in picture.shapes:
        if not isinstance(shape, Text):
            # Pillow's polygons include their last row and column of pixels.
            (left, top), (right, bottom) = _bounds(shape.corners)
            corners = [(x * large - (x == right), y * large - (y == bottom)) for x, y in shape.corners]
            if (right - left) * large >= 1 and (bottom - top) * large >= 1:
                draw.polygon(corners, fill=shape.color)
    image = image.resize((picture.width * SCALE, picture.height * SCALE), Image.Resampling.BOX)
    _write(image, [shape for shape in picture.shapes if isinstance(shape, Text)])
    file = io.BytesIO()
    image.quantize(256, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


def _bounds(corners: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], tuple[float, float]]:
    across, down = [x for x, _ in corners], [y for _, y in corners]
    return (min(across), min(down)), (max(across), max(down))


def _write(image: Any, texts: list[Text]) -> None:
    from PIL import ImageDraw, ImageFont

    draw = ImageDraw.Draw(image)
    for text in texts:
        font = ImageFont.load_default(text.size * SCALE * FONT_SIZE)
        for shift in (0, 1) if text.bold else (0,):  # the font has no bold: written twice, a pixel apart
            draw.text(
                (text.x * SCALE + shift, text.y * SCALE), text.words, text.color, font, ANCHORS[text.anchor]
            )
