"""Samples of published versions: shared steps change no bit, and training none."""

import collections
import dataclasses

import jax
import numpy as np
import pytest

from jaxlora import Datum
from jaxlora.config.session_config import SamplingConfig, SessionConfig
from jaxlora.errors import ConfigError, DeviceError, StorageError
from jaxlora.generate.batch import Batch
from jaxlora.plan.memory.device_memory import DeviceMemory
from jaxlora.session.engine import Engine
from jaxlora.session.published import _copy
from jaxlora.session.samples import SampleCall, SampleResult, Samples
from jaxlora.session.session import Session
from tests.jaxlora.session.conftest import LINEARS, SETTINGS, scaled
from tests.jaxlora.session.test_engine import RATE, assert_same, state
from tests.jaxlora.session.test_losses import datums

CONFIG = SamplingConfig(versions=2, rows=6, cache_tokens=3072, part_tokens=64)


def call(version: str = "a1", prompt=(3, 4, 5), **options) -> SampleCall:
    options = {"max_tokens": 6, "seed": 7, "stop_tokens": ()} | options
    return SampleCall(version=version, prompt=tuple(prompt), **options)


def drawn(samples: Samples, *calls: SampleCall) -> list[SampleResult]:
    """The results of calls that are made together."""
    found: dict[int, SampleResult] = {}

    def refuse(error: Exception) -> None:
        raise error

    for number, one in enumerate(calls):
        submit = lambda result, number=number: found.update({number: result})
        samples.submit(one, submit, refuse)
    while samples.advance():
        pass
    assert not samples._asked
    return [found[number] for number in range(len(calls))]


def tokens(result: SampleResult) -> list[tuple[int, ...]]:
    return [one.tokens for one in result.completions]


@pytest.fixture
def published(tiny_model, make_adapter):
    """Makes a session with two adapters, and samples of a version of each."""

    def make(config: SamplingConfig = CONFIG):
        session = Session(tiny_model, **SETTINGS)
        samples = Samples(session._engine, config)
        for seed, name in enumerate("ab"):
            adapter = scaled(make_adapter(LINEARS, rank=4 + 2 * seed, seed=seed))
            one = session._engine.open(name, adapter)
            samples.published.publish(f"{name}1", one)
        return session, samples

    return make


CALLS = (
    call("a1", num_samples=3),
    call("b1", temperature=0.0),
    call("base", (9, 8), temperature=1.5, top_p=0.9, max_tokens=40),
    call("b1", top_k=5, seed=2**40 + 1),
    call("a1", num_samples=2, prompt_logprobs=True, topk_prompt_logprobs=3),
    call("a1", range(2, 90), max_tokens=20),
    call("b1", [6, 7] * 50, seed=3),
    call("a1", stop_texts=("a", "e"), max_tokens=60, stop_tokens=None),
    call("b1", max_tokens=0, topk_prompt_logprobs=2, num_samples=2),
)


def test_calls_together_give_the_bits_of_each_alone(published):
    """Of all versions and lengths, and more than there are rows."""
    _, samples = published()
    samples.prepare()
    (short,) = samples._prepared
    drawn(samples, CALLS[0])
    assert [*samples._prepared] == [short]  # it needs no other programs
    alone = [drawn(samples, one)[0] for one in CALLS]
    for order in (CALLS, CALLS[::-1]):
        together = drawn(samples, *order)
        for one, found in zip(order, together, strict=True):
            wanted = alone[CALLS.index(one)]
            assert dataclasses.astuple(found) == dataclasses.astuple(wanted)
    assert len({str(tokens(one)) for one in alone[:4]}) == 4
    assert len(set(tokens(alone[0]))) == 3
    assert [len(one) for one in tokens(alone[2])] == [40]
    assert tokens(alone[8]) == [(), ()]
    assert tokens(alone[4]) == tokens(alone[0])[:2]  # scoring changes no sample


def test_the_first_adapter_that_is_published_compiles_nothing(tiny_model, make_adapter):
    """It would hold up all training; it was compiled when the server started."""
    session = Session(tiny_model, **SETTINGS)
    # No other test has tables of this size.
    samples = Samples(session._engine, CONFIG.replace(versions=5))
    compiled = _copy._cache_size()
    one = session._engine.open("a", make_adapter(LINEARS, rank=4, seed=0))
    samples.published.publish("a1", one)
    assert _copy._cache_size() == compiled


