"""Every wrapper on two ranks, in copies and in shards: the weights of one process."""

import math
import sys
from pathlib import Path

import torch
from support.ranks import on_ranks
from support.toy_task import toy_run

from lawa_lab.recipes.runtime import choose_worker
from lawa_lab.wrappers.registry import WRAPPERS

TESTS = str(Path(__file__).parents[1])
TYPED = {
    "sam": "sam:0.2",
    "ema-nesterov": "ema-nesterov:0.6:0.7:5",
    "outer-nesterov": "outer-nesterov:5:0.7:0.5:0.6",
    "pswa": "pswa:5:7",
    "jump": "jump:8:3:1",
    "lookahead": "lookahead:5:0.8",
    "rescue": "rescue:9:3:1:0",
}
POISONED = (10,)  # for rescue


def train_all(rank: int) -> dict[str, list[list[torch.Tensor]]]:
    sys.path.insert(0, TESTS)
    from support.toy_task import toy_run

    worker = choose_worker("cpu")
    found: dict[str, list[list[torch.Tensor]]] = {}
    for name, text in TYPED.items():
        poisoned = POISONED if name == "rescue" else ()
        found[name] = [
            toy_run(worker=worker, parallel=parallel, wrap=(text,), poisoned=poisoned)[1]  # type: ignore[arg-type]
            for parallel in ("ddp", "fsdp")
        ]
    return found


def test_two_ranks_train_as_one() -> None:
    assert set(TYPED) == set(WRAPPERS)
    ranks = on_ranks(2, train_all)
    for name, text in TYPED.items():
        _, alone, _ = toy_run(wrap=(text,), poisoned=POISONED if name == "rescue" else ())
        assert all(math.isfinite(float(each.sum())) for each in alone)
        for found in ranks:
            for weights in found[name]:
                torch.testing.assert_close(weights, alone, rtol=1e-9, atol=1e-12, msg=name)
