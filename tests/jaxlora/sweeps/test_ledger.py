"""The ledger of a sweep is checked when it is read: it may be damaged, or edited."""

import contextlib
import copy
import json
import random

import pytest

from jaxlora import LoraJob, Sweep
from jaxlora.common.atomic import make_folder
from jaxlora.config.sweep_config import ExitRule
from jaxlora.errors import CheckpointError, StorageError
from jaxlora.run.folder import SWEEP_LEDGER
from jaxlora.run.saved_run import checksum
from jaxlora.sweeps.engine.driver import Driver
from jaxlora.sweeps.engine.groups import Group, keep_adapter, remove_unused
from jaxlora.sweeps.engine.ledger import Ledger
from jaxlora.sweeps.engine.result import _logged, _trial
from jaxlora.sweeps.engine.run import check_same_sweep
from jaxlora.sweeps.engine.state import SweepState
from jaxlora.sweeps.engine.transport import Workers
from jaxlora.sweeps.files import remove_others
from jaxlora.sweeps.ranking import SweepReport
from tests.jaxlora.train.made_run import write_export

NAMES = "c0", "c1", "c2"
GIVEN = [LoraJob(name=n, data={"path": "x"}, eval_fraction=0.1) for n in NAMES]
JOBS = [job.model_dump(mode="json") for job in GIVEN]


class Idle(Workers):
    """Workers that never start."""

    def __init__(self): ...

    def start(self, group, folder):
        return False

    def send(self, group, messages): ...

    def receive(self, timeout):
        return []

    def kill(self, group): ...

    def close(self): ...


def ended(name: str, loss: float) -> dict:
    progress = {"status": "finished", "step": 4, "best_eval": loss, "num_tokens": 7}
    folder = f"adapters/{name}"
    return {"kind": "ended", "name": name, "progress": progress, "folder": folder}


def records() -> list[dict]:
    late = {**JOBS[0], "name": "late", "clone_of": {"job": "c2", "step": None}}
    facts = [{"name": name, "num_steps": 4, "rank": 16} for name in NAMES]
    plan = {"mesh": "fsdp=2", "num_slots": 2, "slot_rank": 8, "microbatch_tokens": 64}
    decided = {"cutoffs": [1.5], "stops": {"c1": ["halving", "place 2 of 3"]}}
    evaluations = [["c0", 1, 1.0, None], ["c1", 1, 2.0, 0.5], ["c2", 1, 1.5, None]]
    return [
        {"kind": "plan", "groups": [{**plan, "names": list(NAMES)}], "ranks": {"c0": 8},
         "seconds": 3.5},
        {"kind": "begin"},
        {"kind": "start", "group": 0, "folder": "groups/0-1"},
        {"kind": "start", "group": 1, "folder": "groups/1-1"},
        {"kind": "facts", "jobs": facts},
        {"kind": "given", "name": "c0", "group": 0},
        {"kind": "given", "name": "c1", "group": 0},
        {"kind": "given", "name": "c2", "group": 1},
        {"kind": "job", "settings": late, "place": None},
        {"kind": "facts", "jobs": [{**facts[0], "name": "late", "clone_step": 2}]},
        {"kind": "given", "name": "late", "group": 1},
        {"kind": "eval", "points": evaluations, **decided},
        {"kind": "decided", "cutoffs": [], "stops": {}},
        {"kind": "saved", "name": "c2", "folder": "groups/1-1"},
        {"kind": "moving", "name": "c2"},
        {"kind": "released", "name": "c2"},
        {"kind": "given", "name": "c2", "group": 0},
        {"kind": "held", "name": "c2", "reason": "later"},
        {"kind": "held", "name": "c2", "reason": None},
        {"kind": "asked_to_stop", "name": "c2", "reason": "enough"},
        ended("c0", 1.0),
        ended("c1", 2.0),
        {"kind": "lost", "group": 1, "reason": "it died"},
        ended("c2", 1.5),
    ]  # fmt: skip


def resume(folder) -> SweepReport:
    """Takes up a sweep, as `--resume` does, and removes the adapters not kept."""
    rules = [ExitRule(type="halving")]
    with contextlib.closing(Ledger(folder)) as ledger:
        state = SweepState(GIVEN, rules)
        check_same_sweep(state, ledger)
        groups = [Group(num_slots=1, run={"jobs": JOBS}) for _ in range(2)]
        Driver(folder, state, ledger, Idle(), groups)
    remove_unused(folder, state)
    found = list(state.configurations.values())
    trials = [_trial(folder, one) for one in found]
    report = SweepReport.of(Sweep(early_exit=rules, keep_others=False), trials, [])
    remove_others(report, folder)
    return report


@pytest.fixture
def sweep(tmp_path):
    """A sweep whose driver was killed, beside another run."""
    folder = tmp_path / "sweep"
    with contextlib.closing(Ledger(folder)) as ledger:
        check_same_sweep(SweepState(GIVEN, [ExitRule(type="halving")]), ledger)
        ledger.append(records())
    for name in (*NAMES, "late"):
        write_export(folder / "adapters" / name, name, 4)
    write_export(tmp_path / "other" / "adapters" / "c1", "c1", 4)
    return folder


def tree(folder) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def test_a_sweep_goes_on(sweep):
    report = resume(sweep)
    assert report.kept == ("c0",)
    # The copy has not ended, so its folder is no result yet.
    there = {path.name for path in (sweep / "adapters").iterdir()}
    assert there == {"c0", "late"}
    assert resume(sweep).kept == ("c0",)  # and again, from a ledger of two drivers


