"""The plan of an average: a value that can be printed, checked and then run."""

import contextlib
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch_lawa.checkpoints.find.discovery import (
    Discovery,
    FoundCheckpoint,
    find_checkpoints,
    select,
)
from torch_lawa.checkpoints.find.scores import Mode, choose_best
from torch_lawa.checkpoints.formats.base import Checkpoint
from torch_lawa.checkpoints.formats.registry import open_checkpoint
from torch_lawa.checkpoints.provenance import PROVENANCE
from torch_lawa.checkpoints.storage.paths import Location, parse_output
from torch_lawa.coefficients import Explicit, Uniform, Weights, name_coefficients, weights_at
from torch_lawa.errors import ConfigError, LayoutError
from torch_lawa.garbage import paused_garbage_collection
from torch_lawa.offline.matching import PlannedTensor, match_tensors, shared_aliases
from torch_lawa.offline.options import DEFAULTS, AverageOptions
from torch_lawa.offline.output_plan import Output, plan_output
from torch_lawa.offline.side_files import links_out
from torch_lawa.units import counted, few, format_bytes

__all__ = ["AveragePlan", "Input", "PlannedInput", "plan_average", "plan_found", "plan_opened"]

Input = str | os.PathLike[str]
_DIFFUSERS_LORA = "lora_adapter_metadata"
_LORA = ("r", "lora_alpha", "use_rslora", "use_dora", "peft_type", "rank_pattern", "alpha_pattern")


@dataclass(frozen=True)
class PlannedInput:
    """A checkpoint that is averaged, and its weight."""

    location: Location
    label: str
    step: int | None
    epoch: int | None
    format: str
    num_bytes: int
    weight: float
    value: float | None = None  # of the metric that it was chosen by


