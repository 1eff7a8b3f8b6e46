"""The style of each series, the same in every figure of a recipe.

The colours are Okabe and Ito's, which can be distinguished with any colour vision, then Tol's. Raw
weights are thin, averages thick and variants dashed, so that a grey print can be read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lawa_lab.report.runs import Run, Series

__all__ = ["INK", "PALE", "RAW", "Dashes", "Style", "Styles", "vary"]

Dashes: TypeAlias = str | tuple[float, tuple[float, ...]]

RAW, _AVERAGED, INK, PALE = "#d55e00", "#0072b2", "#333333", "#c9d1d9"
_ORANGE, _SKY, _BLACK = "#e69f00", "#56b4e9", "#000000"
# Raw weights and the default average of the first run, the second, ...
_RUNS: tuple[tuple[str, str, Dashes], ...] = (
    (RAW, _AVERAGED, "-"),
    ("#cc79a7", "#009e73", (0, (7, 1.5))),
    ("#661100", "#44aa99", (0, (3, 1.2))),
    ("#ddcc77", "#332288", "--"),
    ("#aa4499", "#117733", "-."),
    ("#888888", "#000000", (0, (1, 1))),
)
_COPIED: Dashes = (0, (3, 1, 1, 1, 1, 1))
# Windows that are not the default: wine, olive, indigo, grey; other methods: magenta and teal too.
_WINDOWS = ("#882255", "#999933", "#332288", "#777777")
_METHODS = (*_WINDOWS, "#ee3377", "#009988")
_DASHES: tuple[Dashes, ...] = ("--", "-.", (0, (1, 1)), (0, (4, 1, 1, 1, 1, 1)))


@dataclass(frozen=True, kw_only=True)
class Style:
    """How a line is drawn; lines of a higher layer cover those below."""

    colour: str
    dashes: Dashes = "-"
    width: float = 2.2
    layer: float = 3.0


def vary(index: int, colours: Sequence[str], dashes: Sequence[Dashes]) -> tuple[str, Dashes]:
    """The colour and dashes of the index-th of several lines, in pairs that do not repeat soon.

    >>> [vary(index, "rg", ("--", ":", "-.", "-")) for index in (0, 1, 2)]
    [('r', '--'), ('g', ':'), ('r', '-')]
    """
    turn = index + index // len(colours)
    return colours[index % len(colours)], dashes[turn % len(dashes)]


class Styles:
    """The style of every series of a recipe's runs.

    >>> sgd = Run("cifar100", "sgd", ())
    >>> styles = Styles([sgd], {"sgd": Series("averaged", 10, "uniform", "re-estimated")})
    >>> copied = Series("averaged", 10, "uniform", "copied")
    >>> styles.of(sgd, Series()).colour, styles.of(sgd, copied).colour
    ('#d55e00', '#56b4e9')
    """

    def __init__(self, runs: Sequence[Run], defaults: dict[str, Series]) -> None:
        self._index = {run.name: index for index, run in enumerate(runs)}
        self._defaults = defaults
        windows = {series.k for run in runs for series in run.series if series.k is not None}
        known = {series.k for series in defaults.values()}
        self._windows = sorted(windows - known) + sorted(k for k in known if k is not None)
        methods = {series.weights for run in runs for series in run.series}
        self._methods = sorted(methods - {"raw"}, key=lambda name: (name == "averaged", name))

    def of(self, run: Run, series: Series) -> Style:
        """The style of one series of one run."""
        raw, averaged, dashes = _RUNS[self._index[run.name] % len(_RUNS)]
        if not series.averaged:
            if series.batch_norm is None:
                return Style(colour=raw, width=1.5, layer=2.0)
            return Style(colour=_ORANGE, dashes="--", width=1.7, layer=2.2)
        default = self._defaults.get(run.name)
        if default is None or series == default:
            return Style(colour=averaged, dashes=dashes, layer=4.0)
        if series.weights != default.weights:
            index = self._methods.index(series.weights)
            colour, dashes = vary(index, _METHODS, _DASHES)
            return Style(colour=colour, dashes=dashes, layer=3.8)
        if series.k == default.k:
            if series.coefficients == default.coefficients:
                return Style(colour=_SKY, dashes=_COPIED, layer=3.4)
            kinds = dict.fromkeys(s.coefficients for s in run.series if s.k == default.k)
            index = [kind for kind in kinds if kind != default.coefficients].index(
                series.coefficients
            )
            colour, dashes = vary(index, (_BLACK, _WINDOWS[-1]), (*_DASHES[1:], _DASHES[0]))
            return Style(colour=colour, dashes=dashes, width=1.8, layer=4.2)
        index = self._windows.index(series.k) if series.k in self._windows else 0
        alike = (series.coefficients, series.batch_norm) == (
            default.coefficients,
            default.batch_norm,
        )
        colour, dashes = vary(index, _WINDOWS, _DASHES)
        return Style(colour=colour, dashes=dashes if alike else ":", width=1.9, layer=3.2)
