"""One recipe at several budgets: which runs to train, and what they share.

Annealed runs need their length in advance, so every budget is a run of its own. A constant-rate run
passes through all of them. Landings branch off it, so that the part they share is trained once.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from lawa_lab.recipes.loop import Branch
from lawa_lab.recipes.run_folder import IfUsed, RunFolder, RunPlan
from torch_lawa.errors import ConfigError

__all__ = ["BudgetedRun", "plan_budgets"]


@dataclasses.dataclass(frozen=True)
class BudgetedRun:
    """A run to train, with the landings that branch off it."""

    plan: RunPlan
    folder: RunFolder
    branches: Sequence[Branch] = ()

    @property
    def parts(self) -> list[Branch]:
        """The run itself, then its branches: each with a plan and a folder."""
        return [Branch(self.plan, self.folder), *self.branches]


def plan_budgets(
    plan: RunPlan, budgets: Sequence[int | float], path: Path, *, if_used: IfUsed
) -> list[BudgetedRun]:
    """The runs for these numbers of epochs, each in a folder inside `path`.

    A constant-rate run that is resumed may get more budgets, larger than those it has.
    """
    if not budgets or min(budgets) <= 0 or len(set(budgets)) != len(budgets):
        raise ConfigError(
            f"--budgets {','.join(map(str, budgets))}: give distinct, positive numbers of epochs, "
            "such as 30,60"
        )

    def make(name: str, **changes: object) -> tuple[RunPlan, RunFolder]:
        config = dataclasses.replace(plan.config, **changes)  # type: ignore[arg-type]
        return dataclasses.replace(plan, config=config), RunFolder(path / name, if_used=if_used)

    config = plan.config
    if config.schedule != "constant":
        return [BudgetedRun(*make(f"epochs-{budget:g}", epochs=budget)) for budget in budgets]
    trunk = make("constant", epochs=max(budgets), land=0.0, evaluate_at=tuple(sorted(budgets)))
    if if_used == "resume":
        _refuse_other_budgets(*trunk)
    if not config.land:
        return [BudgetedRun(*trunk)]
    shape = "" if config.land_shape == "linear" else f"-{config.land_shape}"
    name = f"landing-{config.land:g}{shape}-epochs-"
    return [BudgetedRun(*trunk, [Branch(*make(f"{name}{b:g}", epochs=b)) for b in sorted(budgets)])]


def _refuse_other_budgets(plan: RunPlan, folder: RunFolder) -> None:
    """Raise if only the budgets differ from those of the run in the folder, and not by larger ones.

    Other differences are named when the folder is reserved.
    """
    if not folder.is_run:
        return
    there = folder.read_plan()
    if plan == there or plan.extends(there) or not plan.differs_only_in_length(there):
        return
    now, before = (",".join(f"{b:g}" for b in p.config.evaluate_at) for p in (plan, there))
    largest = f"{there.config.epochs:g}"
    raise ConfigError(
        f"--budgets {now}: {folder.path} was trained with --budgets {before}. Only numbers larger "
        f"than {largest} can be added when it is resumed, such as --budgets {before},"
        f"{2 * there.config.epochs:g}. Or choose another folder with -o."
    )
