"""The ResNets have the published sizes and names."""

import torch

from lawa_lab.recipes.models.resnet import resnet34, resnet50


def count(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_published_parameter_counts() -> None:
    assert count(resnet50(1000)) == 25_557_032
    assert count(resnet34(100, stem="small")) == 21_328_292


def test_width_is_that_of_the_first_stage() -> None:
    narrow = resnet34(10, stem="small", width=4)
    assert narrow.conv1.weight.shape == (4, 3, 3, 3)
    assert narrow.layer1[0].conv1.weight.shape == (4, 4, 3, 3)
    assert narrow.fc.weight.shape == (10, 32)
    assert resnet50(10, width=8).fc.weight.shape == (10, 256)
    with torch.no_grad():
        assert narrow.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_names_are_torchvisions() -> None:
    names = set(resnet50(1000).state_dict())
    assert {"conv1.weight", "layer1.0.conv3.weight", "layer4.2.bn3.running_var"} <= names
    assert {"layer2.0.downsample.0.weight", "fc.bias"} <= names
    assert len(names) == 320


def test_strides() -> None:
    with torch.no_grad():
        assert resnet50(7).eval()(torch.zeros(1, 3, 64, 64)).shape == (1, 7)
