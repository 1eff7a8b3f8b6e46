"""The table of recipes, from which `lawa train`, its `--help` and resumed runs find them.

A recipe is one file in `lawa_lab/recipes/catalog`: a `TrainConfig` with its settings and
`make_task`, decorated with `register_recipe`.
"""

from typing import TypeVar

from lawa_lab.recipes.config import TrainConfig
from lawa_lab.registry import Registry

__all__ = ["RECIPES", "register_recipe"]

RECIPES: Registry[type[TrainConfig]] = Registry("recipe", "lawa_lab.recipes.catalog")

Config = TypeVar("Config", bound=TrainConfig)


def register_recipe(config: type[Config]) -> type[Config]:
    """Register a configuration under its `recipe` name; used as a class decorator."""
    RECIPES.add(config.recipe, config)
    return config
