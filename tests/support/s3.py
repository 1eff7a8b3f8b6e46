"""A real S3 server on this machine, and checkpoints in its buckets."""

import json
import logging
from typing import Any

import torch
from moto.server import ThreadedMotoServer
from safetensors.torch import load, save
from torch import Tensor

from support.models import brute_force, round_fraction, same_bits, true_mean

State = dict[str, Tensor]
STEPS = (100, 200, 300, 400)


def start_server() -> tuple[ThreadedMotoServer, str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    return server, f"http://{host}:{port}"


def make_states() -> list[State]:
    return [
        {
            "emb": torch.randn(7, 5).bfloat16(),
            "block.w": torch.randn(40, 30),
            "block.b": torch.randn(30).half(),
            "steps": torch.tensor(step),
        }
        for step in STEPS
    ]


def mean_of(states: list[State]) -> State:
    """Independent of the package: float64 and exact fractions, integers from the newest."""
    found = {}
    for name, newest in states[-1].items():
        values = [state[name] for state in states]
        if not newest.is_floating_point():
            found[name] = newest
        elif newest.dtype == torch.float32:
            found[name] = torch.from_numpy(brute_force(values)).float()
        else:
            exact = [round_fraction(value, newest.dtype) for value in true_mean(values)]
            found[name] = torch.tensor(exact, dtype=torch.float64).to(newest.dtype)
            found[name] = found[name].reshape(newest.shape)
    return found


def assert_equal(found: State, wanted: State) -> None:
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert same_bits(found[name], value), name


def write_shards(fs: Any, folder: str, state: State, per_shard: int = 1) -> None:
    names = sorted(state)
    groups = [names[i : i + per_shard] for i in range(0, len(names), per_shard)]
    weight_map = {}
    for i, group in enumerate(groups, 1):
        file = f"model-{i:05d}-of-{len(groups):05d}.safetensors"
        fs.pipe(f"{folder}/{file}", save({name: state[name] for name in group}))
        weight_map |= dict.fromkeys(group, file)
    index = {"metadata": {}, "weight_map": weight_map}
    fs.pipe(f"{folder}/model.safetensors.index.json", json.dumps(index).encode())
    fs.pipe(f"{folder}/config.json", b'{"model_type": "tiny"}')


def read_shards(fs: Any, folder: str) -> State:
    weight_map = json.loads(fs.cat_file(f"{folder}/model.safetensors.index.json"))["weight_map"]
    found: State = {}
    for file in set(weight_map.values()):
        shard = load(fs.cat_file(f"{folder}/{file}"))
        assert all(weight_map[name] == file for name in shard)
        found |= shard
    return found


def names_in(fs: Any, folder: str) -> list[str]:
    fs.invalidate_cache()
    return sorted(path.rpartition("/")[2] for path in fs.find(folder))
