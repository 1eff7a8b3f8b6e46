"""What is drawn, read back from the drawn artists."""

import itertools
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from support.report import cifar_rows, cifar_runs, language_runs, only_figures, run_of

from lawa_lab.report import figures
from lawa_lab.report.curves import Metric
from lawa_lab.report.figures import FIGURES, Drawing, save, save_figures
from lawa_lab.report.figures.axes import matplotlib
from lawa_lab.report.figures.files import draw, draw_panel, svg_text
from lawa_lab.report.figures.scene import Scene
from lawa_lab.report.runs import Run, Series
from lawa_lab.report.summary import RecipeReport, summarise
from torch_lawa.errors import LawaError

pytestmark = pytest.mark.slow

ACCURACY = Metric("test_accuracy", "higher")
DEFAULT = Series("averaged", 10, "uniform", "re-estimated")
GUIDE = Path(__file__).parents[4] / "docs" / "guides" / "report.md"


def drawings(runs: list[Run], report: RecipeReport | None = None) -> list[Drawing]:
    return figures.drawings(Scene(report or summarise(runs).recipes[0], runs))


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return cifar_runs(epochs=60)


@pytest.fixture(scope="module")
def recipe(runs: list[Run]) -> RecipeReport:
    return summarise(runs).recipes[0]


@pytest.fixture(scope="module")
def drawn(runs: list[Run], recipe: RecipeReport) -> dict[str, Drawing]:
    return {drawing.name: drawing for drawing in drawings(runs, recipe)}


def test_every_figure_that_the_rows_have_data_for(drawn: dict[str, Drawing]) -> None:
    expected = []
    for kind in FIGURES:
        if kind not in ("methods", "frontier"):  # there is only the window, and one length
            expected += [kind] if kind == "runs" else [kind, f"{kind}-lookahead-sgd"]
    assert list(drawn) == expected


def test_figures_without_rows_are_left_out() -> None:
    runs = language_runs(evaluations=30)
    names = [drawing.name for drawing in drawings(runs)]
    kinds = ["saving", "windows", "target", "behind", "early", "curves"]
    others = [f"{kind}-adam-constant-rate" for kind in kinds]
    assert sorted(names) == sorted([*kinds, *others, "runs"])
    raw = [row for row in cifar_rows(epochs=12, seeds=(0,), run="other") if row["k"] is None]
    some = [run_of(cifar_rows(epochs=12, seeds=(0,))), run_of(raw)]
    names = [drawing.name for drawing in drawings(some)]
    assert "saving" in names
    assert not any(name.endswith("-other") for name in names)


def test_the_arrow_runs_from_where_the_baseline_got_there_to_where_the_average_did(
    drawn: dict[str, Drawing], recipe: RecipeReport
) -> None:
    rows = {report.metric.name: report.main[0] for report in recipe.metrics}
    figure = draw(drawn["saving"])
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["test accuracy", "test loss"]
    for axes, name in zip(figure.axes, ("test_accuracy", "test_loss"), strict=True):
        headline = rows[name].headline
        assert headline is not None
        assert headline.epochs is not None
        arrow, text = axes.texts
        assert arrow.xy == (headline.epochs.averaged_at.mean, headline.target)
        assert arrow.xyann == (headline.epochs.baseline_at.mean, headline.target)
        assert text.get_text().startswith(f"{headline.epochs.saved.mean:.1f} epochs earlier")
        ticks = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "|"]
        places = [p for s in headline.by_seed for p in (s.baseline_at, s.averaged_at)]
        assert ticks == places


def test_what_was_never_matched_is_marked_as_a_lower_bound() -> None:
    rows = [
        {"epoch": e, "step": e, "weights": w, "k": k, "test_loss": loss, "seed": 0}
        for w, k, losses in (("raw", None, (9, 8, 7, 6, 6)), ("averaged", 2, (9, 9, 5, 4, 4)))
        for e, loss in enumerate(losses, start=1)
    ]
    runs = [Run("toy", "sgd", tuple(rows))]
    arrow = drawings(runs)[0].panels[0].arrow
    assert arrow is not None
    # Better than 6, the best of the raw weights, from epoch 3 on; these end at epoch 5.
    assert (arrow.begin, arrow.end, arrow.value) == (5, 3, 6)
    assert arrow.text == "at least 2 epochs earlier\n(never matched)"
    runs = [Run("toy", "sgd", (*rows, *({**row, "seed": 1} for row in rows)))]
    arrow = drawings(runs)[0].panels[0].arrow
    assert arrow is not None
    assert arrow.text == "at least 2 epochs earlier\n(never matched, 2 of 2 seeds)"


