"""A griffe extension: show the doctests inside docstrings as code, and no private parameters."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*\n*)+", re.M)


class FenceDoctests(griffe.Extension):
    """Puts fences around each run of examples, which Markdown would read as quotations."""

    def on_function(self, *, func: griffe.Function, **kwargs: Any) -> None:
        """Called for every function that has been read."""
        for parameter in [p for p in func.parameters if p.name.startswith("_")]:
            del func.parameters[parameter.name]

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every object that has been read."""
        if obj.docstring is not None:
            obj.docstring.value = _EXAMPLE.sub(
                lambda match: f"```pycon\n{match[0].strip()}\n```\n\n", obj.docstring.value
            )
