"""A model card says what the adapter is of, and leads with YAML for the hub."""

import huggingface_hub
import pytest
import yaml

from jaxlora.adapters.export_record import check_replaceable
from jaxlora.adapters.model_card import is_our_card, model_card, write_card
from jaxlora.config import LoraJob
from jaxlora.errors import AdapterError


def card(base_model="someone/model", path="someone/records", **figures) -> str:
    job = LoraJob(name="support", data={"path": path}, rank=4, learning_rate=3e-4)
    return model_card(
        name="support",
        base_model=base_model,
        revision="abc123",
        job=job.model_dump(mode="json"),
        figures={"held-out loss": None} | figures,
        version="1.2.3",
    )


def front(text: str) -> dict:
    _, block, _ = text.split("---\n", 2)
    return yaml.safe_load(block)


def test_front_matter():
    found = front(card())
    assert found["base_model"] == "someone/model"
    assert found["library_name"] == "peft"
    assert found["datasets"] == ["someone/records"]
    assert "base_model:adapter:someone/model" in found["tags"]
    # The hub's own client reads the same.
    data = huggingface_hub.ModelCard(card()).data
    assert (data.base_model, data.library_name) == ("someone/model", "peft")


@pytest.mark.parametrize("path", ["/home/user/records.jsonl", "data/records.jsonl"])
def test_a_path_is_not_told(path):
    """It may hold a user's name, and is no model or data set of the hub."""
    text = card(base_model="/home/user/base", path=path)
    assert front(text).keys() == {"library_name", "pipeline_tag", "tags"}
    assert "`records.jsonl`" in text and path not in text


def test_figures_and_settings():
    text = card(**{"held-out loss": 1.23456, "optimizer steps": 70})
    assert "| held-out loss | 1.235 |" in text and "| optimizer steps | 70 |" in text
    assert "| rank | 4 |" in text and "| learning_rate | 0.0003 |" in text
    assert "| steps |" not in text  # a setting that was not given
    assert "trained with jaxlora 1.2.3" in text and "`abc123`" in text
    assert "Nothing was measured." in card()


def test_a_card_is_replaced_unless_it_is_claimed(make_adapter, export):
    folder = export(make_adapter())
    write_card(folder, card())
    assert is_our_card(folder / "README.md")
    check_replaceable(folder)
    write_card(folder, card().replace("<!-- Written by jaxlora", "<!-- Mine"))
    assert not is_our_card(folder / "README.md")
    with pytest.raises(AdapterError, match="files that jaxlora did not write"):
        check_replaceable(folder)