def test_a_line_is_the_mean_and_its_band_the_range_over_seeds(
    drawn: dict[str, Drawing], runs: list[Run]
) -> None:
    panel = drawn["saving"].panels[0]
    line = next(line for line in panel.lines if line.label == "average, k = 10")
    place = line.at.index(30)
    rows = [row for row in runs[0].rows_of(DEFAULT) if row["epoch"] == 30]
    values = sorted(row["test_accuracy"] for row in rows)
    assert len(values) == 3
    assert line.mean[place] == pytest.approx(sum(values) / 3)
    assert (line.low[place], line.high[place]) == (values[0], values[2])


def test_legends_name_every_series_once(drawn: dict[str, Drawing]) -> None:
    def legend(name: str) -> list[str]:
        (box,) = draw(drawn[name]).legends
        return [text.get_text() for text in box.get_texts()]

    raw, control, default = "raw weights", "raw weights, BatchNorm re-estimated", "average, k = 10"
    assert legend("saving") == [raw, control, default]
    assert legend("windows") == [control, *(f"average, k = {k}" for k in (3, 6, 10, 16))]
    assert legend("coefficients") == [control, default, f"{default}, exponential 0.9"]
    assert legend("batch_norm") == [raw, control, default, f"{default}, BatchNorm copied"]
    assert legend("behind") == ["average evaluated", "raw weights better"]
    assert legend("runs") == [
        f"{run}, {series}" for run in ("sgd", "lookahead(sgd)") for series in (raw, default)
    ]


def test_windows_are_lines_without_bands(drawn: dict[str, Drawing]) -> None:
    for axes in draw(drawn["windows"]).axes:
        assert len(axes.lines) == 5
        assert not axes.collections
    whole, late = drawn["windows"].panels
    assert whole.x_limits == (0.0, pytest.approx(61.2))
    assert late.x_limits == pytest.approx((44.7, 60.3))


def test_one_series_looks_the_same_in_all_figures_and_like_no_other(
    drawn: dict[str, Drawing],
) -> None:
    looks: dict[tuple[str | None, str], object] = {}
    for drawing in drawn.values():
        if drawing.kind.name in ("target", "behind", "runs"):
            continue
        for panel in drawing.panels:
            styles = [(line.style.colour, line.style.dashes) for line in panel.lines]
            assert len(set(styles)) == len(styles)
            for line, style in zip(panel.lines, styles, strict=True):
                assert looks.setdefault((drawing.run, line.label), style) == style
    together = {line.label: line.style for line in drawn["runs"].panels[0].lines}
    for run in ("sgd", "lookahead(sgd)"):
        for series in ("raw weights", "average, k = 10"):
            style = together[f"{run}, {series}"]
            assert looks[run, series] == (style.colour, style.dashes)


def test_bars_mark_the_stretches_in_which_the_average_was_behind(
    drawn: dict[str, Drawing], recipe: RecipeReport
) -> None:
    rows = [row for row in recipe.shown[0].windows if row.run == "sgd"]
    panel = drawn["behind"].panels[0]
    assert panel.y_labels[:2] == ("k = 3", "k = 3 (BN copied)")
    assert len(panel.y_labels) == len(rows)
    place = rows.index(next(row for row in rows if row.default))
    (line,) = [line for line in panel.lines if line.mean[0] == -place and line.style.width > 5]
    ends = [(a + 0.5, b - 0.5) for a, b in zip(line.at[::3], line.at[1::3], strict=True)]
    assert ends == [(stretch.begin, stretch.end) for stretch in rows[place].behind]


def test_two_rows_of_the_figure_never_have_one_name() -> None:
    """A chosen window had the BatchNorm of what was chosen: re-estimated, or running for raw."""
    rows = cifar_rows(epochs=12, seeds=(0,))
    chosen = [
        {**row, "weights": "chosen", "k": None, "coefficients": None,
         "batch_norm": None if row["epoch"] > 10 else "re-estimated"}
        for row in rows
        if row["weights"] == "averaged" and row["batch_norm"] == "re-estimated" and row["k"] == 10
    ]  # fmt: skip
    (drawing,) = (d for d in drawings([run_of([*rows, *chosen])]) if d.kind.name == "behind")
    for panel in drawing.panels:
        assert panel.y_labels[-2:] == ("chosen (BN re-estimated)", "chosen (BN running)")
        assert len(set(panel.y_labels)) == len(panel.y_labels)