def test_log_probabilities_are_those_of_the_trainer(published):
    """Of sampled tokens before temperature, of the prompt, and of the likely tokens."""
    session, samples = published()
    one = call("b1", (3, 4, 5, 9, 2), temperature=0.7, top_p=0.8, max_tokens=12)
    one = dataclasses.replace(one, prompt_logprobs=True, topk_prompt_logprobs=4)
    (result,) = drawn(samples, one)
    (made,) = result.completions
    whole = [*one.prompt, *made.tokens]
    data = [Datum(tokens=whole[:-1], target_tokens=whole[1:])]
    tops = result.topk_prompt_logprobs
    assert tops is not None and tops[0] is None and len(tops) == len(one.prompt)
    for rank in range(4):
        likely = [top[rank][0] for top in tops[1:]]
        data.append(Datum(tokens=one.prompt[:-1], target_tokens=likely))
    found = session.forward("b", data).result().logprobs
    assert result.prompt_logprobs[0] is None
    ours = [*result.prompt_logprobs[1:], *made.logprobs]
    np.testing.assert_allclose(found[0], ours, rtol=1e-4, atol=3e-6)
    for rank in range(4):
        ours = [top[rank][1] for top in tops[1:]]
        np.testing.assert_allclose(found[1 + rank], ours, rtol=1e-4)
        assert rank == 0 or all(top[rank - 1][1] >= top[rank][1] for top in tops[1:])


def test_prompts_that_are_scored_twice_generate_nothing(published, monkeypatch):
    """A turn of no tokens would count as a part of prompts that takes no time."""
    _, samples = published()
    queue, parts = Batch.queue, []

    def noted(batch, *given):
        parts.append(batch.runs_prompts)
        return queue(batch, *given)

    monkeypatch.setattr(Batch, "queue", noted)
    one = call("b1", range(3, 80), max_tokens=0, prompt_logprobs=True)
    first, second = drawn(samples, one, dataclasses.replace(one))
    assert parts == [True] * 2
    assert first.prompt_logprobs == second.prompt_logprobs


def test_a_version_stays_as_it_was_and_changes_no_training(published):
    session, samples = published()
    other, _ = published()
    data, before = datums(np.random.default_rng(0)), drawn(samples, *CALLS[:2])
    for one in (session, other):
        for _ in range(2):
            one.forward_backward("a", data)
            if one is session:
                drawn(samples, CALLS[0])
            one.optim_step("a", RATE).result()
    assert_same(state(session, "a"), state(other, "a"))
    samples.published.publish("a2", session._engine.adapters["a"])
    after = drawn(samples, *CALLS[:2], call("a2", num_samples=3))
    assert [tokens(one) for one in after[:2]] == [tokens(one) for one in before]
    assert tokens(after[2]) != tokens(after[0])


def test_more_versions_than_slots(published, tmp_path):
    """The least recently used lie in files, and those of folders are the same."""
    session, samples = published()
    before = drawn(samples, call("a1"), call("b1"))
    session.save("a", tmp_path / "a")
    samples.published.open_folder("saved", tmp_path / "a")
    for seed in range(2):
        session.add_adapter(f"c{seed}", seed=seed)
        one = session._engine.adapters[f"c{seed}"]
        samples.published.publish(f"c{seed}", one)
    names = ("saved", "a1", "c1", "b1", "c0", "base")
    after = drawn(samples, *map(call, names))
    assert tokens(after[1]) == tokens(after[0]) == tokens(before[0])
    assert tokens(after[3]) == tokens(before[1])
    assert tokens(after[2]) == tokens(after[4]) == tokens(after[5])  # they are new
    folder = samples.published._folder
    assert folder is not None and len(list(folder.iterdir())) >= 3
    for name in ("saved", "a1", "b1", "c0", "c1"):
        samples.published.release(name)
    assert not list(folder.iterdir())
    with pytest.raises(ConfigError, match="no published version 'a1'"):
        drawn(samples, call("a1"))


def test_the_oldest_versions_end(published):
    """Unless a call needs them."""
    session, samples = published(CONFIG.replace(file_versions=2))
    one, found = session._engine.adapters["a"], []
    samples.submit(call("a1", max_tokens=2), found.append, found.append)
    for number in range(6):
        samples.published.publish(f"v{number}", one)
    while samples.advance():
        pass
    assert tokens(found[0])[0] and samples.published.knows("a1")
    known = [number for number in range(6) if samples.published.knows(f"v{number}")]
    assert known[-3:] == [3, 4, 5] and len(known) <= 4
    assert not samples.published.knows("b1")


