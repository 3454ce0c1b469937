"""Calls every public method of the tinker client, with a server named by variables.

It runs in an environment of its own, with the client and torch and without jaxlora, and
ends with the status 0 if all methods were called and gave what they should.
"""

import asyncio
import inspect
import multiprocessing
import pickle
import sys
import urllib.request
import warnings

import numpy as np
import tinker
import torch
from tinker import types
from tinker.lib.public_interfaces.rest_client import RestClient
from tinker.lib.public_interfaces.sampling_client import SamplingClient
from tinker.lib.public_interfaces.service_client import ServiceClient
from tinker.lib.public_interfaces.training_client import TrainingClient

CLASSES = ServiceClient, TrainingClient, SamplingClient, RestClient
IS_OLD = not hasattr(TrainingClient, "save_weights_external")  # before 0.25
# They ask for what only the hosted service has, and say so by an error.
ABSENT = {
    *("get_audit_log", "get_billing_usage", "get_current_checkpoint_storage_usage"),
    *("copy_weights", "assign_session_project", "export_session_trace", "whoami"),
}
# Not requests: callbacks, and addresses of the hosted service's pages.
OTHER = {"on_queue_state_change", "get_console_url", "get_telemetry", "holder"}
REFUSALS = tinker.TinkerError, RuntimeError, TypeError, ValueError, AssertionError
CALLED: set[str] = set()
LEARNING = types.AdamParams(learning_rate=1e-2)
SECONDS = 120


def watch(cls: type) -> None:
    """Notes which methods of a class are called."""
    for name, given in list(vars(cls).items()):
        if name.startswith("_") or not callable(getattr(cls, name, None)):
            continue
        is_static = isinstance(given, staticmethod)
        method = given.__func__ if is_static else given

        def called(*args, _method=method, _name=f"{cls.__name__}.{name}", **kwargs):
            CALLED.add(_name)
            return _method(*args, **kwargs)

        setattr(cls, name, staticmethod(called) if is_static else called)


def got(given):
    """The result of a future."""
    return given.result(timeout=SECONDS) if hasattr(given, "result") else given


async def waited(given):
    """The result of what an async method returns."""
    while inspect.isawaitable(given):
        given = await given
    return given


def datum(seed: int, size: int, **fields) -> types.Datum:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, 250, size)
    inputs = {
        "target_tokens": rng.integers(3, 250, size),
        "weights": rng.normal(size=size).astype(np.float32),
    }
    inputs |= {name: np.full(size, v, np.float32) for name, v in fields.items()}
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens.tolist()),
        loss_fn_inputs={k: types.TensorData.from_numpy(v) for k, v in inputs.items()},
    )


DATA = [datum(seed, 5 + seed) for seed in range(10)]


def logprobs(output) -> np.ndarray:
    return np.concatenate([out["logprobs"].data for out in output.loss_fn_outputs])


def train(service: ServiceClient, name: str) -> TrainingClient:
    """All about one model; returns its client."""
    model = got(service.create_lora_training_client(name, rank=4, seed=1))
    same = got(service.create_lora_training_client(name, rank=4, seed=1))
    assert model.get_info().lora_rank == 4
    assert model.get_tokenizer().encode("a")
    before = got(model.forward(DATA, "cross_entropy"))
    assert len(before.loss_fn_outputs) == len(DATA)  # although in chunks
    whole = got(model.forward_backward(DATA, "cross_entropy"))
    weights = np.concatenate([d.loss_fn_inputs["weights"].data for d in DATA])
    np.testing.assert_allclose(
        whole.metrics["loss:sum"], -(weights * logprobs(before)).sum(), rtol=1e-4
    )

    def loss(data, given):
        pairs = zip(data, given, strict=True)
        terms = [(d.loss_fn_inputs["weights"].to_torch() * lp).sum() for d, lp in pairs]
        return -sum(terms), {"own": 1.0}

    own = got(same.forward_backward_custom(DATA, loss))
    assert own.metrics["own"] == 1.0
    np.testing.assert_allclose(
        own.metrics["loss:sum"], whole.metrics["loss:sum"], rtol=1e-4
    )
    for one in (model, same):  # neither waits for the other
        step = one.optim_step(LEARNING)
        after = one.forward(DATA, "cross_entropy")
        assert got(step).metrics["step:max"] == 1
        found = logprobs(got(after))
        assert np.abs(found - logprobs(before)).max() > 1e-3
        CALLED_LOGPROBS.append(found)
    np.testing.assert_allclose(*CALLED_LOGPROBS, atol=1e-4)
    refused(model)
    for loss_fn, config in {
        "importance_sampling": None,
        "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
        "cispo": None,
        "dro": {"beta": 0.1},
    }.items():
        data = [datum(seed, 6, logprobs=-5.0, advantages=1.0) for seed in range(3)]
        found = got(model.forward_backward(data, loss_fn, config))
        assert np.isfinite(found.metrics["loss:sum"]), loss_fn
    got(model.optim_step(LEARNING))
    return model


