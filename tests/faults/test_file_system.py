"""Every writer with faults at its file-system calls, on several kinds of file systems.

A trial runs a writer once with one fault: it is killed, gets a signal, or a call fails. Then its
result is the old or the new one, bit for bit, its inputs are as before, an error is one line that
names a file, and the next run succeeds and leaves nothing else behind.
"""

import errno
import itertools
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.campaign import Campaign
from support.file_faults import Ended, Fault, FaultServer, Program, System
from support.writers import WRITERS, Tree, Writer, lawa, link_tree, tensors, tree

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(bool(FaultServer.missing()), reason=FaultServer.missing()),
    pytest.mark.filterwarnings("ignore:.*torch.distributed"),
]

COMPLETE = System()
SYSTEMS = [
    COMPLETE,
    *(
        System(f"no renameat2 ({errno.errorcode[code]})", rename_flags=False, refusal=code)
        for code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
    ),
    *(
        System(f"no links ({errno.errorcode[code]})", links=False, refusal=code)
        for code in (errno.EPERM, errno.ENOTSUP)
    ),
    System("neither", rename_flags=False, links=False, refusal=errno.ENOTSUP),
]
ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EACCES)
SIGNALS = (signal.SIGINT, signal.SIGTERM)
LEFTOVER = re.compile(r"\.(partial|new)(/|$)")
REMOVALS = ("unlink", "rmdir", "open", "opendir")  # calls of a removal: what fails, stays


# In `make test` there is time for some.
LONG = pytest.mark.skipif("LAWA_FAULTS_SECONDS" not in os.environ, reason="make test-faults")
SHORT = ("average over a folder", "average over a Megatron checkpoint", "watch", "disk store")
NAMES = [pytest.param(name, marks=() if name in SHORT else LONG) for name in WRITERS]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultServer]:
    with FaultServer(tmp_path_factory.mktemp("server")) as made:
        yield made


