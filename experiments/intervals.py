"""A mean over seeds and its 95 % confidence interval, Student's t."""

from collections.abc import Sequence
from statistics import fmean, stdev

from scipy.stats import t as student


def half_width(values: Sequence[float]) -> float:
    """Half the width of the interval; NaN for less than two values."""
    if len(values) < 2:
        return float("nan")
    return float(student.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5


def shown(values: Sequence[float], digits: int = 3) -> str:
    """Mean ± half the width, of the values that are numbers; how many those are, if not all."""
    known = [value for value in values if value == value]
    if not known:
        return "-"
    text = f"{fmean(known):.{digits}f}" + (f" ± {half_width(known):.{digits}f}" if len(known) > 1 else "")
    return text if len(known) == len(values) else f"{text} ({len(known)} of {len(values)})"