CALLED_LOGPROBS: list[np.ndarray] = []


def refused(model: TrainingClient) -> None:
    """A request that cannot be done fails, and those after it go on."""
    bad = [
        model.forward_backward(DATA[:1], "gspo"),
        model.forward_backward([datum(0, 4, advantages=1.0)], "ppo"),
        model.forward([datum(0, 4, margins=1.0)], "cross_entropy"),
        model.optim_step(types.AdamParams(beta1=2.0)),
    ]
    for future, text in zip(bad, ("gspo", "logprobs", "margins", "betas"), strict=True):
        try:
            got(future)
        except tinker.RequestFailedError as error:
            assert text in str(error), error
        else:
            raise AssertionError(f"{text} was not refused")


def save(service: ServiceClient, model: TrainingClient) -> dict[str, str]:
    """Saves and loads; returns the paths of the checkpoints."""
    paths = {"state": got(model.save_state("one")).path}
    if not IS_OLD:
        got(model.save_state("one", overwrite=True, user_metadata={"k": "v"}))
        paths["external"] = got(model.save_weights_external("plain")).path
    try:
        got(model.save_state("one"))
    except tinker.RequestFailedError as error:
        assert "there already" in str(error)
    else:
        raise AssertionError("a checkpoint was replaced")
    resumed = got(
        service.create_training_client_from_state_with_optimizer(paths["state"])
    )
    fresh = got(service.create_training_client_from_state(paths["state"]))
    found = []
    for one in (model, resumed, fresh):
        got(one.forward_backward(DATA, "cross_entropy"))
        got(one.optim_step(LEARNING))
        found.append(logprobs(got(one.forward(DATA, "cross_entropy"))))
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(found[0] - found[2]).max() > 1e-4  # without moments
    got(resumed.load_state_with_optimizer(paths["state"]))
    got(resumed.forward_backward(DATA, "cross_entropy"))
    got(resumed.optim_step(LEARNING))
    again = logprobs(got(resumed.forward(DATA, "cross_entropy")))
    np.testing.assert_array_equal(found[0], again)
    got(fresh.load_state(paths["state"]))
    paths["sampler"] = got(model.save_weights_for_sampler("one", ttl_seconds=3600)).path
    return paths


PROMPT = types.ModelInput.from_ints([5, 6, 7, 8, 9])


def in_other_process(given: tuple[bytes, str | None]) -> list[int]:
    sampler = pickle.loads(given[0])
    if given[1] is not None:
        sampler = SamplingClient.from_sampler_handle(given[1])
    params = types.SamplingParams(max_tokens=4, seed=3, temperature=0.0)
    return sampler.sample(PROMPT, 1, params).result(SECONDS).sequences[0].tokens


