"""Methods that only average, on the same runs: the window, its relatives, predicted weights.

    python benchmarks/ring_methods.py digits constant-0.4-seed-0 --out runs/ring           # a CPU
    python benchmarks/ring_methods.py cifar100 constant-0.1 --data data --out runs/ring    # a GPU
    python benchmarks/ring_methods.py decoder RUN... --launch 4 --data data --out runs/ring
    python benchmarks/ring_methods_tables.py runs/ring                                     # tables

Runs are named as in `frontier.py`: `constant-RATE-seed-N` has every method beside its window (and
on a GPU landings as branches), `cosine-RATE-EPOCHSe-seed-N` is one annealed run. Methods that
choose or learn do so on validation and training data; image recipes train without their validation
images and are evaluated on validation and test images. `lawa report` reads the folders.
"""

import argparse

from frontier import Study, plan_run
from launcher import add_options, run_all

from lawa_lab.recipes.budgets import BudgetedRun

# One ring of 16 snapshots over the last quarter of the run so far serves all of the first group.
RING = ("greedy-soup", "phase", "swag:0")
LEARNED = ("twa:0.01:20", "twa:0.1:20", "twa:1:20")
PREDICTED = ("rna:0.001", "rna:0.1", "rna:10", "rna-per-tensor:0.1")
RULES = ("uniform", "recency:1", "recency:2", "trend:-0.25", "trend:0", "trend:0.5")
WINDOW = {
    "horizon": 0.25, "ks": (16, 8, 4), "coefficients": RULES, "choose_window": True,
}  # fmt: skip
SHORT_EMAS = tuple(
    f"{name}:{decay}" for name in ("ema", "corrected-ema") for decay in (0.9, 0.98, 0.995)
)
LONG_EMAS = tuple(
    f"{name}:{decay}" for name in ("ema", "corrected-ema") for decay in (0.99, 0.999, 0.9999)
)
GROWING = (
    "horizon:0.5:16", "dense:0.25:8", "growing-ema:0.1", "growing-ema:0.25", "two-tailed",
    "bema:0.5:0.2", "bema:0.5:0.5", "bema:0.5:1",
)  # fmt: skip

STUDIES = {
    "digits": Study(
        recipe="digits",
        budgets=(6, 12, 24, 48),
        evaluate_at=(6,),
        free={"optimizer": "schedule-free-sgd"},
        landings=(),
        landed=(),
        shared={
            "validation_fraction": 0.3, "evaluate_test": True, "max_shift": 0,
            "batch_norm": ("re-estimated",), "evaluate_every": 12, "ks": (16,), "horizon": 0.25,
        },
        anytime={**WINDOW, "methods": (*RING, *LEARNED, *PREDICTED, *SHORT_EMAS, *GROWING)},
        smoke={"evaluate_every": 1},
    ),
    "cifar100": Study(
        recipe="cifar100-resnet34",
        budgets=(30, 60, 100),
        evaluate_at=(30, 60, 100),
        free={"optimizer": "schedule-free-sgd", "warmup_steps": 1000},
        landings=((0.2, "linear"),),
        landed=(100,),
        shared={
            "held_out": 5000, "evaluate_test": True, "batch_norm": ("re-estimated",),
            "batch_norm_batches": 20, "variants_every": 1, "evaluate_every": 20, "ks": (16,),
            "horizon": 0.25, "coefficients": ("uniform",),
        },
        anytime={**WINDOW, "methods": (*RING, *LEARNED, *PREDICTED, *LONG_EMAS, *GROWING)},
        smoke={"held_out": 32, "evaluate_every": 1, "batch_norm_batches": 2, "warmup_steps": 0},
    ),
    "decoder": Study(
        recipe="wikipedia-decoder",
        budgets=(0.25, 0.5, 1),
        evaluate_at=(0.25, 0.5, 1),
        free={"optimizer": "schedule-free-adamw"},
        landings=((0.2, "linear"),),
        landed=(0.25, 0.5, 1),
        shared={"evaluation_tokens": 2**17, "nu": 1000, "ks": (16,)},
        anytime={**WINDOW, "methods": (*RING, *LEARNED, *PREDICTED, *LONG_EMAS, *GROWING)},
        smoke={"nu": 30},
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("study", choices=sorted(STUDIES))
    add_options(parser, out="runs/ring-methods")
    arguments = parser.parse_args()
    study = STUDIES[arguments.study]

    def plan(name: str) -> BudgetedRun:
        return plan_run(study, name, arguments.data, arguments.out, smoke=arguments.smoke)

    run_all(arguments, plan, [arguments.study])


if __name__ == "__main__":
    main()
