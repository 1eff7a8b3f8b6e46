"""What a snapshot costs a training run on a GPU.

    python benchmarks/gpu.py --out results/NAME        # with torch for CUDA and transformers

Four questions: do steps with a snapshot to host memory every 10 take longer than steps without; how
long does `collect` block Python, relative to one device-to-device copy; what do
torch's and timm's EMA cost beside it; and is the mean bit for bit that of a CPU.
"""

import argparse
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from record import Log, median
from torch import nn

from lawa_lab.recipes.models.resnet import resnet34
from torch_lawa import LatestWeightAverager

Step = Callable[[], None]


def resnet_step() -> tuple[nn.Module, Step]:
    """CIFAR ResNet-34, batch 256, bf16 autocast, channels-last, compiled, SGD with momentum."""
    torch.manual_seed(0)
    model = resnet34(100, stem="small").cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, fused=True
    )
    compiled = torch.compile(model)
    x = torch.randn(256, 3, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    y = torch.randint(100, (256,), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(compiled(x), y)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return model, step


def roberta_step() -> tuple[nn.Module, Step]:
    """RoBERTa-Base masked-language modelling, 64 x 512 tokens, bf16 autocast, AdamW."""
    from transformers import RobertaConfig, RobertaForMaskedLM

    torch.manual_seed(0)
    config = RobertaConfig(vocab_size=50265, max_position_embeddings=514, type_vocab_size=1)
    model = RobertaForMaskedLM(config).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model)
    ids = torch.randint(5, 50265, (64, 512), device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = compiled(input_ids=ids, labels=ids).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return model, step


def timed(act: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    act()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def overhead(
    log: Log, name: str, model: nn.Module, step: Step, *, num_steps: int, rounds: int
) -> None:
    """Blocks of steps, without and with a snapshot every `nu`, in turn."""
    averagers = {nu: LatestWeightAverager(k=6, store="host", frozen="omit") for nu in (10, 1)}
    for _ in range(10):
        step()
    for averager in averagers.values():
        for _ in range(7):
            averager.collect(model)
        averager.wait()

    def block(nu: int | None) -> None:
        for i in range(num_steps):
            step()
            if nu is not None and (i + 1) % nu == 0:
                averagers[nu].collect(model)

    times: dict[str, list[float]] = {str(nu): [] for nu in (None, *averagers)}
    for _ in range(rounds):
        for nu in (None, *averagers):
            torch.cuda.synchronize()
            start = time.perf_counter()
            block(nu)
            # Only the training stream: the last snapshot may still be copied to the host.
            torch.cuda.current_stream().synchronize()
            times[str(nu)].append((time.perf_counter() - start) / num_steps)
    log.add(kind="overhead", model=name, num_steps=num_steps, seconds_per_step=times)
    plain = median(times["None"])
    print(f"\n{name}: {1e3 * plain:.2f} ms a step without snapshots, {rounds} rounds")
    for nu in averagers:
        print(f"  with one every {nu:>3} steps: {spread(times[str(nu)], times['None'])}")
    half = times["None"]
    print(f"  noise, without against without: {spread(half[1::2], half[::2])}")


def spread(times: list[float], base: list[float]) -> str:
    """The median of the ratios round by round, and the middle half of them."""
    ratios = sorted(a / b for a, b in zip(times, base, strict=False))
    low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
    return (
        f"{median(ratios):.4f} x (middle half of the rounds {low:.4f} to {high:.4f}); "
        f"medians {median(times) / median(base):.4f} x"
    )


def peers(model: nn.Module) -> dict[str, Callable[[], Any]]:
    """Updates of the averages people use, on the GPU."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    found: dict[str, Callable[[], Any]] = {}
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    found["torch AveragedModel (EMA)"] = lambda: ema.update_parameters(model)
    swa = AveragedModel(model)
    found["torch AveragedModel (SWA)"] = lambda: swa.update_parameters(model)
    with contextlib.suppress(ImportError):
        from timm.utils import ModelEmaV2, ModelEmaV3

        v2, v3 = ModelEmaV2(model), ModelEmaV3(model)
        found["timm ModelEmaV2"] = lambda: v2.update(model)
        found["timm ModelEmaV3"] = lambda: v3.update(model)
    return found


def held(log: Log, name: str, model: nn.Module, repeats: int) -> None:
    """How long an update blocks Python, and how long it keeps the GPU busy."""
    parameters = [p.detach() for p in model.parameters()]
    target = [torch.empty_like(p) for p in parameters]
    averagers = {s: LatestWeightAverager(k=6, store=s) for s in ("host", "device")}  # type: ignore[arg-type]
    acts: dict[str, Callable[[], Any]] = {
        "device-to-device copy (the floor)": lambda: torch._foreach_copy_(target, parameters),
        **{f"collect, store={s}": (lambda a=a: a.collect(model)) for s, a in averagers.items()},
        **peers(model),
    }
    print(f"\n{name}: {sum(p.numel() for p in parameters):,} parameters; milliseconds")
    print(f"  {'':36} holds the caller   caller's stream busy")
    for label, act in acts.items():
        for _ in range(8):
            act()
        caller, stream = [], []
        for _ in range(repeats):
            for averager in averagers.values():
                averager.wait()
            torch.cuda.synchronize()
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            start = time.perf_counter()
            act()
            caller.append(time.perf_counter() - start)
            last.record()
            torch.cuda.synchronize()
            stream.append(first.elapsed_time(last) / 1e3)
        log.add(kind="held", model=name, act=label, caller_s=caller, stream_s=stream)
        print(f"  {label:36} {1e3 * median(caller):12.3f} {1e3 * median(stream):18.3f}")
    for store, averager in averagers.items():
        spent = [timed(lambda: _swap(averager, model)) for _ in range(5)]  # noqa: B023
        log.add(kind="swap", model=name, store=store, seconds=spent)
        print(f"  swapped_into and back, k = 6, store={store}: {1e3 * median(spent):.1f} ms")


def _swap(averager: LatestWeightAverager, model: nn.Module) -> None:
    with averager.swapped_into(model):
        pass


def pinning(log: Log) -> None:
    """The two ways to page-lock host memory: how long they take, how fast the copy is."""
    source = torch.randn(125_000_000, device="cuda")

    def registered() -> torch.Tensor:
        flat = torch.zeros(source.shape)
        torch.cuda.cudart().cudaHostRegister(flat.data_ptr(), flat.numel() * 4, 0)  # type: ignore[no-untyped-call]
        return flat

    kept = []
    print("\n500 MB of page-locked host memory")
    for label, make in (
        ("pin_memory=True", lambda: torch.empty(source.shape, pin_memory=True)),
        ("cudaHostRegister", registered),
    ):
        start = time.perf_counter()
        kept.append(make())
        lock = time.perf_counter() - start
        target = kept[-1]
        spent = [timed(lambda: target.copy_(source, non_blocking=True)) for _ in range(6)]  # noqa: B023
        log.add(kind="pinning", way=label, lock_s=lock, copy_s=spent)
        print(f"  {label:18} locked in {lock:.3f} s, copied at {0.5 / median(spent):.1f} GB/s")


def memory(log: Log, name: str, model: nn.Module) -> None:
    """GPU memory that a window in host memory takes."""
    size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    averager = LatestWeightAverager(k=6, store="host")
    torch.cuda.reset_peak_memory_stats()
    for _ in range(10):
        averager.collect(model)
    averager.wait()
    added = (torch.cuda.max_memory_allocated() - before) / size
    log.add(kind="memory", model=name, copies_added=added)
    print(f"\n{name}: a window of 6 in host memory adds {added:.3f} copies to the GPU's peak")


def window_mean(window: list[torch.Tensor], name: str) -> torch.Tensor:
    """float64 by hand; of integers and BatchNorm statistics the newest."""
    if not window[-1].is_floating_point() or "running_" in name:
        return window[-1]
    total = window[0].double()
    for tensor in window[1:]:
        total = total + tensor.double()
    return (total / len(window)).to(window[-1].dtype)


def equality(log: Log, name: str, model: nn.Module, step: Step) -> None:
    """The same snapshots, averaged on the GPU, behind it, and on the CPU alone."""
    averagers = {
        "host": LatestWeightAverager(k=5, store="host", _sliding=False),
        "host, sliding": LatestWeightAverager(k=5, store="host", _sliding=True),
        "device": LatestWeightAverager(k=5, store="device", _sliding=False),
        "device, sliding": LatestWeightAverager(k=5, store="device", _sliding=True),
    }
    taken: list[dict[str, torch.Tensor]] = []
    equal = True
    for _ in range(9):
        step()
        taken.append({n: t.detach().cpu().clone() for n, t in model.state_dict().items()})
        for averager in averagers.values():
            averager.collect(model)
        step()  # the weights move on while snapshots are under way
        if len(taken) < 5:
            continue
        exact = {n: window_mean([state[n] for state in taken[-5:]], n) for n in taken[-1]}
        for label, averager in averagers.items():
            results = {"average": averager.average()}
            with averager.swapped_into(model):
                results["swap"] = {n: t.clone() for n, t in model.state_dict().items()}
            for route, result in results.items():
                for n, value in result.items():
                    if not torch.equal(value.cpu(), exact[n]):
                        equal = False
                        print(f"  NOT EQUAL: {label}, {route}, {n}")
    log.add(kind="equality", model=name, equal=equal)
    print(f"\n{name}: every mean equals the CPU's float64 mean bit for bit: {equal}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench-gpu"))
    parser.add_argument("--only", default="", help="the models whose name contains this")
    parser.add_argument("--quick", action="store_true", help="a smoke test of the script itself")
    options = parser.parse_args()
    log = Log(options.out)
    torch.set_float32_matmul_precision("high")
    pinning(log)
    # Many short blocks, alternating: slow changes of the host affect all variants equally.
    jobs = {"ResNet-34 / CIFAR": (resnet_step, 50, 60), "RoBERTa-Base": (roberta_step, 20, 20)}
    for name, (make, num_steps, num_rounds) in jobs.items():
        if options.only not in name:
            continue
        model, step = make()
        rounds, repeats = (2, 3) if options.quick else (num_rounds, 30)
        length = 10 if options.quick else num_steps
        overhead(log, name, model, step, num_steps=length, rounds=rounds)
        held(log, name, model, repeats)
        memory(log, name, model)
        equality(log, name, model, step)
        del model, step
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