def sample(service: ServiceClient, model: TrainingClient, path: str, name: str) -> None:
    base = got(service.create_sampling_client(base_model=name))
    published = got(model.save_weights_and_get_sampling_client())
    by_path = got(model.create_sampling_client(path))
    again = got(service.create_sampling_client(model_path=path))
    params = types.SamplingParams(max_tokens=4, seed=3, temperature=0.0)
    found = [
        got(one.sample(PROMPT, 2, params)).sequences[0]
        for one in (published, by_path, again)
    ]
    assert found[0].tokens == found[1].tokens == found[2].tokens
    assert len(found[0].tokens) == len(found[0].logprobs) <= 4
    # The trainer and the sampler agree.
    tokens = np.array([5, 6, 7, 8, 9])
    one = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(tokens[1:])},
    )
    trained = logprobs(got(model.forward([one], "cross_entropy")))
    scored = got(published.compute_logprobs(PROMPT))
    assert scored[0] is None
    np.testing.assert_allclose(scored[1:], trained, atol=1e-4)
    top = got(
        base.sample(
            PROMPT, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3
        )
    )
    assert top.topk_prompt_logprobs[0] is None
    assert all(len(best) == 3 for best in top.topk_prompt_logprobs[1:])
    if not IS_OLD:
        last = got(
            base.sample(
                PROMPT,
                1,
                params,
                include_prompt_logprobs=True,
                prompt_logprobs_last_n=2,
            )
        )
        np.testing.assert_array_equal(
            np.isnan(last.prompt_logprobs_np), [True] * 3 + [False] * 2
        )
        assert (
            len({s.sequence_id for s in got(base.sample(PROMPT, 3, params)).sequences})
            == 3
        )
    stopped = types.SamplingParams(max_tokens=50, seed=3, stop=found[0].tokens[:1])
    ended = got(published.sample(PROMPT, 1, stopped)).sequences[0]
    assert ended.stop_reason in ("stop", "length")
    assert base.get_base_model() == name and base.get_tokenizer().encode("a")
    handle = None if IS_OLD else published.get_sampler_handle()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        tokens = pool.apply(in_other_process, ((pickle.dumps(published), handle),))
    assert tokens == found[0].tokens
    if handle is not None:
        same = SamplingClient.from_sampler_handle(handle)
        assert got(same.sample(PROMPT, 1, params)).sequences[0].tokens == tokens


def manage(rest: RestClient, model: TrainingClient, paths: dict[str, str]) -> None:
    """All about checkpoints, runs and sessions."""
    run, path = model.model_id, paths["state"]
    assert got(rest.get_training_run(run)).lora_rank == 4
    assert got(rest.get_training_run_by_tinker_path(path)).training_run_id == run
    assert got(rest.get_weights_info_by_tinker_path(path)).lora_rank == 4
    runs = got(rest.list_training_runs(limit=2))
    assert len(runs.training_runs) == 2 < runs.cursor.total_count
    kinds = {c.checkpoint_type for c in got(rest.list_checkpoints(run)).checkpoints}
    assert kinds == {"training", "sampler"} | ({"external"} if not IS_OLD else set())
    listed = {c.tinker_path: c for c in got(rest.list_user_checkpoints()).checkpoints}
    assert listed.keys() >= {*paths.values()} and listed[path].size_bytes > 0
    if not IS_OLD:
        assert listed[path].user_metadata == {"k": "v"}
        urls = got(rest.get_external_weights_urls(paths["external"])).urls
        with urllib.request.urlopen(urls["adapter_config.json"]) as answer:
            assert b"lora_alpha" in answer.read()
        found = got(rest.search_sessions(types.SessionSearchRequest(limit=1)))
        assert len(found.sessions) == 1
    else:
        url = got(
            rest.get_checkpoint_archive_url_from_tinker_path(paths["sampler"])
        ).url
        with urllib.request.urlopen(url) as answer:
            assert b"adapter_config.json" in answer.read()
        got(rest.get_checkpoint_archive_url(run, "sampler_weights/one"))
    got(rest.publish_checkpoint_from_tinker_path(path))
    assert got(rest.get_training_run(run)).last_checkpoint.public
    got(rest.unpublish_checkpoint_from_tinker_path(path))
    got(rest.set_checkpoint_ttl_from_tinker_path(path, 7200))
    assert got(rest.get_training_run(run)).last_checkpoint.expires_at is not None
    sessions = got(rest.list_sessions()).sessions
    session = got(rest.get_session(sessions[0]))
    assert run in session.training_run_ids
    if session.sampler_ids:
        got(rest.get_sampler(session.sampler_ids[0]))


def absent(rest: RestClient, service: ServiceClient, session: str, path: str) -> None:
    """The server says what it does not have, at once."""
    given = {
        "get_audit_log": (),
        "get_billing_usage": (),
        "get_current_checkpoint_storage_usage": (),
        "copy_weights": (path,),
        "assign_session_project": (session, "p"),
        "export_session_trace": (session,),
        "whoami": (),
    }
    for name, args in given.items():
        for owner in (rest, service):
            for variant in (name, f"{name}_async"):
                if (method := getattr(owner, variant, None)) is None:
                    continue
                try:
                    called = method(*args)
                    if inspect.iscoroutine(called):
                        asyncio.run(waited(called))
                    else:
                        got(called)
                # 0.24 may assert that an async method runs in its own loop.
                except REFUSALS:
                    continue
                raise AssertionError(f"{variant} works")


