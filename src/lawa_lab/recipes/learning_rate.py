"""The learning rate of each step: a warm-up, then constant, cosine or linear, or a landing.

A *landing* is a decay at the end of a constant-rate run. With 20 % of the steps it is the usual
warmup-stable-decay schedule.
"""

import math

from lawa_lab.recipes.config import TrainConfig

__all__ = ["first_landing_step", "learning_rate"]


def learning_rate(config: TrainConfig, step: int, num_steps: int) -> float:
    """The learning rate of a step (from 0) in a run of `num_steps`.

    >>> from lawa_lab.recipes.registry import RECIPES
    >>> digits = RECIPES.find("digits")
    >>> config = digits(learning_rate=1.0, schedule="linear", warmup_steps=2)
    >>> [learning_rate(config, step, 6) for step in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> config = digits(learning_rate=1.0, schedule="constant", land=0.5)
    >>> [learning_rate(config, step, 8) for step in range(8)]
    [1.0, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate * _landing(config, step, num_steps)
    part = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    left = 1.0 - part if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * part))
    return config.learning_rate * left


def first_landing_step(config: TrainConfig, num_steps: int) -> int:
    """How many steps a run trains at its constant rate; after them a landing branches off."""
    return num_steps - round(config.land * num_steps)


def _landing(config: TrainConfig, step: int, num_steps: int) -> float:
    first = first_landing_step(config, num_steps)
    if step < first:
        return 1.0
    part = (step - first) / (num_steps - first)
    return 1.0 - (part if config.land_shape == "linear" else math.sqrt(part))
