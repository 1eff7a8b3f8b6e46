"""Every wrapper on two ranks, in copies and in shards: the weights of one process, resumed too."""

import math
import sys
from pathlib import Path

import torch
from support.ranks import on_ranks
from support.toy_task import toy_run

from lawa_lab.recipes.run_folder import RunFolder
from lawa_lab.recipes.runtime import choose_worker
from lawa_lab.wrappers.registry import WRAPPERS

TESTS = str(Path(__file__).parents[1])
TYPED = {
    "sam": "sam:0.2",
    "ema-nesterov": "ema-nesterov:0.6:0.7:5",
    "primal-averaging": "primal-averaging:0.8:0.3",
    "outer-nesterov": "outer-nesterov:5:0.7:0.5:0.6",
    "pswa": "pswa:5:7",
    "jump": "jump:8:3:1",
    "lookahead": "lookahead:5:0.8",
    "rescue": "rescue:9:3:1:0",
}
POISONED = (10,)  # for rescue


def train_all(rank: int, path: str) -> dict[str, list[list[torch.Tensor]]]:
    """The final weights by method: in copies, in shards, and in shards through a checkpoint."""
    sys.path.insert(0, TESTS)
    from support.toy_task import toy_run, toy_trainer, train_until, whole_weights

    worker = choose_worker("cpu")
    found: dict[str, list[list[torch.Tensor]]] = {}
    for name, text in TYPED.items():
        settings = {"wrap": (text,), "poisoned": POISONED if name == "rescue" else ()}
        settings["worker"] = worker
        copies = toy_run(parallel="ddp", **settings)[1]
        folder = RunFolder(Path(path, name))
        whole, resumed = (toy_trainer(parallel="fsdp", **settings) for _ in range(2))
        train_until(whole, 10)  # a jump of step 8 is on trial
        whole.save(folder)
        assert resumed.load(folder)
        for trainer in (whole, resumed):
            train_until(trainer)
        found[name] = [copies, whole_weights(whole), whole_weights(resumed)]
    return found


def test_two_ranks_train_as_one_and_resume_bit_for_bit(tmp_path: Path) -> None:
    assert set(TYPED) == set(WRAPPERS)
    ranks = on_ranks(2, train_all, str(tmp_path))
    for name, text in TYPED.items():
        _, alone, _ = toy_run(wrap=(text,), poisoned=POISONED if name == "rescue" else ())
        assert all(math.isfinite(float(each.sum())) for each in alone)
        for found in ranks:
            copies, shards, resumed = found[name]
            torch.testing.assert_close(copies, alone, rtol=1e-9, atol=1e-12, msg=name)
            torch.testing.assert_close(shards, alone, rtol=1e-9, atol=1e-12, msg=name)
            assert all(map(torch.equal, resumed, shards)), name
