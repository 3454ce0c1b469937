"""The cases of `python -m scripts.bench http`: each yields its rows."""

import asyncio
import io
import itertools
import tarfile
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import safetensors.numpy

from jaxlora.errors import JaxloraError
from scripts.bench.http.client import Event, Fields, Tenant
from scripts.bench.http.load import Columns, Load, quantiles, server_columns, timed
from scripts.bench.serve import HEAVY, LONE_TOKENS

_SMALL = "GET", "/api/v1/get_server_capabilities"
_PROMPTS, _SAMPLES, _PROMPT_TOKENS = 16, 4, 100
_FIXED_STEPS = 6  # of the sequence whose bits are compared
_LOOK_SECONDS = 0.02
Tensors = dict[str, np.ndarray]


async def life(load: Load) -> AsyncIterator[Columns]:
    """Times what happens to one model, on an idle server."""
    tenant, rank = await load.tenant("t0"), load.case.rank
    create = lambda number: tenant.create_model(rank, number, 1 + number)
    yield await timed("create a model", create)
    await tenant.train(next(load.batches(0)))
    yield await timed("publish", lambda _: tenant.publish())

    async def fresh(_: int) -> None:
        await tenant.sample(await tenant.publish(), 1, [3] * 64, 1)

    yield await timed("publish, and a first token", fresh)

    async def by_name(number: int) -> None:
        await tenant.publish(f"named{number}")

    yield await timed("publish by name", by_name, 3)

    async def save(number: int) -> None:
        await tenant.result(await tenant.operation("save_weights", path=f"s{number}"))

    yield await timed("save the state", save, 3)


async def lone(load: Load) -> AsyncIterator[Columns]:
    """Times small requests on an idle server."""
    tenant, rng = await load.tenant("t0"), np.random.default_rng(1)
    alone = min(LONE_TOKENS, load.case.sizes[0])

    async def train(_: int) -> None:
        load.events.append(await tenant.train(load.data(rng, [alone])))

    first = await load.seen()
    found = await timed(f"lone request of {alone} tokens", train, 20)
    window = first, await load.seen()
    yield found | {"outside_ms": load.columns(window)["outside_ms"]}
    yield await timed("small request", lambda _: tenant.send(*_SMALL), 200)


async def closed(load: Load) -> AsyncIterator[Columns]:
    """Loads the server by tenants that wait for each step."""
    for place, number in enumerate(load.args.tenants):
        await load.tenants(number)
        seconds = load.args.seconds if place else load.args.first_seconds
        loops = (load.training(i) for i in range(number))
        async with load.running(load.small_requests(), *loops):
            window = await load.window(seconds, warm_up=_warm_up(load, number))
        found = load.columns(window)
        load.capacity = load.capacity or found["tokens_per_second"]
        row = {"row": f"closed: {number} tenants"}
        yield row | found | load.server.memory()


def _warm_up(load: Load, number: int) -> float:
    """Returns the seconds in which the adapters come, and leave, for the first time."""
    seconds = load.args.seconds
    return 3 + seconds / 8 + number / 3 if seconds > 5 else 0.0


async def arriving(load: Load) -> AsyncIterator[Columns]:
    """Sends batches at half of the speed of the closed loop."""
    if not load.capacity:
        raise JaxloraError("the case open needs the speed of closed. Name both.")
    case, number = load.case, load.args.tenants[0]
    rate = load.capacity / 2 / (case.samples * case.mean_tokens)
    loops = load.small_requests(), load.arrivals(number, rate)
    async with load.running(*loops):
        window = await load.window(load.args.seconds, warm_up=2.0)
    yield {"row": "open: half of the speed"} | load.columns(window)