def test_bars_of_one_moment_are_not_drawn_and_few_rows_are_low(drawn: dict[str, Drawing]) -> None:
    for num_epochs, is_drawn in ((1, False), (2, True)):
        rows = [
            {"recipe": "r", "run": "a", "seed": 0, "epoch": epoch, "weights": weights, "k": k,
             "test_loss": loss / epoch}
            for epoch in range(1, num_epochs + 1)
            for weights, k, loss in (("raw", None, 1.0), ("averaged", 2, 3.0))
        ]  # fmt: skip
        found = {drawing.kind.name for drawing in drawings([run_of(rows)])}
        assert ("behind" in found) is is_drawn
    few = replace(drawn["behind"].panels[0], y_labels=("k = 3",))
    heights = [draw_panel(panel).get_figheight() for panel in (few, drawn["behind"].panels[0])]
    assert heights[0] < heights[1] / 2


def test_labels_of_an_axis_do_not_overlap(drawn: dict[str, Drawing]) -> None:
    behind = replace(drawn["behind"].panels[0], y_labels=tuple(f"k = {k}" for k in range(40)))
    percent = replace(drawn["target"].panels[0], x_limits=(0.965, 0.985))
    loss = replace(drawn["target"].panels[1], x_limits=(0.0508, 0.049))
    for panel in (behind, percent, loss):
        figure = draw_panel(panel)
        matplotlib("backends.backend_agg").FigureCanvasAgg(figure).draw()
        (axes,) = figure.axes
        along = [text.get_window_extent() for text in axes.get_xticklabels() if text.get_text()]
        across = [text.get_window_extent() for text in axes.get_yticklabels() if text.get_text()]
        assert not any(a.overlaps(b) for a, b in itertools.combinations(along, 2))
        assert not any(a.overlaps(b) for a, b in itertools.combinations(across, 2))


def test_other_methods_have_a_figure() -> None:
    rows = cifar_rows(epochs=20, seeds=(0,))
    other = [{**row, "weights": "ema", "k": None} for row in rows if row["weights"] == "averaged"]
    other = [row for row in other if row["coefficients"] == "uniform"]
    runs = [run_of([*rows, *({**row, "coefficients": None} for row in other)])]
    (drawing,) = [drawing for drawing in drawings(runs) if drawing.kind.name == "methods"]
    labels = [line.label for line in drawing.panels[0].lines]
    assert labels[-2:] == ["average, k = 10", "ema"]
    assert len({line.style for line in drawing.panels[0].lines}) == len(labels)


def test_six_methods_have_six_colours() -> None:
    """Dashes alone are hard to tell apart, above all with a marker at every evaluation."""
    rows = cifar_rows(epochs=12, seeds=(0,))
    names = ("dense", "ema", "growing-ema", "horizon", "schedule-free", "swa")
    others = [
        {**row, "weights": name, "k": None, "coefficients": ""}
        for row in rows
        if row["weights"] == "averaged" and row["k"] == 10 and row["coefficients"] == "uniform"
        for name in names
    ]
    (drawing,) = (d for d in drawings([run_of([*rows, *others])]) if d.kind.name == "methods")
    colours = {x.label: x.style.colour for x in drawing.panels[0].lines}
    assert len({colours[name] for name in names} - {colours["average, k = 10"]}) == len(names)


def test_no_two_of_many_methods_or_rules_look_the_same() -> None:
    rows = cifar_rows(epochs=12, seeds=(0, 1))
    windows = [row for row in rows if row["weights"] == "averaged"]
    windows = [row for row in windows if row["coefficients"] == "uniform" and row["k"] == 10]
    methods = [
        {**row, "weights": f"method-{number}", "k": None, "coefficients": ""}
        for row in windows
        for number in range(12)
    ]
    rules = [{**row, "coefficients": f"recency:{n}"} for row in windows for n in range(6)]
    found = {
        drawing.kind.name: drawing for drawing in drawings([run_of([*rows, *methods, *rules])])
    }
    for name, least in (("methods", 13), ("coefficients", 8)):
        styles = [(x.style.colour, x.style.dashes) for x in found[name].panels[0].lines]
        assert len(set(styles)) == len(styles) > least
        for panel in found[name].panels:  # bands would hide the lines
            assert not any(line.low for line in panel.lines)
            assert panel.x_label == "epoch (mean of 2 seeds)"


