"""Generation on meshes from the slots of a run: what one device generates."""

import pytest

from jaxlora import LoraJob, RunConfig, load_model
from jaxlora.config.generation_settings import GenerationSettings
from jaxlora.data.tokenizer import load_tokenizer
from jaxlora.generate.generator import TextDecoder
from jaxlora.generate.prompt import Prompt
from jaxlora.models.options import DecoderOptions
from jaxlora.models.spec import DecoderSpec
from jaxlora.models.structure import linear_path
from jaxlora.modules.slot_shape import SlotShape
from jaxlora.plan.stages import MeshStages
from jaxlora.train.execute.layout import Layout
from jaxlora.train.execute.texts import SlotDecoder
from tests import tiny

pytestmark = pytest.mark.needs_devices(8)
SETTINGS = GenerationSettings(max_new_tokens=9, temperature=1.3, seed=7)
SLOTS = {"a": 0, "b": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of two layers, for two stages."""
    folder = tiny.write_model(tmp_path_factory.mktemp("base") / "two")
    return load_model(folder, dtype="float32")


@pytest.fixture(scope="module")
def made(model, make_adapter):
    """Returns a function that generates with two adapters on a mesh."""
    adapters = [make_adapter(seed=i, rank=r) for i, r in ((1, 4), (2, 2))]
    adapted = {linear_path(name) for one in adapters for name in one.modules}
    spec = DecoderSpec(
        config=model.config,
        options=DecoderOptions(dtype=model.dtype, max_segment_tokens=64),
        slots=SlotShape(num_slots=4, rank=4, use_dropout=False),
        adapted=tuple(sorted(adapted)),
    )
    prompts = [
        Prompt(text, adapter=name)
        for text in ("abc", "a somewhat longer prompt", "x")
        for name in SLOTS
    ]

    def generate(mesh: str):
        job = LoraJob(name="a", data={"path": "nowhere.jsonl"})
        config = RunConfig(model=str(model.folder), jobs=[job], mesh=mesh)
        stages = MeshStages.of(config, spec)
        layout = Layout.of(stages, model.params)
        slots = layout.empty_slots()
        for slot, adapter in zip(SLOTS.values(), adapters, strict=True):
            slots.load(slot, adapter, "adamw")
        decoder = SlotDecoder(layout, model.params).loaded(slots.tables)
        assert (decoder.stages[0].mesh is None) == (mesh == "data=1")
        texts = TextDecoder(
            decoder=decoder,
            tokenizer=load_tokenizer(model.folder),
            slots=SLOTS,
            end_ids=(2,),
        )
        return texts.generate(prompts, SETTINGS, batch_size=8)

    return generate


@pytest.fixture(scope="module")
def alone(made):
    return made("data=1")


@pytest.mark.parametrize(
    "mesh",
    [
        "data=2",
        pytest.param("fsdp=2", marks=pytest.mark.grid),
        "stage=2,fsdp=2",
        "tensor=2",
        pytest.param("data=2,stage=2,fsdp=2", marks=pytest.mark.grid),
    ],
)
def test_a_mesh_generates_what_one_device_generates(made, alone, mesh):
    found = made(mesh)
    assert len({out.token_ids for out in alone}) == len(alone)
    for ours, theirs in zip(found, alone, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.finish_reason == theirs.finish_reason
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=2e-5)
