"""Curves as inline SVG for the report: no library; colours come from the style sheet and follow light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

Point = tuple[float, float]

LEFT, RIGHT, TOP, BOTTOM = 46, 10, 10, 24  # margins for the labels
MAX_POINTS = 300  # more than the pixels of a small chart: a longer run is drawn as the range of each stretch
MAX_SLICES = 48  # hover targets
SPARSE = 12  # with fewer points than this each gets a dot


def curve_svg(
    steps: Sequence[int],
    values: Sequence[float],
    *,
    label: str,
    step_range: tuple[int, int] | None = None,
    width: int = 360,
    height: int = 170,
    healthy: tuple[float, float] | None = None,
) -> str:
    """One metric over steps: every value as a light line, its smoothed course as a strong one."""
    assert len(steps) == len(values) > 0, f"{len(steps)} steps, {len(values)} values"
    low, high, ticks = value_axis(min(values), max(values))
    first, last = step_range or (steps[0], steps[-1])
    last = max(last, first + 1)

    def place(step: float, value: float) -> Point:
        x = LEFT + (step - first) / (last - first) * (width - LEFT - RIGHT)
        return x, TOP + (high - value) / (high - low) * (height - TOP - BOTTOM)

    body = [_grid(place, ticks, first, last, width, height)]
    if healthy and healthy[1] > low and healthy[0] < high:
        top, bottom = place(first, min(healthy[1], high))[1], place(first, max(healthy[0], low))[1]
        body.append(f'<rect class="band" x="{LEFT}" y="{top:.1f}" width="{width - LEFT - RIGHT}" '
                    f'height="{bottom - top:.1f}"/>')  # fmt: skip
    smoothed = smooth(values)
    if len(values) < SPARSE:
        body.append(_line("smooth", [place(*point) for point in zip(steps, values, strict=True)]))
        for step, value in zip(steps, values, strict=True):
            x, y = place(step, value)
            body.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>')
    else:
        body.append(_line("raw", [place(*point) for point in outline(steps, values)]))
        strong = list(zip(steps, smoothed, strict=True))
        stride = max(1, len(strong) // MAX_POINTS)
        kept = [*strong[:-1:stride], strong[-1]]
        body.append(_line("smooth", [place(*point) for point in kept]))
    body.append(_slices(steps, values, smoothed, place, height))
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">' + "".join(body) + "</svg>"


def smooth(values: Sequence[float]) -> list[float]:
    """Centred moving mean over a fifteenth of the run, so that it does not lag; at the ends the window is cut."""
    half = len(values) // 30
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    bounds = [(max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in bounds]


def outline(steps: Sequence[int], values: Sequence[float]) -> list[Point]:
    """All points, or for a long run the lowest and highest of each stretch, so that no spike is lost."""
    points = list(zip(steps, values, strict=True))
    if len(points) <= MAX_POINTS:
        return points
    num_stretches = MAX_POINTS // 2
    kept = []
    for i in range(num_stretches):
        stretch = points[i * len(points) // num_stretches : (i + 1) * len(points) // num_stretches]
        ends = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(ends)
    return kept


def value_axis(low: float, high: float) -> tuple[float, float, list[float]]:
    """Range and three to six round ticks; starts at zero when the values come near it."""
    if low > 0 and low < 0.6 * high:
        low = 0.0
    if high < 0 and high > 0.6 * low:
        high = 0.0
    if high <= low:
        spread = abs(high) * 0.1 or 1.0
        low, high = low - spread, high + spread
    tick = nice_step((high - low) / 3)
    low_tick, high_tick = math.floor(low / tick + 1e-9), math.ceil(high / tick - 1e-9)
    return low_tick * tick, high_tick * tick, [i * tick for i in range(low_tick, high_tick + 1)]


def nice_step(rough: float) -> float:
    """The largest of 1, 2, 2.5, 5 times a power of ten that is not above `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return max(factor for factor in (1.0, 2.0, 2.5, 5.0) if factor <= rough / power + 1e-9) * power


def tick_texts(ticks: Sequence[float]) -> list[str]:
    """As many decimals as the distance between ticks needs; 12.5k from ten thousand on, 2e-4 below a thousandth."""
    tick, largest = ticks[1] - ticks[0], max(map(abs, ticks))
    if largest < 1e-3:
        parts = [f"{value:.2e}".split("e") for value in ticks]
        return [f"{float(mantissa):g}e{int(power)}" if float(mantissa) else "0" for mantissa, power in parts]
    unit, suffix = (1e6, "M") if largest >= 1e6 else (1e3, "k") if largest >= 1e4 else (1.0, "")
    tick /= unit
    decimals = max(0, -math.floor(math.log10(tick) + 1e-9))
    if abs(tick * 10**decimals - round(tick * 10**decimals)) > 1e-6:  # steps of 2.5
        decimals += 1
    return [f"{value / unit:.{decimals}f}{suffix}" if value else "0" for value in ticks]


def _grid(place, ticks: list[float], first: int, last: int, width: int, height: int) -> str:
    parts = []
    for value, text in zip(ticks, tick_texts(ticks), strict=True):
        y = place(first, value)[1]
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{text}</text>')
    stride = max(1, round(nice_step((last - first) / (width / 110))))
    marks = list(range(math.ceil(first / stride) * stride, last + 1, stride))
    for step, text in zip(marks, tick_texts(marks) if len(marks) > 1 else map(str, marks), strict=True):
        x = place(step, ticks[0])[0]
        anchor = "end" if x > width - RIGHT - 8 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{height - 7}" text-anchor="{anchor}">{text}</text>')
    return "".join(parts)


def _line(name: str, points: Sequence[Point]) -> str:
    return f'<polyline class="{name}" points="' + " ".join(f"{x:.1f},{y:.1f}" for x, y in points) + '"/>'


def _slices(steps: Sequence[int], values: Sequence[float], smoothed: Sequence[float], place, height: int) -> str:
    """Invisible columns that show a tooltip, without any script."""
    count = min(MAX_SLICES, len(steps))
    picks = sorted({round(i * (len(steps) - 1) / max(1, count - 1)) for i in range(count)})
    middles = [place(steps[i], values[i])[0] for i in picks]
    parts = []
    for k, i in enumerate(picks):
        left = middles[k] - 4 if k == 0 else (middles[k - 1] + middles[k]) / 2
        right = middles[k] + 4 if k == len(picks) - 1 else (middles[k] + middles[k + 1]) / 2
        text = f"step {steps[i]}: {values[i]:.4g}"
        if len(values) >= SPARSE:
            text += f" (smoothed {smoothed[i]:.4g})"
        parts.append(
            f'<rect class="slice" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" '
            f'height="{height - TOP - BOTTOM}"><title>{text}</title></rect>'
        )
    return "".join(parts)