@dataclass(frozen=True)
class AveragePlan:
    """Which checkpoints, oldest first, are averaged into what. `run_average` runs it."""

    inputs: tuple[PlannedInput, ...]
    weights: Weights
    coefficients: str
    tensors: tuple[PlannedTensor, ...]
    aliases: dict[str, str]
    output: Output
    notes: tuple[str, ...]
    metadata: dict[str, str]
    key: str | None = None
    horizon: float | None = None
    metric: str | None = None  # that the checkpoints were chosen by
    mode: Mode | None = None

    @property
    def bytes_read(self) -> int:
        """Bytes of the inputs that will be read, each once."""
        used = sum(w != 0.0 for w in self.weights.numerators)
        return sum(t.source.nbytes * (used if t.rule == "average" else 1) for t in self.tensors)

    @property
    def bytes_written(self) -> int:
        """Bytes of tensors in the output."""
        return self.output.num_bytes

    def __str__(self) -> str:
        span = ""
        if self.horizon is not None:
            unit = "epochs" if self.inputs[-1].step is None else "steps"
            newest = self.inputs[-1].label
            span = f", the last {self.horizon:.6g} of the {unit} up to {newest}"
        if self.metric is not None:
            span = f", those with the {'lowest' if self.mode == 'min' else 'highest'} {self.metric}"
        num = counted(len(self.inputs), "checkpoint")
        lines = [f"Average of {num} ({self.coefficients}){span}, oldest first:"]
        labels = max(len(i.label) for i in self.inputs)
        for i in self.inputs:
            size = format_bytes(i.num_bytes)
            value = "" if i.value is None else f"{self.metric} {i.value:<10.6g} "
            lines.append(
                f"  {i.label:<{labels}}  weight {i.weight:<8.4g} {value}{size:>8}  {i.location}"
            )
        averaged = [t for t in self.tensors if t.rule == "average"]
        dtypes = sorted({t.target.dtype for t in averaged})
        lines.append(
            f"Tensors: {len(averaged)} averaged ({', '.join(dtypes) or 'none'}; "
            f"{sum(t.target.numel for t in averaged):,} values), "
            f"{len(self.tensors) - len(averaged)} from the newest, "
            f"{counted(len(self.aliases), 'tied name')}."
        )
        lines.append(
            f"Reads {format_bytes(self.bytes_read)}, writes {format_bytes(self.bytes_written)}:"
        )
        num_copied = len(self.output.copied)
        copied = f" and {counted(num_copied, 'copied file')}" if num_copied else ""
        if self.output.writer.keeps:  # it may be much larger than the weights
            size = format_bytes(self.output.num_bytes_copied)
            copied = f", a copy of the newest ({size}) with these values"
        lines.append(f"  {self.output.location}: {self.output.describe()}{copied}")
        lines += [f"Note: {note}" for note in self.notes]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values."""
        return {
            "inputs": [
                {
                    "path": str(i.location),
                    "step": i.step,
                    "epoch": i.epoch,
                    "format": i.format,
                    "bytes": i.num_bytes,
                    "weight": i.weight,
                    **({} if i.value is None else {"value": i.value}),
                }
                for i in self.inputs
            ],
            "coefficients": self.coefficients,
            "horizon": self.horizon,
            "metric": self.metric,
            "mode": self.mode,
            "num_averaged": sum(t.rule == "average" for t in self.tensors),
            "num_from_newest": sum(t.rule == "newest" for t in self.tensors),
            "tied": self.aliases,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "output": str(self.output.location),
            "layout": {
                "kind": self.output.kind,
                "files": [shard.file for shard in self.output.shards],
                "copied": [location.name for location in self.output.copied],
            },
            "notes": list(self.notes),
        }


def plan_average(
    inputs: Input | Sequence[Input],
    output: Input,
    *,
    last: int | None = None,
    horizon: float | None = None,
    at: int | None = None,
    start: int | None = None,
    stop: int | None = None,
    every: int | None = None,
    best: int | None = None,
    metric: str | None = None,
    mode: Mode | None = None,
    metrics: Input | None = None,
    weights: Sequence[float] | None = None,
    overwrite: bool = False,
    options: AverageOptions = DEFAULTS,
) -> AveragePlan:
    """Plan the average of checkpoints: files, folders, patterns, URLs, or the folder of a run.

    Choose among the checkpoints of a run by step (or epoch): the `last` k, or all within the last
    share `horizon` of the steps, such as 0.25; ending `at` a step, from `start` to `stop`, only
    multiples of `every`. Or choose the `best` of them by a `metric` that was recorded: in the file
    `metrics`, else with the checkpoints; `mode` says whether "min" or "max" is good. `weights` has
    one number for each of several explicit inputs, in their order. Nothing is written; whatever can
    be checked beforehand is checked here. `run_average` runs the plan.

    >>> import tempfile, torch
    >>> from pathlib import Path
    >>> from torch_lawa.checkpoints.formats.safetensors_torch import save_tensors
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for step in (100, 200, 300):
    ...         save_tensors(Path(folder) / f"step_{step}.safetensors", {"w": torch.ones(2)})
    ...     plan = plan_average(folder, Path(folder) / "mean.safetensors", last=2)
    >>> [i.step for i in plan.inputs], plan.bytes_read
    ([200, 300], 16)
    """
    many = [inputs] if isinstance(inputs, str | os.PathLike) else list(inputs)
    found = find_checkpoints(many, key=options.key)
    _check_best(best, metric, last=last, horizon=horizon, mode=mode, metrics=metrics)
    chosen = select(found, last=last, horizon=horizon, at=at, start=start, stop=stop, every=every)
    location = parse_output(output)
    # `at` says where a window ends, and not how long it is.
    if found.is_run and best is last is horizon is start is stop is every is None:
        num, labels = len(chosen.found), [each.label for each in chosen.found]
        until = "" if at is None else f" up to --at {at}"
        raise ConfigError(
            f"{many[0]}: this run has {counted(num, 'checkpoint')}{until} "
            f"({' to '.join(dict.fromkeys((labels[0], labels[-1])))}). Say which to average, such "
            f"as --last {min(num, 6)}."
        )
    if weights is not None:
        options = replace(options, coefficients=_explicit(found, many, weights, options))
    if best is None or metric is None:
        notes = chosen.notes
        if horizon is not None and len(chosen.found) == 1:
            single = f"--horizon {horizon:g} contains a single checkpoint: nothing to average."
            notes = (*notes, single)
        plan = plan_found(chosen.found, location, options, notes=notes, overwrite=overwrite)
        return replace(plan, horizon=horizon)
    file = None if metrics is None else Path(metrics)
    unspaced = replace(chosen, notes=found.notes)  # the best are not evenly spaced
    of = choose_best(unspaced, best, metric, mode=mode, metrics=file)
    notes = of.discovery.notes
    plan = plan_found(of.discovery.found, location, options, notes=notes, overwrite=overwrite)
    scored = tuple(replace(i, value=v) for i, v in zip(plan.inputs, of.values, strict=True))
    return replace(plan, inputs=scored, metric=of.metric, mode=of.mode)


def _check_best(
    best: int | None, metric: str | None, *, last: object, horizon: object, **others: object
) -> None:
    if best is None:
        for name, value in {"metric": metric, **others}.items():
            if value is not None:
                raise ConfigError(f"--{name} {value}: say how many checkpoints, such as --best 5.")
    elif metric is None:
        raise ConfigError(f"--best {best}: by which metric? Pass --metric, such as valid_loss.")
    elif last is not None or horizon is not None:
        raise ConfigError(
            f"--best {best} and --{'last' if last is not None else 'horizon'}: pass only one. "
            "--from, --to, --every and --at restrict the checkpoints to choose from."
        )


def plan_found(
    found: Sequence[FoundCheckpoint],
    output: Location,
    options: AverageOptions,
    *,
    notes: Sequence[str] = (),
    overwrite: bool = False,
) -> AveragePlan:
    """Plan the average of checkpoints that were found and chosen, oldest first."""
    with paused_garbage_collection(), ExitStack() as stack:
        opened = [stack.enter_context(open_checkpoint(f.location, key=options.key)) for f in found]
        return plan_opened(found, opened, output, options, notes=notes, overwrite=overwrite)


def plan_opened(
    found: Sequence[FoundCheckpoint],
    opened: Sequence[Checkpoint],
    output: Location,
    options: AverageOptions,
    *,
    notes: Sequence[str] = (),
    overwrite: bool = False,
) -> AveragePlan:
    """Plan the average of checkpoints that are already open."""
    weights = weights_at(options.rule, [checkpoint.step for checkpoint in found])
    tensors = match_tensors(opened, options)
    _check_adapters(opened)
    return AveragePlan(
        inputs=tuple(
            PlannedInput(
                f.location, f.label, f.step, f.epoch, c.format, c.num_bytes, w / weights.divisor
            )
            for f, c, w in zip(found, opened, weights.numerators, strict=True)
        ),
        weights=weights,
        coefficients=name_coefficients(options.rule),
        tensors=tuple(tensors),
        aliases=shared_aliases(opened, tensors, options.strip_prefix),
        output=plan_output(output, opened, tensors, options, overwrite=overwrite),
        notes=(*notes, *_notes(opened, tensors, options)),
        metadata=dict(opened[-1].metadata),
        key=options.key,
    )


def _explicit(
    found: Discovery, inputs: Sequence[Input], weights: Sequence[float], options: AverageOptions
) -> Explicit:
    """The weights, put into the order of the checkpoints, which may be sorted by step."""
    if options.coefficients != Uniform():
        raise ConfigError("--weights and --coefficients exclude each other. Give one of them.")
    if len(weights) != len(inputs) or len(found.found) != len(inputs):
        raise ConfigError(
            f"{counted(len(weights), 'weight')} for {counted(len(inputs), 'input')} "
            f"({counted(len(found.found), 'checkpoint')}). Give one weight for each file, in the "
            "order of the files."
        )
    given = {
        str(single.location): weight
        for each, weight in zip(inputs, weights, strict=True)
        for single in find_checkpoints([each], key=options.key).found
    }
    return Explicit([given[str(f.location)] for f in found.found])


def _notes(
    opened: Sequence[Checkpoint], tensors: Sequence[PlannedTensor], options: AverageOptions
) -> list[str]:
    notes = list(dict.fromkeys(note for c in opened for note in c.notes))
    averages = [c.location.name for c in opened if PROVENANCE in c.metadata]
    if 0 < len(averages) < len(opened):
        notes.append(
            f"averages made by lawa are among the checkpoints: {few(averages)}. If that is a "
            "mistake, write averages outside of the run's folder."
        )
    statistics = sum(t.name.endswith("running_mean") for t in tensors)
    if statistics and options.buffers == "newest":
        notes.append(
            f"BatchNorm's running statistics ({counted(statistics, 'layer')}) come from the newest "
            "checkpoint; re-estimate them before use (torch_lawa.recalibrate_batch_norm)."
        )
    if links := links_out(opened[-1]):
        notes.append(
            f"left out: {few(link.name for link in links)}, a link to a file outside of the "
            "checkpoint's folder; copy that file if the result needs it."
        )
    if any(t.name.endswith(("lora_A.weight", "lora_B.weight")) for t in tensors):
        notes.append(
            "LoRA factors are averaged separately; the product of averaged factors is not the "
            "average of the products."
        )
    return notes


def _check_adapters(opened: Sequence[Checkpoint]) -> None:
    """Refuse adapters of the same shapes that are scaled differently: their mean is wrong."""
    configs = [found for checkpoint in opened if (found := _adapter_config(checkpoint)) is not None]
    for location, config in configs[:-1]:
        newest_location, newest = configs[-1]
        names = [name for name in {**config, **newest} if name.rpartition(".")[2] in _LORA]
        for name in names:
            if config.get(name) != newest.get(name):
                raise LayoutError(
                    f"{location}: {name} is {config.get(name)}, but {newest.get(name)} in "
                    f"{newest_location}. Adapters that are scaled differently have no mean; "
                    "average those of one training run."
                )


def _adapter_config(checkpoint: Checkpoint) -> tuple[Location, dict[str, object]] | None:
    """How an adapter is scaled, and the file that says it; None for other checkpoints.

    PEFT writes a file of its own, Diffusers the metadata of the weights (`unet.lora_alpha`, …).
    """
    folder = checkpoint.location
    folder = folder if folder.is_folder() else folder.parent
    location = folder.child("adapter_config.json")
    if checkpoint.files[0].name.startswith("adapter_model") and location.is_file():
        return location, location.read_json()
    if (text := checkpoint.metadata.get(_DIFFUSERS_LORA)) is None:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(text)
        if isinstance(found, dict):
            return checkpoint.files[0], found
    return None