def test_the_curve_of_targets_passes_through_the_headline(
    drawn: dict[str, Drawing], recipe: RecipeReport
) -> None:
    row = next(report for report in recipe.metrics if report.metric == ACCURACY).main[0]
    panel = drawn["target"].panels[0]
    (point,) = [point for point in panel.points if point.label == "largest saving"]
    assert row.headline is not None
    assert row.headline.epochs is not None
    assert (point.at, point.value) == (row.headline.target, row.headline.epochs.saved.mean)
    # Between two targets the value of the harder one holds.
    at_least = [
        v for t, v in zip(panel.lines[0].at, panel.lines[0].mean, strict=True) if t >= point.at
    ]
    assert at_least[0] == point.value


def test_the_axis_of_targets_shows_the_headline_although_one_seed_is_far_ahead() -> None:
    rows = [
        {"recipe": "r", "run": "a", "seed": seed, "epoch": epoch, "weights": weights, "k": k,
         "test_loss": (1.0 if seed == 2 else 5.0) + (1.0 if seed == 2 else 10.0) / (epoch + ahead)}
        for seed in range(3)
        for epoch in range(1, 21)
        for weights, k, ahead in (("raw", None, 0), ("averaged", 2, 1))
    ]  # fmt: skip
    (drawing,) = (d for d in drawings([run_of(rows)]) if d.kind.name == "target")
    (panel,) = drawing.panels
    (point,) = (point for point in panel.points if point.label == "largest saving")
    assert panel.x_limits is not None
    easy, hard = panel.x_limits
    assert easy > point.at > hard


def test_the_axis_of_targets_shows_savings_although_the_average_begins_beyond_them() -> None:
    rows = [
        {"recipe": "r", "run": "a", "seed": 0, "epoch": epoch, "weights": weights, "k": k,
         "test_accuracy": start + epoch / 1000}
        for epoch in range(30, 100, 10)
        for weights, k, start in (("raw", None, 0.6), ("averaged", 2, 0.75))
    ]  # fmt: skip
    (drawing,) = (d for d in drawings([run_of(rows)]) if d.kind.name == "target")
    (panel,) = drawing.panels
    assert panel.x_limits is not None
    easy, hard = panel.x_limits
    assert easy < 0.63
    assert 0.69 < hard < 0.7  # the raw weights end at 0.69, the average at 0.84
    assert all(easy < point.at < hard for point in panel.points)


def test_the_axis_of_targets_shows_every_point_and_baseline() -> None:
    """Raw weights with re-estimated BatchNorm begin beyond what running statistics ever reach."""
    rows = [
        {"recipe": "r", "run": "a", "seed": 0, "epoch": epoch, "weights": weights, "k": k,
         "batch_norm": batch_norm, "test_accuracy": start + 0.01 * min(epoch, 6 - epoch / 5)}
        for epoch in range(1, 21)
        for weights, k, batch_norm, start in (
            ("raw", None, None, 0.4), ("raw", None, "re-estimated", 0.6),
            ("averaged", 2, "re-estimated", 0.61),
        )
    ]  # fmt: skip
    (drawing,) = (d for d in drawings([run_of(rows)]) if d.kind.name == "target")
    (panel,) = drawing.panels
    assert panel.x_limits is not None
    easy, hard = panel.x_limits
    for label in ("against raw weights", "against raw weights, BatchNorm re-estimated"):
        (line,) = (line for line in panel.lines if line.label == label)
        assert any(
            easy < at < hard and v is not None for at, v in zip(line.at, line.mean, strict=True)
        )
    assert len(panel.points) >= 2
    assert all(easy < point.at < hard for point in panel.points)


def test_the_training_loss_belongs_to_the_raw_weights_alone(drawn: dict[str, Drawing]) -> None:
    shown = {panel.title: [x.label for x in panel.lines] for panel in drawn["curves"].panels}
    all_three = ["raw weights", "raw weights, BatchNorm re-estimated", "average, k = 10"]
    assert shown == {
        "test loss": all_three,
        "training loss": ["raw weights"],
        "test accuracy": all_three,
        "test accuracy (top-5)": all_three,
    }


