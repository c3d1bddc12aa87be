"""Conversion without a Megatron run: what is refused, what an interrupted run leaves, new heads, overlays, memory.

Catches: an output that looks whole and is not, a tensor dropped without a word, an old head left beside a new one, a
conversion that needs as much memory as the model.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bebop_megatron.bridges.huggingface import FolderWriter
from bebop_megatron.convert import attach_head, export_checkpoint, import_checkpoint, inspect_path
from bebop_megatron.convert.__main__ import main
from bebop_megatron.mcore.torch_dist import TorchDistReader, TorchDistWriter
from tests.bridges import models
from tests.bridges.conftest import quiet
from tests.forks import run_module

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    for name in ("qwen3", "qwen3.5-moe"):
        models.make_folder(name, root / name)
        models.make_folder(name, root / f"{name}-plain", with_mtp=False)
    import_checkpoint(root / "qwen3", root / "qwen3-mcore", note=quiet)
    import_checkpoint(root / "qwen3-plain", root / "qwen3-plain-mcore", note=quiet)
    return root


def damaged(folders: Path, target: Path, change) -> Path:
    """A copy of the small model with other tensors."""
    shutil.copytree(folders / "qwen3", target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def test_missing_extra_and_misshapen_tensors_are_all_listed(folders, tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(32)
        tensors["model.layers.2.self_attn.k_norm.weight"] = torch.zeros(9)

    damaged(folders, tmp_path / "hf", change)
    with pytest.raises(SystemExit) as end:
        main(["import", "--hf", str(tmp_path / "hf"), "--output", str(tmp_path / "mcore")])
    message = str(end.value)
    assert "missing (2): model.layers.1.mlp.up_proj.weight, model.norm.weight" in message
    assert "extra (1): model.layers.0.self_attn.q_proj.bias" in message
    assert "misshapen (1): model.layers.2.self_attn.k_norm.weight is [9], not [8]" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf"]
    assert any("q_proj.bias" in line for line in inspect_path(tmp_path / "hf"))


def test_another_model_than_the_config_says_is_refused(folders, tmp_path):
    shutil.copytree(folders / "qwen3", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "rms_norm_eps": 1e-5}))
    with pytest.raises(ValueError, match=r"layernorm_epsilon is 1e-06 in the checkpoint, 1e-05 by config\.json"):
        export_checkpoint(folders / "qwen3-mcore", tmp_path / "hf", tmp_path / "out", note=quiet)


def test_nothing_is_overwritten(folders, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("kept")
    for command in (
        ["import", "--hf", str(folders / "qwen3")],
        ["export", "--load", str(folders / "qwen3-mcore"), "--hf", str(folders / "qwen3")],
        ["attach", "--load", str(folders / "qwen3-plain-mcore")],
    ):
        with pytest.raises(SystemExit, match="exists: give a new folder"):
            main([*command, "--output", str(tmp_path / "out")])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("writer", [FolderWriter, TorchDistWriter])
def test_an_interrupted_conversion_leaves_nothing_that_looks_whole(folders, tmp_path, monkeypatch, writer):
    name = "write" if writer is FolderWriter else "add"
    original, calls = getattr(writer, name), []

    def failing(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 20:
            # as a full disk would
            raise OSError("no space")
        return original(self, *args, **kwargs)

    monkeypatch.setattr(writer, name, failing)
    sources = [folders / "qwen3"] if writer is TorchDistWriter else [folders / "qwen3-mcore", folders / "qwen3"]
    convert = import_checkpoint if writer is TorchDistWriter else export_checkpoint
    with pytest.raises(OSError, match="no space"):
        convert(*sources, tmp_path / "out", note=quiet)
    assert not list(tmp_path.iterdir())


def test_a_killed_conversion_leaves_only_a_partial_folder_that_the_next_one_replaces(folders, tmp_path):
    command = ["import", "--hf", str(folders / "qwen3"), "--output", str(tmp_path / "out")]
    done = run_module("tests.bridges.killed_process", *command)
    assert done.returncode == -9, done.output
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    assert not (tmp_path / ".out.partial" / "latest_checkpointed_iteration.txt").exists()
    import_checkpoint(folders / "qwen3", tmp_path / "out", note=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_that_was_cut_short_is_refused(folders, tmp_path):
    shutil.copytree(folders / "qwen3", tmp_path / "hf")
    with (tmp_path / "hf" / "model.safetensors").open("r+b") as file:
        file.truncate(50_000)
    with pytest.raises(ValueError, match="cut short"):
        import_checkpoint(tmp_path / "hf", tmp_path / "mcore", note=quiet)


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(b"\xff" * 30)


def _cut(path: Path) -> None:
    os.truncate(path, 3000 if path.suffix == ".distcp" else 100)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("release/__0_0.distcp", _cut, "__0_0.distcp has 3,000 bytes of"),
        ("release/__0_0.distcp", Path.unlink, "__0_0.distcp is missing"),
        ("release/__0_0.distcp", lambda path: _flip(path, 2), "begins with other bytes than were written"),
        ("release/__0_0.distcp", lambda path: _flip(path, 80), "its file is damaged"),
        ("release/.metadata", _cut, "cannot be read, is it damaged"),
        ("release/.metadata", lambda path: _flip(path, 30), "cannot be read, is it damaged"),
        ("latest_checkpointed_iteration.txt", lambda path: path.write_text(""), "should hold a number or release"),
        ("hf/model.safetensors", lambda path: _flip(path, 20), "its header is no JSON"),
        ("hf/config.json", lambda path: path.write_text("{"), "config.json is no JSON"),
        ("hf/config.json", lambda path: path.write_text('{"model_type": "qwen3"}'), "has no 'num_hidden_layers'"),
    ],
)
def test_damaged_files_are_named(folders, tmp_path, name, damage, message):
    shutil.copytree(folders / "qwen3-mcore", tmp_path / "mcore")
    shutil.copytree(folders / "qwen3", tmp_path / "mcore" / "hf")
    damage(tmp_path / "mcore" / name)
    command = ["export", "--load", str(tmp_path / "mcore"), "--hf", str(folders / "qwen3")]
    if name.startswith("hf/"):
        command = ["import", "--hf", str(tmp_path / "mcore" / "hf")]
    with pytest.raises(SystemExit, match=message):
        main([*command, "--output", str(tmp_path / "out")])
    assert [path.name for path in tmp_path.iterdir()] == ["mcore"]


def test_outputs_that_cannot_be_written_end_with_one_line(folders, tmp_path):
    (tmp_path / "file").write_text("")
    for command in (
        ["import", "--hf", str(folders / "qwen3")],
        ["export", "--load", str(folders / "qwen3-mcore"), "--hf", str(folders / "qwen3")],
    ):
        with pytest.raises(SystemExit, match=r"error: .*/file/.*: Not a directory"):
            main([*command, "--output", str(tmp_path / "file" / "out")])
    for bad in (["import", "--mtp-depth", "0"], ["export", "--shard-gb", "0"]):
        with pytest.raises(SystemExit) as end:
            main([*bad, "--output", "x", "--hf", "x"])
        assert end.value.code == 2


def test_a_description_that_would_run_code_is_refused(folders, tmp_path):
    shutil.copytree(folders / "qwen3-mcore", tmp_path / "evil")

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / "evil" / "release" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match=r"posix\.mkdir, which describes no tensor: refused"):
        TorchDistReader(tmp_path / "evil")
    assert not (tmp_path / "ran").exists()


def test_tokenizer_is_copied_and_code_is_not(folders, tmp_path):
    export_checkpoint(folders / "qwen3-mcore", folders / "qwen3", tmp_path / "out", note=quiet)
    expected = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == expected
    kept = folders / "qwen3-mcore" / "huggingface"
    assert sorted(path.name for path in kept.iterdir()) == ["config.json", "generation_config.json", "tokenizer.json"]


def test_bfloat16_with_single_precision_tensors_in_it_survives_bit_by_bit(tmp_path):
    # real checkpoints keep A_log in fp32; small weights of the plain norm are no exact deltas in their own type
    tensors = models.make_folder("qwen3.5-moe", tmp_path / "hf", dtype=torch.bfloat16, fused_mtp=True)
    for name in tensors:
        if name.endswith("A_log"):
            tensors[name] = tensors[name].float() + 1e-5
        if name.endswith("linear_attn.norm.weight"):
            tensors[name] = torch.tensor([0.1, -0.3, 1.0, 7.5]).float()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    import_checkpoint(tmp_path / "hf", tmp_path / "mcore", note=quiet)
    export_checkpoint(tmp_path / "mcore", tmp_path / "hf", tmp_path / "out", note=quiet)
    models.assert_same_tensors(models.read_folder(tmp_path / "out"), tensors)


@pytest.mark.parametrize("method", ["last-layer", "random"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3.5-moe"])
def test_a_new_head_is_the_same_made_at_import_and_attached_later(folders, tmp_path, name, method):
    plain = folders / f"{name}-plain"
    import_checkpoint(plain, tmp_path / "with", init_mtp=method, depth=3, note=quiet)
    import_checkpoint(plain, tmp_path / "without", note=quiet)
    attach_head(tmp_path / "without", tmp_path / "attached", init_mtp=method, depth=3, note=quiet)
    one, two = TorchDistReader(tmp_path / "with"), TorchDistReader(tmp_path / "attached")
    assert sorted(one.tensors) == sorted(two.tensors)
    assert all(torch.equal(one.read(key), two.read(key)) for key in one.tensors)
    assert vars(one.common()["args"]) == vars(two.common()["args"])

    export_checkpoint(tmp_path / "attached", plain, tmp_path / "out", note=quiet)
    head, backbone = models.read_folder(tmp_path / "out"), models.read_folder(plain)
    models.assert_same_tensors({k: v for k, v in head.items() if not k.startswith("mtp.")}, backbone)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["mtp_num_hidden_layers"] == 1
    source = models.separate_experts(backbone)
    for key in (k for k in head if k.startswith("mtp.layers.0.")):
        copied = torch.equal(head[key], source[key.replace("mtp.layers.0.", "model.layers.3.")])
        assert copied == (method == "last-layer"), key
    assert torch.equal(head["mtp.fc.weight"][:, 32:], torch.eye(32)) == (method == "last-layer")
    with pytest.raises(ValueError, match="has 1 MTP layer"):
        attach_head(tmp_path / "attached", tmp_path / "again", note=quiet)


@pytest.mark.parametrize("where", ["none", "same-file", "own-file"])
def test_only_the_head_is_exported_and_laid_over_a_folder(folders, tmp_path, where):
    expected = models.read_folder(folders / "qwen3")
    target = tmp_path / "hf"
    if where == "none":
        shutil.copytree(folders / "qwen3-plain", target)
    elif where == "same-file":
        shutil.copytree(folders / "qwen3", target)
    else:
        # a folder whose old head has a file of its own
        export_checkpoint(folders / "qwen3-plain-mcore", folders / "qwen3-plain", target, note=quiet)
        old = {name: torch.zeros_like(value) for name, value in expected.items() if name.startswith("mtp.")}
        (target / "model.safetensors").rename(target / "model-00001-of-00002.safetensors")
        save_file(old, target / "model-00002-of-00002.safetensors")
        places = dict.fromkeys(models.read_folder(folders / "qwen3-plain"), "model-00001-of-00002.safetensors")
        places |= dict.fromkeys(old, "model-00002-of-00002.safetensors")
        (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    export_checkpoint(folders / "qwen3-mcore", target, tmp_path / "head", only_mtp=True, note=quiet)
    files = {path.name for path in (tmp_path / "head").glob("*.safetensors")}
    if where != "same-file":
        assert all(name.startswith("mtp.") for name in models.read_folder(tmp_path / "head"))
        assert len(files) == 1
    shutil.copytree(tmp_path / "head", target, dirs_exist_ok=True)
    # no tensor twice, whatever an engine reads
    if where == "none":
        expected |= {k: v for k, v in models.read_folder(folders / "qwen3-plain").items()}
    models.assert_same_tensors(models.read_folder(target), expected)
    assert json.loads((target / "config.json").read_text())["mtp_num_hidden_layers"] == 1
    assert any("all there" in line for line in inspect_path(target))


def test_a_model_beside_a_vision_model_keeps_its_other_half(folders, tmp_path):
    shutil.copytree(folders / "qwen3.5-moe", tmp_path / "hf")
    tensors = {
        name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name: value
        for name, value in models.read_folder(folders / "qwen3.5-moe").items()
    }
    tensors["model.visual.patch_embed.weight"] = torch.randn(3, 5)
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    text = json.loads((tmp_path / "hf" / "config.json").read_text())
    whole = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(whole))
    import_checkpoint(tmp_path / "hf", tmp_path / "mcore", note=quiet)
    export_checkpoint(tmp_path / "mcore", tmp_path / "hf", tmp_path / "out", note=quiet)
    models.assert_same_tensors(models.read_folder(tmp_path / "out"), tensors)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["text_config"]["mtp_num_hidden_layers"] == 1


def test_several_distinct_layers_are_exported_with_a_warning(tmp_path, capsys):
    tensors = models.make_folder("qwen3-two-layers", tmp_path / "hf")
    tensors["mtp.layers.1.fc.weight"] = tensors["mtp.fc.weight"] + 1
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.layers.1.{name}.weight"] = tensors[f"mtp.{name}.weight"].clone()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    main(["import", "--hf", str(tmp_path / "hf"), "--output", str(tmp_path / "mcore")])
    main(["export", "--load", str(tmp_path / "mcore"), "--hf", str(tmp_path / "hf"), "--output", str(tmp_path / "out")])
    assert "2 distinct MTP layers. Engines may apply only the first" in capsys.readouterr().out
    models.assert_same_tensors(models.read_folder(tmp_path / "out"), tensors)


def test_inspect_tells_what_both_kinds_hold(folders, capsys):
    for path, family in ((folders / "qwen3", "Hugging Face folder"), (folders / "qwen3-mcore", "torch_dist")):
        main(["inspect", str(path)])
        out = capsys.readouterr().out
        for part in (family, "family: qwen3", "decoder layers: 4", "MTP layers: 1", "float32", "all there"):
            assert part in out


_MEASURE = """
import sys
from pathlib import Path
from bebop_megatron.convert import export_checkpoint, import_checkpoint