async def again(service: ServiceClient, rest: RestClient, name: str) -> None:
    """The async variants."""
    await waited(service.get_server_capabilities_async())
    model = await waited(
        service.create_lora_training_client_async(name, rank=4, train_mlp=False)
    )
    await waited(model.forward_async(DATA[:2], "cross_entropy"))
    await waited(model.forward_backward_async(DATA[:2], "cross_entropy"))
    loss = lambda data, given: (-sum(lp.sum() for lp in given), {})
    await waited(model.forward_backward_custom_async(DATA[:2], loss))
    await waited(model.optim_step_async(LEARNING))
    await waited(model.get_info_async())
    saved = await waited(model.save_state_async("two"))
    await waited(model.load_state_async(saved.path))
    await waited(model.load_state_with_optimizer_async(saved.path))
    for make in (
        service.create_training_client_from_state_async,
        service.create_training_client_from_state_with_optimizer_async,
    ):
        await waited(make(saved.path))
    for_sampler = await waited(model.save_weights_for_sampler_async("two"))
    if not IS_OLD:
        external = await waited(model.save_weights_external_async("two"))
        await waited(rest.get_external_weights_urls_async(external.path))
    params = types.SamplingParams(max_tokens=2)
    for sampler in (
        await waited(model.create_sampling_client_async(for_sampler.path)),
        await waited(model.save_weights_and_get_sampling_client_async()),
        await waited(service.create_sampling_client_async(base_model=name)),
        await waited(SamplingClient.create(model.holder, base_model=name)),
    ):
        await waited(sampler.sample_async(PROMPT, 1, params))
        await waited(sampler.compute_logprobs_async(PROMPT))
        assert await waited(sampler.get_base_model_async()) == name
    run, path = model.model_id, saved.path
    await waited(rest.get_training_run_async(run))
    await waited(rest.get_training_run_by_tinker_path_async(path))
    await waited(rest.list_training_runs_async())
    await waited(rest.list_checkpoints_async(run))
    await waited(rest.list_user_checkpoints_async())
    await waited(rest.publish_checkpoint_from_tinker_path_async(path))
    await waited(rest.unpublish_checkpoint_from_tinker_path_async(path))
    await waited(rest.set_checkpoint_ttl_from_tinker_path_async(path, None))
    (newest, *_) = (await waited(rest.list_sessions_async())).sessions
    session = await waited(rest.get_session_async(newest))
    await waited(rest.get_sampler_async(session.sampler_ids[0]))
    if IS_OLD:
        sampler_path = for_sampler.path
        await waited(rest.get_checkpoint_archive_url_async(run, "sampler_weights/two"))
        await waited(
            rest.get_checkpoint_archive_url_from_tinker_path_async(sampler_path)
        )
    await waited(rest.delete_checkpoint_async(run, "sampler_weights/two"))
    await waited(rest.delete_checkpoint_from_tinker_path_async(path))


def main(name: str) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    for cls in CLASSES:
        watch(cls)
    service = ServiceClient(user_metadata={"of": "a test"})
    rest = service.create_rest_client()
    assert name in [
        m.model_name for m in service.get_server_capabilities().supported_models
    ]
    if hasattr(rest, "get_server_capabilities"):
        got(rest.get_server_capabilities())
        service.create_custom_loss(
            lambda logprobs: (-logprobs.sum(), {}), {"logprobs": 1}
        ).result(SECONDS)
    model = train(service, name)
    paths = save(service, model)
    sample(service, model, paths["sampler"], name)
    manage(rest, model, paths)
    asyncio.run(again(service, rest, name))
    absent(rest, service, model.model_id.partition(":")[0], paths["state"])
    got(rest.delete_checkpoint(model.model_id, "sampler_weights/one"))
    got(rest.delete_checkpoint_from_tinker_path(paths["state"]))
    assert paths["state"] not in {
        one.tinker_path for one in got(rest.list_user_checkpoints()).checkpoints
    }
    if hasattr(service, "close"):
        service.close("success").result(SECONDS)
    missing = [
        f"{cls.__name__}.{method}"
        for cls in CLASSES
        for method in vars(cls)
        if not method.startswith("_")
        and callable(getattr(cls, method))
        and method not in OTHER
        and f"{cls.__name__}.{method}" not in CALLED
    ]
    assert not missing, missing
    print(f"{len(CALLED)} methods of tinker {tinker.__version__} work")


if __name__ == "__main__":
    main(sys.argv[1])
