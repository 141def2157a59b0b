"""Pictures as PNG, painted by Pillow, which TensorBoard brings (from 2.20 on)."""

import io

from PIL import Image, ImageDraw, ImageFont

from meshwright.parallel.planner.shapes import Picture, Text

SCALE = 2  # pixels of the PNG for one of the picture: sharp on dense screens
SMOOTH = 2  # painted so much larger and shrunk: thin bars keep their share of a pixel
ANCHORS = {"start": "ls", "middle": "ms", "end": "rs"}  # Pillow's names, on the baseline
FONT_SIZE = 0.95  # Pillow's own font is a little larger than Helvetica of the same size


def to_png(picture: Picture) -> bytes:
    """The picture as a PNG file."""
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


def _write(image: Image.Image, texts: list[Text]) -> None:
    draw = ImageDraw.Draw(image)
    for text in texts:
        font = ImageFont.load_default(text.size * SCALE * FONT_SIZE)
        for shift in (0, 1) if text.bold else (0,):  # the font has no bold: written twice, a pixel apart
            draw.text(
                (text.x * SCALE + shift, text.y * SCALE), text.words, text.color, font, ANCHORS[text.anchor]
            )