def test_versions_come_and_go_while_samples_are_drawn(published):
    session, samples = published(CONFIG.replace(versions=3))
    one, found = call("a1", max_tokens=90), []
    (wanted,) = drawn(samples, one)
    samples.submit(one, found.append, found.append)
    for number in range(3):
        samples.advance()
        name = f"new{number}"
        samples.published.publish(name, session._engine.adapters["b"])
    while samples.advance():
        pass
    assert tokens(found[0]) == tokens(wanted)


def test_an_error_of_the_device_ends_calls_and_no_version(published, monkeypatch):
    """Versions that are lost with the slots come from their files."""
    session, samples = published()
    (wanted,) = drawn(samples, call("a1"))
    one = session._engine.adapters["a"]
    samples.published.publish("a2", one)  # the first one, b1, is in a file now

    def fails(*args):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")

    found = []
    with monkeypatch.context() as patch:
        patch.setattr(Batch, "queue", fails)
        samples.submit(call("a1"), found.append, found.append)
        while samples.advance():
            pass
    assert isinstance(found[0], DeviceError) and "lower cache_tokens" in str(found[0])
    assert tokens(drawn(samples, call("a1"))[0]) == tokens(wanted)
    for table in samples.published._tables.values():
        table.delete()
    samples.renew(session._engine)
    drawn(samples, call("b1"))
    for name in ("a1", "a2"):
        with pytest.raises(ConfigError, match="no published version"):
            drawn(samples, call(name))


def test_a_disk_that_is_full_ends_what_needs_it_alone(published, monkeypatch):
    session, samples = published()
    (wanted,) = drawn(samples, call("b1"))
    samples.published.publish("a2", session._engine.adapters["a"])  # a1 is in a file

    def full(*_):
        raise OSError("No space left on device")

    found = []
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.numpy.save_file", full)
        with pytest.raises(StorageError, match="Free space there"):
            samples.published.publish("a3", session._engine.adapters["a"])
        assert not samples.published.knows("a3")
        for name in ("a1", "b1"):  # b1 or a2 would have to leave for a1
            samples.submit(call(name), found.append, found.append)
        while samples.advance():
            pass
    assert isinstance(found[0], StorageError) and tokens(found[1]) == tokens(wanted)
    assert not samples._asked and len(drawn(samples, call("a1"), call("a2"))) == 2


def test_a_release_waits_for_the_calls_that_need_the_version(published):
    _, samples = published()
    (wanted,) = drawn(samples, call("a1"))
    found = []
    samples.submit(call("a1"), found.append, found.append)
    samples.published.release("a1")
    while samples.advance():
        pass
    assert tokens(found[0]) == tokens(wanted)
    assert samples.published._slots[0] is None


def test_a_version_that_diverged_does_not_reach_those_after_it(published):
    session, samples = published()
    wanted = [tokens(one) for one in drawn(samples, *CALLS[1:3])]
    table = session._engine.table
    weights = jax.tree.map(lambda x: x * np.nan, table.state.params)
    table.state = dataclasses.replace(table.state, params=weights)
    samples.published.release("a1")
    samples.published.publish("a1", session._engine.adapters["a"])
    drawn(samples, *[call("a1", [5] * 90, seed=i, max_tokens=30) for i in range(6)])
    found = drawn(samples, *CALLS[1:3], call("a1", max_tokens=40))
    assert [tokens(one) for one in found[:2]] == wanted


def test_the_cache_bounds_how_many_run(published):
    """Rows of other lengths wait until there is memory, and none waits forever."""
    _, samples = published(CONFIG.replace(cache_tokens=1536))
    lengths = ([4] * 9, [4] * 150, [5] * 8, [5] * 400)
    calls = [call("a1", prompt, num_samples=3) for prompt in lengths]
    alone = [drawn(samples, one)[0] for one in calls]
    assert list(map(tokens, drawn(samples, *calls))) == list(map(tokens, alone))
    assert [*samples._lanes] == [512]  # 2 rows; 6 rows of 128 had to make room
    _, small = published(CONFIG.replace(cache_tokens=600))
    with pytest.raises(ConfigError, match="2 rows of 512, and it has cache_tokens=600"):
        drawn(small, call(max_tokens=130))


