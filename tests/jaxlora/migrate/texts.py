"""Beginnings of files of other tools."""

MODEL = "model_name_or_path: m\n"
AXOLOTL = "base_model: m\nadapter: lora\nlearning_rate: 1e-4\n"
ON_FILE = AXOLOTL + "datasets: [{path: a.jsonl, type: alpaca}]\n"
ON_DATA = MODEL + "finetuning_type: lora\ndataset: a\n"