async def heavy(load: Load) -> AsyncIterator[Columns]:
    """Loads the server as `closed`, one tenant with many times the load."""
    number = load.args.tenants[0]
    await load.tenants(number)
    loops = (load.training(i, 1 if i else HEAVY) for i in range(number))
    load.leaves = True
    async with load.running(load.small_requests(), *loops):
        warm_up = _warm_up(load, number)
        window = await load.window(load.args.seconds, warm_up=warm_up)
    row = {"row": f"heavy: {number} tenants, one of {HEAVY} times the load"}
    yield row | load.columns(window, without=("t0",)) | load.server.memory()


# ---- samples -------------------------------------------------------------------------


async def sample(load: Load) -> AsyncIterator[Columns]:
    """Draws samples of adapters, and asks the base in chats."""
    tenants = await load.tenants(min(8, load.args.tenants[0]))
    samplers = [await tenant.publish() for tenant in tenants]
    tokens, numbers = load.args.sample_tokens, itertools.count(1)
    rng = np.random.default_rng(9)

    async def ask_adapter(i: int) -> Event:
        prompt = rng.integers(3, load.vocab_size, _PROMPT_TOKENS).tolist()
        number = i % len(tenants)
        asked = samplers[number], next(numbers), prompt, tokens
        return (await tenants[number].sample(*asked))[0]

    async def ask_base(i: int) -> Event:
        text = "".join(rng.choice([*"abcdefgh "], _PROMPT_TOKENS))
        return await tenants[i % len(tenants)].chat(text, tokens)

    for name, ask in (("sample", ask_adapter), ("chat", ask_base)):
        began = time.monotonic()
        await ask(0)  # programs may be compiled
        first = round(time.monotonic() - began, 2)
        for number in (1, 16, 64):
            before = await load.seen()
            events = await asyncio.gather(*(ask(i) for i in range(number)))
            window = before, await load.seen()
            seconds = max(e.ended for e in events) - before.at
            drawn = sum(e.num_tokens for e in events)
            yield {
                "row": f"{name}: {number} at a time",
                "sampled_per_second": round(drawn / seconds),
                **quantiles([e.seconds for e in events]),
                "first_s": first,
                **server_columns(window),
            }


async def reinforced(load: Load) -> AsyncIterator[Columns]:
    """Trains beside reinforcement learning, and without."""
    number = min(3, load.args.tenants[0])
    await load.tenants(number)
    learner = await load.tenant("rl")
    await _round(load, learner, 0)  # programs may be compiled
    loops = lambda: (load.training(i) for i in range(number))
    async with load.running(load.small_requests(), *loops()):
        window = await load.window(load.args.seconds, warm_up=3.0)
    yield {"row": f"rl: {number} tenants train, alone"} | load.columns(window)
    async with load.running(load.small_requests(), *loops()):
        await asyncio.sleep(2.0)
        before = await load.seen()
        rounds = [await _round(load, learner, 1 + i) for i in range(load.args.rounds)]
        window = before, await load.seen()
    row = {"row": f"rl: {number} tenants train, beside it"}
    yield row | load.columns(window, without=("rl",)) | _mean(rounds)
    alone = [await _round(load, learner, 100 + i) for i in range(2)]
    yield {"row": "rl: a round alone"} | _mean(alone)


def _mean(rounds: Sequence[Columns]) -> Columns:
    names = rounds[0]
    return {n: round(float(np.mean([one[n] for one in rounds])), 3) for n in names}


async def _round(load: Load, learner: Tenant, number: int) -> Columns:
    """Publishes, samples, and trains on the samples; returns the seconds."""
    rng, began = np.random.default_rng(number), time.monotonic()
    sampler, tokens = await learner.publish(), load.args.round_tokens
    published = time.monotonic()
    prompts = rng.integers(3, load.vocab_size, (_PROMPTS, _PROMPT_TOKENS)).tolist()
    found = await asyncio.gather(
        *(
            learner.sample(sampler, i, prompt, tokens, _SAMPLES)
            for i, prompt in enumerate(prompts, 1)
        )
    )
    sampled = time.monotonic()
    data = [
        _sampled_datum(prompt, sequence, float(rng.normal()))
        for prompt, (_, message) in zip(prompts, found, strict=True)
        for sequence in message.sequences
    ]
    load.events.append(await learner.train(data, "importance_sampling"))
    drawn = sum(event.num_tokens for event, _ in found)
    return {
        "publish_s": published - began,
        "sample_s": sampled - published,
        "train_s": time.monotonic() - sampled,
        "round_s": time.monotonic() - began,
        "sampled_per_second": drawn / (sampled - published),
    }