def places(value, path=()):
    """Yields the paths of all values within JSON values."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*path, key))


VALUES = [
    None, True, -1, 0, 2, 2**60, 10**400, 1.5, 1e308, float("nan"), "", "x", "c0", "c1",
    "halving", "sweep", "__class__", "../other/adapters/c1", "/tmp", "groups/0-1",
    "adapters/c0", [], ["c0"], {}, {"name": "c0"}, "\ud800", [[[[]]]],
]  # fmt: skip


def edit(lines: list[dict], rng: random.Random) -> None:
    """Changes values, keys or the order of records."""
    record = rng.choice(lines)
    *path, last = rng.choice(list(places(record)))
    inside = record
    for key in path:
        inside = inside[key]
    match rng.randrange(8):
        case 0 | 1 | 2:
            inside[last] = copy.deepcopy(rng.choice(VALUES))
        case 3:
            del inside[last]
        case 4 if isinstance(inside, dict):
            inside[rng.choice(["x", "name", "folder", "kind"])] = inside.pop(last)
        case 5:
            record["kind"] = rng.choice(["later", "values", "_leave", *kinds(lines)])
        case 6:
            lines.insert(rng.randrange(len(lines)), copy.deepcopy(record))
        case _:
            lines.insert(rng.randrange(len(lines)), lines.pop(lines.index(record)))


def kinds(lines: list[dict]) -> list[str]:
    return sorted({str(line.get("kind")) for line in lines})


def resealed(lines: list[dict]) -> str:
    """Returns the records as somebody would write who knows how they are sealed."""
    out, seal = "", ""
    for line in lines:
        record = {key: value for key, value in line.items() if key != "checksum"}
        with contextlib.suppress(ValueError):  # of numbers that are none
            seal = checksum([seal, record])
        out += json.dumps({**record, "checksum": seal}) + "\n"
    return out


def damage(text: str, rng: random.Random) -> str:
    """Cuts out, adds or changes characters."""
    start = rng.randrange(len(text) - 200)
    stop = start + rng.randrange(1, 60)
    return (
        text[:start]
        + rng.choice(["", "\n", "{}\n", "\0", "9", "[" * 300])
        + text[stop:]
    )


@pytest.mark.parametrize("how", ["values", "sealed", "characters"])
def test_edits_are_refused_and_touch_no_other_run(sweep, how):
    """Those who know the seal may write another sweep, but never break out of it."""
    ledger, parent = sweep / SWEEP_LEDGER, sweep.parent
    whole, other = ledger.read_text(), tree(parent / "other")
    own = tree(sweep)
    refused = 0
    for seed in range(120):
        rng = random.Random(f"{how} {seed}")
        lines = [json.loads(line) for line in whole.splitlines()]
        if how != "characters":
            edit(lines, rng)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        text = resealed(lines) if how == "sealed" else text
        text = damage(text, rng) if how == "characters" else text
        if text == whole:
            continue
        ledger.write_text(text)
        try:
            resume(sweep)
        except CheckpointError as error:
            refused += 1
            assert f"{ledger}, line " in str(error) or "begun" in str(error)
            assert "another output_dir" in str(error)
            assert tree(sweep) == own
        else:
            is_same = text.replace(" ", "") == whole.replace(" ", "")
            assert how == "sealed" or is_same, (seed, text)
        assert tree(parent / "other") == other
        for name in (*NAMES, "late"):
            if not (sweep / "adapters" / name).exists():
                write_export(sweep / "adapters" / name, name, 4)
    assert refused > 60


def test_a_line_that_a_kill_cut_short_is_dropped(sweep):
    whole = (sweep / SWEEP_LEDGER).read_bytes()
    for cut in (1, 30, len(whole.splitlines()[-1])):
        (sweep / SWEEP_LEDGER).write_bytes(whole[:-cut])
        with contextlib.closing(Ledger(sweep)) as ledger:
            assert len(ledger.records) == len(records())
        assert (sweep / SWEEP_LEDGER).read_bytes().endswith(b"\n")


@pytest.mark.parametrize(
    "event",
    [
        {"event": "window", "seconds": "1"},
        {"event": "window"},
        {"event": "window", "seconds": 1, "time": "now"},
        {"event": "step", "job": "a", "step": 1, "loss": 1.0},
        {"event": "step", "loss": 1.0, "num_tokens": 3},
        {"event": "job_end", "job": "other", "step": 1},
    ],
)
def test_logs_of_groups_are_checked(tmp_path, event):
    run = tmp_path / "groups" / "0-1"
    run.mkdir(parents=True)
    line = json.dumps({"round": 1, **event}) + "\n"
    (run / "metrics.jsonl").write_text(2 * line)
    with pytest.raises(CheckpointError, match=r"metrics.jsonl holds a .* without its"):
        list(_logged(run, {"a"}))


def test_links_lead_nothing_out_of_a_sweep(sweep, tmp_path):
    """Neither adapters nor checkpoints of another run are moved or removed."""
    other = tmp_path / "other"
    make_folder(other / "checkpoints" / "1")
    before = tree(other)
    (sweep / "groups").mkdir()
    (sweep / "groups" / "0-1").symlink_to(other)
    state = SweepState(GIVEN, [])
    remove_unused(sweep, state)
    with pytest.raises(StorageError, match="a link leads out of the folder"):
        keep_adapter(sweep, "c1", sweep / "groups" / "0-1" / "adapters" / "c1")
    assert tree(other) == before
    own = write_export(sweep / "groups" / "1-1" / "adapters" / "c1", "c1", 4)
    (sweep / "adapters").rename(tmp_path / "moved")
    (sweep / "adapters").symlink_to(other / "adapters")
    with pytest.raises(StorageError, match="a link leads out of the folder"):
        keep_adapter(sweep, "c1", own)
    assert tree(other) == before