class Trials:
    """One writer in a folder that is made anew for every trial."""

    def __init__(self, writer: Writer, server: FaultServer, folder: Path) -> None:
        self.writer, self.server = writer, server
        self.root, self._template = folder / "trial", folder / "template"
        self.root.mkdir()
        writer.prepare(self.root)
        if writer.first:
            self.succeed(writer.first)
        self.root.rename(self._template)
        self.renew()
        self.before = tree(self.root)
        self.succeed(writer.code)
        self.after = tree(self.root)
        self.succeed(writer.again or writer.code)
        self.finally_ = tree(self.root)
        self._counts: dict[tuple[bool, System], int] = {}

    def renew(self) -> None:
        """The folder as before the writer runs."""
        shutil.rmtree(self.root, ignore_errors=True)
        link_tree(self._template, self.root)

    def succeed(self, code: str, system: System = COMPLETE) -> Ended:
        """Run without a fault."""
        ended = self.server.run(Program(code, self.root, system=system))
        assert ended.code == 0, ended.stderr
        return ended

    def count(self, reads: bool, system: System) -> int:
        """The number of calls at which a fault can happen."""
        if (reads, system) not in self._counts:
            self.renew()
            program = Program(self.writer.code, self.root, Fault(reads=reads), system)
            self._counts[reads, system] = self.server.run(program).count
        return self._counts[reads, system]

    def all_faults(self, chance: random.Random) -> Iterator[tuple[str, Fault, System]]:
        """Each fault at each call on each system, in a random order, and then again."""
        kinds = [("kill", Fault("kill")), ("short write", Fault("short"))]
        for code in ERRORS:
            kinds.append((errno.errorcode[code], Fault("fail", number=code, reads=True)))
        kinds.append(("full disk", Fault("fail from then on", number=errno.ENOSPC)))
        kinds.append(("broken disk", Fault("fail from then on", number=errno.EIO, reads=True)))
        kinds += [(f"{s.name} at a call", Fault("signal", number=s)) for s in SIGNALS]
        universe = list(itertools.product(kinds, SYSTEMS))
        chance.shuffle(universe)
        found: list[tuple[str, Fault, System]] = []
        for (kind, fault), system in universe:
            calls = [replace(fault, at=at) for at in range(self.count(fault.reads, system))]
            made = [(kind, each, system) for each in calls]
            chance.shuffle(made)
            found += made[1:]
            yield from made[:1]
        while True:
            chance.shuffle(found)
            found.sort(key=lambda each: each[0] != "kill")  # kills of every call come first
            yield from found

    def check(self, fault: Fault, system: System) -> None:
        """One trial."""
        self.renew()
        ended = self.server.run(Program(self.writer.code, self.root, fault, system))
        try:
            self._check(ended, fault, system)
        except BaseException as error:
            error.add_note(f"{self.writer.name}: {fault} ({system.name}): {ended}")
            raise

    def check_signal(self, number: int, seconds: float) -> None:
        """One trial with a signal after some seconds."""
        self.renew()
        program = Program(self.writer.code, self.root, signal=(number, seconds))
        ended = self.server.run(program)
        try:
            # Before the first line of ours, or of `main`: Python itself handles the signal then.
            early = "torch_lawa/" not in ended.stderr or "in main\n    def main(" in ended.stderr
            early &= ended.count == 0
            if not early:
                self._check(ended, Fault("signal", number=number), COMPLETE)
        except BaseException as error:
            error.add_note(f"{self.writer.name}: {number} after {seconds} s: {ended}")
            raise

    def _check(self, ended: Ended, fault: Fault, system: System) -> None:
        happened = bool(ended.where)
        if "skipped, because it is not readable" in ended.stdout:  # a forbidden input of a watch
            assert (ended.code, fault.number) == (0, errno.EACCES)
            return
        found = tree(self.root)
        states = {target: self.state(found, target) for target in self.writer.targets}
        assert ended.code is not None, "hangs"
        # Python drops a Ctrl-C that arrives while it collects garbage, and says so.
        dropped = fault.action == "signal" and ended.stderr.startswith("Exception ignored in")
        assert "Traceback" not in ended.stderr or dropped
        left = {path for path in self.others(found) if ".partial" in path}
        if fault.action == "kill":
            assert ended.killed == happened
        elif fault.action == "signal":
            # Between the end of our handlers and that of the process, the work is done.
            late = ended.code == -fault.number and set(states.values()) == {"new"}
            assert ended.code in self.writer.stopped or late
            assert not left, left
        elif fault.action == "short":
            assert ended.code == 0
        else:
            assert ended.code in (0, 1)
            # Once the result is published, older files that cannot be removed are a warning.
            lasting = fault.action == "fail from then on"
            lasting &= fault.number != errno.ENOSPC or ended.code == 0
            may_stay = lasting or ended.where.partition(" ")[0] in REMOVALS
            may_stay |= "missing" in states.values()  # there, to be put back
            assert not left or may_stay, left
        if ended.code == 1:
            self.check_message(ended.stderr)
        elif ended.code == 0 and (fault.action != "signal" or 0 not in self.writer.stopped[:1]):
            assert set(states.values()) <= {"new"}, states
        unseparable = not system.rename_flags and fault.action in ("kill", "fail from then on")
        assert "missing" not in states.values() or unseparable, states
        for path, content in self.others(found).items():
            if not LEFTOVER.search(path):
                assert self.after.get(path, b"") == content, path
        for path in self.others(self.before):
            assert path in found, path
        again = self.succeed(f"{self.writer.look}\n{self.writer.again or self.writer.code}", system)
        if self.writer.look:
            confirmed = [int(line) for line in ended.stdout.split()]
            assert int(again.stdout.split()[0]) >= max(confirmed, default=0)
        found = tree(self.root)
        assert self.outside_private(found) == self.outside_private(self.finally_)
        whole = [self.private_names(each) for each in (self.after, self.finally_)]
        assert self.private_names(found) in whole

    def state(self, found: Tree, target: str) -> str:
        """Whether it is the old one or the new one."""
        part = self.part(found, target)
        if part == self.part(self.after, target):
            return "new"
        if part == self.part(self.before, target):
            return "old"
        assert not part, (target, sorted(part))
        return "missing"

    def part(self, found: Tree, path: str) -> Tree:
        return {p: v for p, v in found.items() if p == path or p.startswith(f"{path}/")}

    def others(self, found: Tree) -> Tree:
        """What is no result."""
        ours = (*self.writer.targets, *self.writer.private)
        return {p: v for p, v in found.items() if not any(self.part({p: v}, o) for o in ours)}

    def outside_private(self, found: Tree) -> Tree:
        ours = self.writer.private
        return {p: v for p, v in found.items() if not any(self.part({p: v}, o) for o in ours)}

    def private_names(self, found: Tree) -> Counter[str]:
        """Names of files with their numbers left out."""
        parts = [p for path in self.writer.private for p in self.part(found, path)]
        return Counter(re.sub(r"\d+", "#", path) for path in parts)

    def check_message(self, stderr: str) -> None:
        """One line that names a file."""
        lines = [line for line in stderr.splitlines() if line.startswith("Error: ")]
        assert lines == stderr.splitlines()[-1:], stderr
        names = [str(self.root), *(path.split("/")[0] for path in {**self.before, **self.after})]
        assert any(name in lines[0] for name in names), stderr


@pytest.mark.parametrize("name", NAMES)
def test_faults_at_calls(
    name: str,
    server: FaultServer,
    campaign: Campaign,
    trials: Callable[[str, int], None],
    tmp_path: Path,
) -> None:
    made = Trials(WRITERS[name], server, tmp_path)
    chance, kinds = random.Random(f"{name} {campaign.seed}"), Counter[str]()
    for kind, fault, system in campaign.until_time_is_up(made.all_faults(chance)):
        made.check(fault, system)
        kinds[kind if system is COMPLETE else f"{kind}, {system.name}"] += 1
    for kind, number in kinds.items():
        trials(kind, number)


