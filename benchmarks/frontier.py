"""The frontier: averages of constant-rate runs against annealed runs of every length.

    python benchmarks/frontier.py decoder RUN... --data data --out runs/frontier    # one by one
    python benchmarks/frontier.py decoder RUN... --launch 8 --data data --out runs/frontier
    python benchmarks/frontier.py cifar100 RUN... --smoke --out /tmp/smoke          # CPU, seconds

A RUN is `constant-RATE` (with all its landings as branches, at every budget), `linear-RATE-EPOCHS`,
`cosine-RATE-EPOCHS` or `free-RATE` (Schedule-Free), followed by `-seed-N` (default 0). Before the
seed there may be a weight decay, `free-10-30e-wd-2e-4`, steps of warm-up, `constant-0.1-warm-1000`,
a momentum (or beta1), `constant-7e-4-m-0.85`, and wrappers, `constant-0.1-100e+sam:0.05-seed-1`. A
first word `val-` holds out training images and evaluates on them (CIFAR-100 only). Runs are those
of `lawa train`: each has folders with `config.json` and `metrics.jsonl`, which `lawa report` reads.
`--landed 200` lets constant-rate runs land at these epochs instead of the study's, `--landed` alone
at none. The study `cifar100-windows` has the same runs as `cifar100`, with windows of other spans
and sizes.

`--launch N` runs N processes at a time, in the order given; see `launcher.py`.
"""

import argparse
import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import add_options, run_all

from lawa_lab.recipes.budgets import BudgetedRun
from lawa_lab.recipes.loop import Branch
from lawa_lab.recipes.registry import RECIPES
from lawa_lab.recipes.run_folder import RunFolder, RunPlan


@dataclass(frozen=True)
class Study:
    """A recipe, its budgets in epochs, and what is averaged and branched."""

    recipe: str
    budgets: tuple[float, ...]
    evaluate_at: tuple[float, ...]  # epochs, beside `nu` or `evaluate_every`
    free: dict[str, Any]  # settings of Schedule-Free runs
    landings: tuple[tuple[float, str], ...]  # of constant-rate runs
    landed: tuple[float, ...]  # at these budgets
    shared: dict[str, Any]  # settings of every run
    anytime: dict[str, Any]  # of constant-rate runs
    smoke: dict[str, Any]


STUDIES = {
    "decoder": Study(
        recipe="wikipedia-decoder",
        budgets=(0.25, 0.5, 1),
        evaluate_at=(0.25, 0.5, 1),
        free={
            "optimizer": "schedule-free-adamw", "samples": 16,
            "coefficients": ("uniform", "recent:0.1"), "methods": ("growing-ema:0.1",),
        },
        landings=((0.2, "linear"), (0.1, "linear"), (0.1, "1-sqrt")),
        landed=(0.25, 0.5, 1),
        shared={"evaluation_tokens": 2**17, "quantize": (8, 4), "nu": 500},
        anytime={
            "samples": 16, "choose_window": True,
            "coefficients": ("uniform", "recent:0.1", "recent:0.05"),
            "methods": (
                "dense:0.1:8", "dense:0.2:8", "horizon:0.2:8:0.3", "horizon:0.2:8:0.5",
                "horizon:0.2:16:0.4", "horizon:0.4:16:0.3", "horizon:0.25:16", "ema:0.99",
                "growing-ema:0.1", "growing-ema:0.05",
            ),
        },
        smoke={"nu": 30},
    ),
    "cifar100": Study(
        recipe="cifar100-resnet34",
        budgets=(30, 60, 100, 200),
        evaluate_at=(30, 60, 85, 90, 95, 100, 200),
        free={
            "optimizer": "schedule-free-sgd", "warmup_steps": 1000, "samples": 16,
            "coefficients": ("uniform", "recent:0.1"), "methods": ("growing-ema:0.1",),
        },
        landings=((0.2, "linear"),),
        landed=(60, 100),
        shared={
            "horizon": 0.25, "ks": (16, 8, 4), "coefficients": ("uniform",),
            "batch_norm": ("re-estimated",), "batch_norm_batches": 20, "variants_every": 1,
            "evaluate_every": 40,
        },
        anytime={
            "samples": 16,
            "methods": ("dense:0.25:8", "horizon:0.25:16", "ema:0.999", "ema:0.9999",
                        "growing-ema:0.1", "swa:4000"),
        },
        smoke={"evaluate_every": 1, "batch_norm_batches": 2, "warmup_steps": 0, "samples": 2},
    ),
    "tiny-imagenet": Study(
        recipe="imagenet-resnet50",
        budgets=(30, 60),
        evaluate_at=(30, 60),
        free={"optimizer": "schedule-free-sgd", "warmup_steps": 500},
        landings=((0.2, "linear"),),
        landed=(30, 60),
        shared={
            "image_size": 64, "horizon": 0.25, "ks": (16, 8, 4), "coefficients": ("uniform",),
            "batch_norm": ("re-estimated",), "batch_norm_batches": 10, "evaluate_every": 5,
        },
        anytime={"samples": 16, "methods": ("horizon:0.25:16", "ema:0.999", "growing-ema:0.1")},
        smoke={"image_size": 32, "evaluate_every": 1, "batch_norm_batches": 2, "warmup_steps": 0},
    ),
    # As in benchmarks/paper.py, whose runs have a peak of 3e-4.
    "roberta": Study(
        recipe="wikitext103-roberta",
        budgets=(10,),
        evaluate_at=(),
        free={"optimizer": "schedule-free-adamw"},
        landings=(),
        landed=(),
        shared={
            "sequence_length": 64, "batch_size": 384, "micro_batch_size": 384, "dropout": 0.0,
            "warmup_steps": 1000, "clip_norm": 1.0, "nu": 100, "evaluate_every": 8,
            "horizon": 0.25, "ks": (16, 8, 4), "coefficients": ("uniform",),
        },
        anytime={"samples": 16, "methods": ("growing-ema:0.1",)},
        smoke={
            "sequence_length": 16, "batch_size": 16, "micro_batch_size": 16, "warmup_steps": 5,
            "nu": 10, "evaluate_every": 1,
        },
    ),
}  # fmt: skip
STUDIES["cifar100-windows"] = dataclasses.replace(
    STUDIES["cifar100"],
    evaluate_at=(30, 60, 100, 150),
    landed=(200,),
    shared={**STUDIES["cifar100"].shared, "evaluate_every": 10**6},
    anytime={
        "samples": 16,
        "methods": (
            *(f"horizon:{share}:{k}" for share in (0.1, 0.25, 0.5) for k in (8, 16, 32)),
            *("dense:0.25:8", "ema:0.999", "growing-ema:0.1", "growing-ema:0.25", "swa:4000"),
            *("corrected-ema:0.999", "bema:0.5:1", "twa:1:20", "rna:10", "rna-per-tensor:0.1"),
            "swag:0",
        ),
    },
)

