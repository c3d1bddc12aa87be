"""Field cases 31 to 34, each by its number: what goes wrong when an MTP head is converted for serving."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bebop_megatron.convert import export_checkpoint, import_checkpoint
from bebop_megatron.convert.__main__ import main
from bebop_megatron.mcore.torch_dist import TorchDistReader, TorchDistWriter
from tests.bridges.conftest import DEPTHS, IDS, quiet
from tests.bridges.reference import draft_states

pytestmark = [pytest.mark.dist, pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform")]


def exported_config(folder: Path, load: str) -> dict:
    output = folder / f"config-{load}"
    if not output.exists():
        export_checkpoint(folder / load, folder / "hf", output, note=quiet)
    return json.loads((output / "config.json").read_text())


@pytest.mark.parametrize(
    ("name", "key", "physical"),
    [
        ("qwen3", "mtp_num_hidden_layers", 1),
        ("qwen3-moe", "mtp_num_hidden_layers", 1),
        ("qwen3-next", "num_nextn_predict_layers", 1),
        ("qwen3.5", "mtp_num_hidden_layers", 1),
        ("qwen3.5-moe", "mtp_num_hidden_layers", 1),
        ("qwen3-two-layers", "mtp_num_hidden_layers", 2),
    ],
)
def test_field_case_31_the_config_counts_physical_layers_not_draft_steps(converted, name, key, physical):
    folder = converted.root / name
    reader = TorchDistReader(folder / "tp2")
    assert reader.common()["args"].mtp_num_layers == DEPTHS
    config = exported_config(folder, "tp2")
    assert config[key] == physical
    assert {"mtp_num_hidden_layers", "num_nextn_predict_layers"} & set(config) == {key}


def _without(source: Path, target: Path, lost: str) -> None:
    """A copy of a converted checkpoint without one tensor."""
    reader = TorchDistReader(source)
    with TorchDistWriter(target) as writer:
        for key, described in reader.tensors.items():
            if key != lost and not (lost.endswith("*") and key.startswith(lost[:-1])):
                assert described.size.numel()
                writer.add(key, reader.read(key))
        writer.finish(reader.common())


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("mtp.layers.0.eh_proj.weight", "missing (1): mtp.layers.0.eh_proj.weight"),
        ("mtp.*", "no tensor in it is named mtp.*"),
    ],
)
def test_field_case_32_an_export_without_its_whole_head_is_refused(converted, tmp_path, capsys, lost, message):
    folder = converted.root / "qwen3"
    _without(folder / "mcore", tmp_path / "damaged", lost)
    command = ["export", "--load", str(tmp_path / "damaged"), "--hf", str(folder / "hf")]
    with pytest.raises(SystemExit) as end:
        main([*command, "--output", str(tmp_path / "out")])
    assert message in str(end.value)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


@pytest.mark.parametrize("lost", ["mtp.fc.weight", "mtp.layers.0.self_attn.q_norm.weight", "mtp."])
def test_field_case_32_an_import_without_its_whole_head_is_refused(converted, tmp_path, lost):
    shutil.copytree(converted.root / "qwen3" / "hf", tmp_path / "hf")
    tensors = {name: value for name, value in converted.tensors["qwen3"].items() if not name.startswith(lost)}
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    message = r"states 1 MTP layers, but no tensor is named mtp\.\*" if lost == "mtp." else rf"missing \(1\): {lost}"
    with pytest.raises(ValueError, match=message):
        import_checkpoint(tmp_path / "hf", tmp_path / "mcore", note=quiet)
    assert not (tmp_path / "mcore").exists()


@pytest.mark.parametrize("name", ["qwen3", "qwen3-next", "qwen3.5"])
def test_field_case_33_norms_and_the_order_of_embedding_and_hidden(converted, name):
    folder, tensors = converted.root / name, converted.tensors[name]
    reader = TorchDistReader(folder / "mcore")
    assert torch.equal(reader.read("mtp.layers.0.eh_proj.weight"), tensors["mtp.fc.weight"])
    assert torch.equal(reader.read("mtp.layers.0.enorm.weight"), tensors["mtp.pre_fc_norm_embedding.weight"])
    if name != "qwen3":
        # the one norm that Hugging Face stores plainly
        plain = tensors["model.layers.0.linear_attn.norm.weight"]
        assert torch.equal(reader.read("decoder.layers.0.self_attention.out_norm.weight") + 1, plain)
    # what Megatron computes tells the faults from the right head
    config = json.loads((folder / "hf" / "config.json").read_text())
    computed = converted.computed[f"{name}/tp1"]["hidden"][:, :-DEPTHS].transpose(1, 2)
    hidden = converted.computed[f"{name}/tp1"]["hidden"][0].transpose(0, 1)

    def distance(changed: dict[str, torch.Tensor]) -> float:
        reference = draft_states(tensors | changed, config, hidden, IDS, 1)[0, :, :-DEPTHS]
        return float((reference - computed[1]).abs().max() / computed[1].abs().max())

    left, right = tensors["mtp.fc.weight"].chunk(2, 1)
    assert distance({}) < 1e-4
    assert distance({"mtp.fc.weight": torch.cat([right, left], 1)}) > 1e-2
    norm = "mtp.layers.0.input_layernorm.weight"
    assert distance({norm: tensors[norm] + (1 if name != "qwen3" else -1)}) > 1e-2


@pytest.mark.parametrize(("name", "layout"), [("qwen3", "pp2"), ("qwen3-tied", "pp3"), ("qwen3.5", "pp2")])
def test_field_case_34_an_embedding_on_several_pipeline_ranks_is_exported_once(converted, tmp_path, name, layout):
    # the stage with the MTP layers holds a copy of the embedding
    folder, expected = converted.root / name, converted.tensors[name]
    export_checkpoint(folder / layout, folder / "hf", tmp_path / "out", shard_bytes=20_000, note=quiet)
    found = [(key, value) for file in tmp_path.glob("out/*.safetensors") for key, value in load_file(file).items()]
    rows = expected["model.embed_tokens.weight"]
    like = [key for key, value in found if value.shape == rows.shape and torch.equal(value, rows)]
    assert like == ["model.embed_tokens.weight"]
    assert len(found) == len(expected)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    assert sorted(index["weight_map"]) == sorted(expected)