def test_the_early_phase_is_cut_out(drawn: dict[str, Drawing], runs: list[Run]) -> None:
    panel = drawn["early"].panels[0]
    assert panel.x_limits == (0.0, pytest.approx(1.02 * 17))  # k = 10 and seven more
    assert "average, k = 16" not in [line.label for line in panel.lines]  # one value by then
    assert "average, k = 10, BatchNorm copied" in [line.label for line in panel.lines]


def test_a_single_seed_has_no_band(runs: list[Run]) -> None:
    alone = [run_of(cifar_rows(epochs=30, seeds=(0,)))]
    (panel, _) = drawings(alone)[0].panels
    assert [line.low for line in panel.lines] == [(), (), ()]
    assert panel.x_label == "epoch"


def test_nothing_is_clipped_and_every_word_can_be_read(drawn: dict[str, Drawing]) -> None:
    for name in ("saving", "windows", "curves", "early", "target", "behind", "runs"):
        figure = draw(drawn[name])
        matplotlib("backends.backend_agg").FigureCanvasAgg(figure).draw()
        box = figure.get_tightbbox()
        width, height = figure.get_size_inches()
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= width
        assert box.y1 <= height
        # Shown 700 pixels wide, nothing is smaller than 11 pixels.
        words = figure.findobj(matplotlib("text").Text)
        sizes = [word.get_fontsize() for word in words if word.get_text()]
        assert min(sizes) * 700 / (72 * width) > 11


def test_files_are_the_same_whenever_they_are_made(
    drawn: dict[str, Drawing], tmp_path: Path
) -> None:
    first, second = (save(drawn["saving"], tmp_path / folder) for folder in ("a", "b"))
    assert [path.name for path in first] == ["saving.png", "saving.svg"]
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    svg = first[1].read_text()
    assert "date" not in svg
    assert ">raw weights</text>" in svg  # text as text
    width, height = struct.unpack(">II", first[0].read_bytes()[16:24])
    assert (width, height) == (1800, 780)
    panel = drawn["target"].panels[0]
    assert svg_text(draw_panel(panel)) == svg_text(draw_panel(panel))


@only_figures("saving", "runs")
def test_several_recipes_have_a_folder_each(tmp_path: Path) -> None:
    first = language_runs(evaluations=9)[0]
    second = Run("other/recipe", first.name, first.rows)
    one = save_figures([first], summarise([first]), tmp_path / "one")
    assert {path.parent for path in one} == {tmp_path / "one"}
    assert {path.suffix for path in one} == {".png", ".svg"}
    two = save_figures([first, second], summarise([first, second]), tmp_path / "two")
    folders = {path.parent.relative_to(tmp_path / "two") for path in two}
    assert folders == {Path("wikitext103-roberta"), Path("other-recipe")}
    assert all(path.is_file() for path in two)


def test_names_from_a_file_never_lead_out_of_the_folder() -> None:
    rows = cifar_rows(epochs=12, seeds=(0,))
    runs = [Run("r", name, tuple(rows)) for name in ("sgd", "../../etc", "ETC!")]
    names = [drawing.name for drawing in drawings(runs)]
    assert {"saving", "saving-etc", "saving-etc-3"} <= set(names)
    assert len(set(names)) == len(names)


def test_names_are_not_read_as_formulas_or_hidden() -> None:
    names = ("_first", "$x_{")
    runs = [Run("r_$", name, run.rows) for name, run in zip(names, language_runs(), strict=True)]
    (drawing,) = [each for each in drawings(runs) if each.kind.name == "runs"]
    figure = draw(drawing)
    svg = svg_text(figure)
    assert "_first, raw weights</text>" in svg
    assert ">$x_{, average, k = 6</text>" in svg


def test_the_guide_lists_every_figure() -> None:
    guide = GUIDE.read_text()
    assert [name for name in FIGURES if f"`{name}`" not in guide] == []


def test_without_matplotlib_the_error_says_how_to_install_it() -> None:
    with pytest.raises(LawaError, match=r"pip install 'torch-lawa\[lab\]'"):
        matplotlib("no_such_part")