def test_the_cache_is_as_large_as_there_is_memory_for(published, tiny_model):
    _, samples = published(CONFIG.replace(cache_tokens="auto"))
    assert samples._cache_size == 65536
    engine = Engine(tiny_model, SessionConfig(**SETTINGS))
    need = engine.memory_estimate
    of_token = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, features, bytes
    for tokens, auto in ((10_000, 6912), (300, None)):
        room = need.total_bytes + samples.published.num_bytes + tokens * of_token
        memory = DeviceMemory(num_bytes=room, source="a test")
        engine.memory_estimate = dataclasses.replace(need, available=memory)
        if auto is not None:
            made = Samples(engine, CONFIG.replace(cache_tokens="auto"))
            assert made._cache_size == auto
        else:
            with pytest.raises(ConfigError, match="at least 256 tokens of them"):
                Samples(engine, CONFIG.replace(cache_tokens="auto"))
        with pytest.raises(ConfigError, match="caches of 10240 tokens"):
            Samples(engine, CONFIG.replace(cache_tokens=10240))


def test_a_tenant_with_many_samples_does_not_hold_up_others(published):
    _, samples = published()
    order = []
    for tenant, num in (("greedy", 40), ("small", 2)):
        one = call(num_samples=num, tenant=tenant)
        samples.submit(one, lambda _, tenant=tenant: order.append(tenant), order.append)
    while samples.advance():
        pass
    assert order == ["small", "greedy"]


def test_a_call_that_is_cancelled_frees_its_rows(published):
    _, samples = published()
    found, long = [], call(num_samples=9, max_tokens=200)
    samples.submit(long, found.append, found.append)
    for _ in range(4):
        samples.advance()
    samples.cancel(long)
    (after,) = drawn(samples, call("b1"))
    assert not found and len(after.completions) == 1
    assert all(not lane.running for lane in samples._lanes.values())
    assert not any(v.num_pinned for v in samples.published._versions.values())


def test_rows_are_shared_by_weight(published):
    session, samples = published()
    session._engine.queue.weigh("heavy", 2.0)
    for tenant in ("light", "heavy"):
        one = call(num_samples=20, tenant=tenant)
        samples.submit(one, lambda _: None, lambda _: None)
    samples.advance()
    (lane,) = samples._lanes.values()
    running = [asked.call.tenant for asked, _ in lane.running]
    assert (running.count("heavy"), running.count("light")) == (4, 2)