def _sampled_datum(prompt: Sequence[int], sequence: Any, advantage: float) -> Fields:
    """Returns the datum of a sample; positions of the prompt have no advantage."""
    drawn = np.frombuffer(sequence.tokens, "<i4")
    logprobs = np.frombuffer(sequence.logprobs, "<f4")
    whole, first = np.concatenate([prompt, drawn]), len(prompt) - 1
    zeros = np.zeros(first, np.float32)
    return {
        "tokens": whole[:-1],
        "target_tokens": whole[1:],
        "logprobs": np.concatenate([zeros, logprobs]),
        "advantages": np.concatenate([zeros, np.full(len(drawn), advantage)]),
    }


# ---- a crash -------------------------------------------------------------------------


async def crash(load: Load) -> AsyncIterator[Columns]:
    """Kills the server under load, and compares a sequence with and without that."""
    number, server = load.args.tenants[0], load.server
    tenants = await load.tenants(number)
    pair = whole, killed = [await load.tenant(name) for name in ("whole", "killed")]
    for tenant in pair:
        await tenant.create_model(load.case.rank, 1, 1)
    # Each trains alone on the server, so both have the same microbatches.
    batches, half = load.batches(7), _FIXED_STEPS // 2
    fixed = [next(batches) for _ in range(_FIXED_STEPS)]
    for data in fixed:
        await whole.train(data)
    for data in fixed[:half]:
        await killed.train(data)
    async with load.running(*(load.training(i) for i in range(number))):
        await asyncio.sleep(load.args.seconds)
        await asyncio.to_thread(server.kill)
        known = {tenant.name: tenant.steps for tenant in tenants}
        server.start()
        found: Columns = {"answers_s": await asyncio.to_thread(server.wait)}
        while not (seen := await load.seen()).sum("jaxlora_health", '"running"'):
            await asyncio.sleep(_LOOK_SECONDS)
        found["replayed_s"] = time.monotonic() - server.started_at
        while any(one.steps == known[one.name] for one in tenants):
            await asyncio.sleep(_LOOK_SECONDS)
        found["all_stepped_s"] = time.monotonic() - server.started_at
    for data in fixed[half:]:
        await killed.train(data)
    began = time.monotonic()
    states = [await _state(tenant) for tenant in pair]
    found["save_and_download_s"] = (time.monotonic() - began) / len(pair)
    yield {
        "row": f"crash: kill -9 under {number} tenants",
        **{name: round(seconds, 2) for name, seconds in found.items()},
        "replayed": seen.sum("jaxlora_replayed_microbatches_total"),
        "acknowledged_steps": sum(known.values()),
        "wrong_steps": sum(tenant.wrong_steps for tenant in (*tenants, *pair)),
        "steps_with_other_bits": server.other_bits,
        "same_bits": _are_equal(*states),
        "state_mib": round(sum(x.nbytes for x in states[0].values()) / 2**20, 1),
        "retries": sum(tenant.retries for tenant in tenants),
    }


async def _state(tenant: Tenant) -> Tensors:
    """Saves the state of a tenant's model, and downloads it."""
    await tenant.result(await tenant.operation("save_weights", path="last"))
    path = f"/api/v1/training_runs/{tenant.model}/checkpoints/weights/last/archive"
    found: Tensors = {}
    answer = await tenant.send("GET", path, follow_redirects=True)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        for member in archive:
            if (file := archive.extractfile(member)) is not None:
                found |= safetensors.numpy.load(file.read())
    return found


def _are_equal(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(
        np.array_equal(array, other[name]) for name, array in one.items()
    )
