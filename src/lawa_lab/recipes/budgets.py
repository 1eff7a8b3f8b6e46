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
    """The runs for these numbers of epochs, each in a folder inside `path`."""
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
    trunk = make("constant", epochs=max(budgets), land=0.0, evaluate_at=tuple(budgets))
    if not config.land:
        return [BudgetedRun(*trunk)]
    shape = "" if config.land_shape == "linear" else f"-{config.land_shape}"
    name = f"landing-{config.land:g}{shape}-epochs-"
    return [BudgetedRun(*trunk, [Branch(*make(f"{name}{b:g}", epochs=b)) for b in sorted(budgets)])]