_NAME = re.compile(
    r"(val-)?(constant|linear|cosine|free)-([\d.e-]*\d)(?:-(\d[\d.]*)e)?"
    r"(?:-wd-([\d.e-]*\d))?(?:-warm-(\d+))?(?:-m-(\d[\d.]*))?(?:\+(.+?))?(?:-seed-(\d+))?"
)


def plan_run(study: Study, name: str, data: Path, out: Path, *, smoke: bool) -> BudgetedRun:
    """The run of that name, with its branches."""
    found = _NAME.fullmatch(name)
    if found is None:
        raise SystemExit(f"{name}: not a run, such as constant-1e-3-seed-0 or cosine-1e-3-0.5e")
    held_out, kind, rate, epochs, weight_decay, warm, momentum, wrap, seed = found.groups()
    recipe = RECIPES.find(study.recipe)
    settings = {
        **(recipe.smoke_values if smoke else {}),
        **study.shared,
        "learning_rate": float(rate),
        "wrap": tuple(wrap.split("+")) if wrap else (),
        "schedule": kind if kind in ("linear", "cosine") else "constant",
        "epochs": _number(float(epochs)) if epochs else max(study.budgets),
        **(study.anytime if kind == "constant" else {}),
        **({"weight_decay": float(weight_decay)} if weight_decay else {}),
        **({"evaluate_at": study.evaluate_at} if kind in ("constant", "free") else {}),
        **(study.free if kind == "free" else {}),
        **({"warmup_steps": int(warm)} if warm else {}),
        **({"momentum": float(momentum)} if momentum else {}),
        **({"held_out": 5000} if held_out and not smoke else {}),
        **({"methods": ("growing-ema:0.1",)} if held_out and kind == "constant" else {}),
    }
    if smoke:
        settings |= {**study.smoke, "epochs": max(1, settings["epochs"] // 25), "evaluate_at": ()}
    plan = RunPlan(config=recipe(**settings), seed=int(seed or 0), data=str(data), smoke=smoke)
    folder = RunFolder(out / name, if_used="overwrite")
    if kind != "constant":
        return BudgetedRun(plan, folder)
    return BudgetedRun(plan, folder, list(_landings(study, plan, out / name)))


def _landings(study: Study, trunk: RunPlan, path: Path) -> Any:
    budgets = [budget for budget in study.landed if budget <= trunk.config.epochs]
    for budget in budgets or [trunk.config.epochs] * bool(study.landed):
        for land, shape in study.landings:
            config = dataclasses.replace(
                trunk.config,
                epochs=_number(budget),
                land=land,
                land_shape=shape,  # type: ignore[arg-type]
                evaluate_every=10**6,  # at the end only
            )
            name = f"{path.name}-landing-{land:g}-{shape}-{budget:g}e"
            folder = RunFolder(path.with_name(name), if_used="overwrite")
            yield Branch(dataclasses.replace(trunk, config=config), folder)


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("study", choices=sorted(STUDIES))
    add_options(parser, out="runs/frontier")
    parser.add_argument("--landed", type=float, nargs="*", metavar="EPOCHS")
    arguments = parser.parse_args()
    study, words = STUDIES[arguments.study], [arguments.study]
    if arguments.landed is not None:
        study = dataclasses.replace(study, landed=tuple(arguments.landed))
        words += ["--landed", *map(str, study.landed)]

    def plan(name: str) -> BudgetedRun:
        return plan_run(study, name, arguments.data, arguments.out, smoke=arguments.smoke)

    run_all(arguments, plan, words)


if __name__ == "__main__":
    main()