small, large, out = map(Path, sys.argv[1:])
quiet = lambda text: None


def both(hf, to):
    import_checkpoint(hf, to / "mcore", note=quiet)
    export_checkpoint(to / "mcore", hf, to / "hf", note=quiet, shard_bytes=200 << 20)


def status(key):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(key))


(out / "warm").mkdir()
both(small, out / "warm")
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
both(large, out)
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures the peak of /proc/self/status")
def test_memory_is_a_quarter_of_the_checkpoint(folders, tmp_path):
    hidden, ffn, layers = 512, 2048, 32
    config = json.loads((folders / "qwen3" / "config.json").read_text()) | {
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "head_dim": 128,
        "vocab_size": 4096,
    }
    large = tmp_path / "large"
    large.mkdir()
    (large / "config.json").write_text(json.dumps(config))
    from bebop_megatron.bridges.families import sizes_of
    from bebop_megatron.bridges.huggingface import Planned, into_shards
    from bebop_megatron.bridges.plan import Style, backbone_rows, mtp_rows

    sizes = sizes_of(config)
    rows = [*backbone_rows(sizes, Style()), *mtp_rows(sizes, 1, Style())]
    planned = [Planned(p.name, s, torch.float32) for row in rows for p, s in zip(row.hf, row.shapes, strict=True)]
    total = sum(tensor.nbytes for tensor in planned)
    with FolderWriter(large / "weights", into_shards(planned, 200 << 20)) as writer:
        # every tensor another stretch of the same numbers: drawing them all would take longer than the conversion
        numbers = torch.randn(max(tensor.shape.numel() for tensor in planned) + len(planned))
        for start, tensor in enumerate(planned):
            writer.write(tensor.name, numbers[start:][: tensor.shape.numel()].view(tensor.shape))
        writer.finish(config, large)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", _MEASURE, str(folders / "qwen3"), str(large / "weights")]
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    peak = int(done.stdout.split()[-1])
    assert peak * 4 <= total, f"{peak / 2**20:.0f} MiB for a checkpoint of {total / 2**20:.0f} MiB"
    read = lambda root: {name: value for name, value in models.read_folder(root).items()}  # noqa: E731
    models.assert_same_tensors(read(tmp_path / "hf"), read(large / "weights"))