@LONG
def test_the_faults_happen(server: FaultServer, tmp_path: Path) -> None:
    """The mean without a fault, and that a writer in two steps would be found."""
    made = Trials(WRITERS["average over a file"], server, tmp_path)
    mean = (tensors(2)["a.weight"].double() + tensors(3)["a.weight"].double()) / 2
    assert torch.equal(load_file(made.root / "out.safetensors")["a.weight"], mean.float())
    seen = set()
    for at in range(made.count(False, COMPLETE)):
        made.renew()
        ended = server.run(Program(made.writer.code, made.root, Fault("kill", at)))
        assert ended.killed
        seen.add(ended.where.split(" ")[0])
    assert {"create", "write", "fallocate", "fsync", "mkdir", "rename", "unlink", "rmdir"} <= seen
    careless = replace(
        made.writer,
        code="open('out.safetensors', 'wb').write(b'x'); open('new', 'wb').write(b'x')",
    )
    other = tmp_path / "other"
    other.mkdir()
    broken = Trials(careless, server, other)
    with pytest.raises(AssertionError):
        for at in range(5):
            broken.check(Fault("kill", at), COMPLETE)


@LONG
@pytest.mark.parametrize("name", ["average over a folder", "sweep", "watch", "disk store"])
def test_signals_at_any_moment(
    name: str,
    server: FaultServer,
    campaign: Campaign,
    trials: Callable[[str, int], None],
    tmp_path: Path,
) -> None:
    """Also between two calls, and twice as long as the writer needs."""
    made = Trials(WRITERS[name], server, tmp_path)
    began = time.monotonic()
    made.renew()
    made.succeed(made.writer.code)
    seconds, chance = time.monotonic() - began, random.Random(f"{name} {campaign.seed}")
    for _ in campaign.until_time_is_up(itertools.count()):
        made.check_signal(chance.choice(SIGNALS), chance.uniform(0, 2 * seconds))
    trials("signal at a random moment", campaign.trials)


_MEAN = lawa("average", "a", "-o", "out", "--last", 2, "--overwrite")
_OTHER = lawa("average", "b", "-o", "out", "--last", 2, "--overwrite")


def test_two_containers_write_one_result(
    server: FaultServer, campaign: Campaign, trials: Callable[[str, int], None], tmp_path: Path
) -> None:
    """Both are process 1: each result is one of the two means, whoever is killed."""
    root = tmp_path / "volume"
    for run, steps in (("a", (1, 2)), ("b", (3, 4))):
        for step in steps:
            path = root / run / f"checkpoint-{step}"
            path.mkdir(parents=True)
            save_file(tensors(step), path / "model.safetensors")
    probe = server.run(Program("pass", root, container=True))
    if probe.code != 0:
        pytest.skip(f"no PID namespaces here: {probe.stderr[-200:]}")
    inputs, means, chance = tree(root), [], random.Random(campaign.seed)
    for code in (_MEAN, _OTHER):
        assert server.run(Program(code, root)).code == 0
        means.append(tree(root / "out"))
    assert means[0] != means[1]
    for _ in campaign.until_time_is_up(itertools.count()):
        system = chance.choice(SYSTEMS)
        faults = [Fault("kill", chance.randrange(60)) if chance.random() < 0.5 else Fault()
                  for _ in range(2)]  # fmt: skip
        programs = [
            Program(code, root, fault, system, container=True)
            for code, fault in zip((_MEAN, _OTHER), faults, strict=True)
        ]
        ended = server.run_all(programs)
        where = [str(each) for each in (*faults, system, *ended)]
        for each in ended:
            assert each.killed == bool(each.where), where
            assert each.killed or each.code == 0, where
        assert (root / "out").exists() or not system.rename_flags, where
        assert not (root / "out").exists() or tree(root / "out") in means, where
        assert server.run(Program(_OTHER, root, system=system)).code == 0, where
        assert tree(root) == {**inputs, "out": None, **_below("out", means[1])}, where
    trials("two containers", campaign.trials)


def _below(folder: str, found: Tree) -> Tree:
    return {f"{folder}/{path}": content for path, content in found.items()}


@LONG
def test_two_containers_share_a_store(
    server: FaultServer, campaign: Campaign, trials: Callable[[str, int], None], tmp_path: Path
) -> None:
    """One of them is refused; the window is always whole."""
    made = Trials(WRITERS["disk store"], server, tmp_path)
    if server.run(Program("pass", made.root, container=True)).code != 0:
        pytest.skip("no PID namespaces here")
    chance = random.Random(campaign.seed)
    for _ in campaign.until_time_is_up(itertools.count()):
        made.renew()
        faults = [Fault("kill", chance.randrange(60)) if chance.random() < 0.5 else Fault()
                  for _ in range(2)]  # fmt: skip
        ended = server.run_all(
            [Program(made.writer.code, made.root, fault, container=True) for fault in faults]
        )
        for each in ended:
            # Busy; or, when the other one has ended, behind what it has collected.
            refused = each.code == 1 and re.search("another averager|not after step", each.stderr)
            assert each.killed or each.code == 0 or refused, ended
        again = made.succeed(f"{made.writer.look}\n{made.writer.again}")
        confirmed = [int(line) for each in ended for line in each.stdout.split()]
        assert int(again.stdout.split()[0]) >= max(confirmed, default=0), ended
        assert made.private_names(tree(made.root)) == made.private_names(made.finally_), ended
    trials("two containers with one store", campaign.trials)
