"""The time of a training step with each wrapper, relative to a plain step.

    python benchmarks/wrapper_cost.py cifar100-resnet34 --data data --out results/NAME   # a GPU
    python benchmarks/wrapper_cost.py digits --out /tmp/cost                             # a CPU

One model is trained by all wrappers in turn, a few steps each, in several rounds; the ratio is that
of the medians of the rounds, so that other load affects all equally. Wrappers that act only at
intervals (a jump, an outer step) act here at those of their usual settings.
"""

import argparse
import itertools
import time
from pathlib import Path

import torch
from record import Log, median

from lawa_lab.recipes.loop import make_task
from lawa_lab.recipes.registry import RECIPES
from lawa_lab.recipes.run_folder import RunPlan
from lawa_lab.recipes.runtime import choose_worker, deterministic
from lawa_lab.recipes.trainer import Trainer
from lawa_lab.recipes.wrapped_optimizer import WrappedOptimizer
from lawa_lab.wrappers.registry import parse_wrappers

WRAPPERS = (
    "", "sam:0.05", "ema-nesterov:0.3:0.99:0", "primal-averaging:0.9:0.1",
    "outer-nesterov:30:0.7:0.5", "pswa:30", "lookahead:5:0.8", "rescue",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("recipe")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("runs/wrapper-cost"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    log, worker = Log(arguments.out), choose_worker()
    config = RECIPES.find(arguments.recipe)(schedule="constant", batch_norm=("re-estimated",))
    plan = RunPlan(config=config, data=str(arguments.data) if arguments.data else None)
    with deterministic(None):
        trainer = Trainer(plan, make_task(plan, worker), worker)
        wrapped = {
            text: WrappedOptimizer(
                parse_wrappers([text] if text else [], config.optimizer),
                trainer.model,
                trainer.optimizer,
                trainer.averager,
                worker,
            )
            for text in WRAPPERS
        }
        batches = itertools.cycle(list(itertools.islice(trainer.batches(), 20)))
        for batch in itertools.islice(batches, 10):  # compiles
            trainer.train_step(batch)
        seconds: dict[str, list[float]] = {text: [] for text in WRAPPERS}
        for _ in range(arguments.rounds):
            for text in WRAPPERS:
                trainer._wrapped = wrapped[text]
                _wait(worker.device)
                begin = time.perf_counter()
                for batch in itertools.islice(batches, arguments.steps):
                    trainer.train_step(batch)
                _wait(worker.device)
                seconds[text].append((time.perf_counter() - begin) / arguments.steps)
                log.add(kind="round", wrapper=text, seconds=seconds[text][-1])
    plain = median(seconds[""])
    for text, values in seconds.items():
        print(f"{text or 'plain':28} {1e3 * median(values):8.3f} ms  {median(values) / plain:.3f}")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