def test_what_others_cancel_or_fail_at_changes_no_sample(published):
    session, samples = published()
    samples.published.publish("lost", session._engine.adapters["b"])
    for version in ("a1", "b1"):
        drawn(samples, call(version))  # for which "lost" goes to a file
    samples.published.version("lost").file.write_bytes(b"damaged")
    wanted = [drawn(samples, one)[0] for one in CALLS[:4]]
    found, errors, others = {}, [], []
    for number, one in enumerate(CALLS[:4]):
        late = call(one.version, range(2, 70), num_samples=3, max_tokens=90, seed=1)
        scored = call("b1", range(3, 200), max_tokens=0, prompt_logprobs=True)
        others += [dataclasses.replace(x, tenant="other") for x in (late, scored)]
        for other in (*others[-2:], call("lost", tenant="other")):
            samples.submit(other, lambda _: None, errors.append)
        note = lambda result, number=number: found.update({number: result})
        samples.submit(dataclasses.replace(one, tenant="own"), note, errors.append)
    while others:
        samples.advance()
        samples.cancel(others.pop(len(others) // 2))
    while samples.advance():
        pass
    assert len(errors) == 4 and all(isinstance(one, StorageError) for one in errors)
    for number, one in enumerate(wanted):
        assert dataclasses.astuple(found[number]) == dataclasses.astuple(one)


def test_calls_that_wait_cost_no_time_of_the_engine(published, monkeypatch):
    """However many there are, only the first of each line is looked at."""
    _, samples = published()
    drawn(samples, call())  # the programs are there from then on
    long = {"num_samples": 2, "max_tokens": 100}  # no row is free again meanwhile
    calls = [call(tenant=str(number % 2), **long) for number in range(600)]
    for one in calls:
        samples.submit(one, lambda _: None, lambda _: None)
    looks, may_begin = [], samples._may_begin
    looked = lambda *given: looks.append(1) or may_begin(*given)
    monkeypatch.setattr(samples, "_may_begin", looked)
    for _ in range(3):
        samples.advance()
    assert 6 <= len(looks) <= 6 + 3 * 2
    for one in calls:
        samples.cancel(one)
    assert not (samples._asked or samples._waiting)


class OneRate:
    """Tokens a second of a tenant who has used them, and others who have not."""

    def __init__(self):
        self.limited, self.spent = {"slow"}, collections.Counter()

    def may_run(self, tenant: str) -> bool:
        return tenant not in self.limited

    def spend(self, tenant: str, tokens: int) -> None:
        self.spent[tenant] += tokens


def test_tokens_of_samples_count_for_the_rate_of_their_tenant(published, monkeypatch):
    _, samples = published()
    monkeypatch.setattr("time.sleep", lambda _: None)
    rates = samples._rates = OneRate()
    found = []
    for tenant in ("slow", "fast"):
        one = call(num_samples=2, tenant=tenant)
        samples.submit(one, lambda _, t=tenant: found.append(t), found.append)
    while "fast" not in found:
        samples.advance()
    for _ in range(3):
        assert samples.advance()  # there is something left to do
    assert rates.spent == {"fast": 3 + 2 * 6} and found == ["fast"]
    rates.limited.clear()
    while samples.advance():
        pass
    assert found == ["fast", "slow"] and rates.spent["slow"] == 3 + 2 * 6


@pytest.mark.parametrize("tenant", ["other", "own"])
def test_a_stream_of_scored_prompts_takes_half_of_the_time(
    published, monkeypatch, tenant
):
    """Whoever sends it, by a clock of the test: a part 0.05 s, and a token 0.02 s."""
    _, samples = published()
    now, spent, queue = [0.0], {"prompts": 0.0, "tokens": 0.0}, Batch.queue

    def runs(*given):
        steps = queue(*given)
        seconds = 0.02 * steps or 0.05
        now[0] += seconds
        spent["tokens" if steps else "prompts"] += seconds
        return steps

    def score(*_):
        samples.submit(call("b1", prompt, **scored), score, score)

    prompt, found = range(3, 100), []
    scored = {"max_tokens": 0, "prompt_logprobs": True, "tenant": tenant}
    monkeypatch.setattr(Batch, "queue", runs)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    one = call(max_tokens=120, tenant="own")
    # The programs are there from then on.
    drawn(samples, dataclasses.replace(one), call("b1", prompt, **scored))
    spent |= {"prompts": 0.0, "tokens": 0.0}
    samples.submit(one, found.append, found.append)
    samples.advance()
    for _ in range(8):
        score()
    for _ in range(200):
        samples.advance()
        if found:
            break
    assert len(found) == 1 and len(found[0].completions[0].tokens) == 120
    assert spent["prompts"] == pytest.approx(spent["tokens"], abs=0.4)


@pytest.mark.parametrize(("share", "where"), [(0.5, "settle"), (0.2, "queue")])
def test_training_and_sampling_have_their_shares(published, monkeypatch, share, where):
    """A microbatch takes 0.45 s by a clock of the test, and a few tokens 0.15 s.

    These pass when they are waited for, or when they are queued, as on a GPU.
    """
    _, samples = published(CONFIG.replace(share=share))
    now, spent = [0.0], {"train": 0.0, "sample": 0.0}
    run, found = getattr(Batch, where), []

    def work(what: str, seconds: float) -> None:
        now[0] += seconds
        spent[what] += seconds

    def runs(*args):
        work("sample", 0.15)
        return run(*args)

    def train() -> bool:
        if spent["train"] < 9:
            work("train", 0.45)
            return True
        return False

    monkeypatch.setattr(Batch, where, runs)
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    for seed in range(40):
        samples.submit(call(seed=seed, max_tokens=60), found.append, found.append)
    while spent["train"] < 8.9:
        assert samples.turn(train)
    assert spent["sample"] == pytest.approx(9 * share / (1 - share), abs=0.7)
    while samples.turn(train):
        pass
    assert len(found) == 40


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"version": "c"}, "no published version 'c'"),
        ({"prompt": ()}, "a list of one token id or more"),
        ({"prompt": (10**6,)}, "a list of one token id or more, each from 0 to"),
        ({"prompt": (1,) * 512}, "has 512 tokens, and the model has positions for 512"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"num_samples": 0}, "num_samples=0 must be 1 or more"),
        ({"max_tokens": -1}, "max_tokens=-1 must be 0 or more"),
        ({"topk_prompt_logprobs": 21}, "topk_prompt_logprobs=21 must be 0 to 20"),
    ],
)
def test_wrong_calls(published, options, error):
    _, samples = published()
    with pytest.raises(ConfigError, match=error):
        drawn(samples, dataclasses.replace(call(), **options))


def test_names_of_versions(published):
    session, samples = published()
    for name in ("a1", "base"):
        with pytest.raises(ConfigError, match=f"a version '{name}' already"):
            samples.published.publish(name, session._engine.adapters["a"])
