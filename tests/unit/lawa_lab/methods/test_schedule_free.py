"""The average of a Schedule-Free optimizer is the package's own, and reading it changes nothing."""

import copy

import pytest
import torch
from torch import nn

from lawa_lab.methods.schedule_free import ScheduleFreeAverage
from torch_lawa.errors import NotReadyError

schedulefree = pytest.importorskip("schedulefree")


@pytest.mark.parametrize("name", ["SGDScheduleFree", "AdamWScheduleFree"])
def test_it_is_what_eval_gives_and_training_goes_on_to_the_bit(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = getattr(schedulefree, name)(model.parameters(), lr=0.1)
    optimizer.train()
    average = ScheduleFreeAverage(optimizer)
    with pytest.raises(NotReadyError), average.swapped_into(model):
        pass
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()
    before = copy.deepcopy(model.state_dict())
    with average.swapped_into(model):
        read = copy.deepcopy(model.state_dict())
    assert all(torch.equal(model.state_dict()[n], before[n]) for n in before)
    assert not torch.equal(read["weight"], before["weight"])
    optimizer.eval()
    assert all(torch.equal(model.state_dict()[n], read[n]) for n in read)
