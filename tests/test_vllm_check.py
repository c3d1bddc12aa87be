"""The parts of `make vllm-check` that need no vLLM, and one short run of vLLM where it is installed.

Catches: an expectation that lets a draft step see too much or sit at the wrong position, acceptance counted over other
verifications than the engine's, an error that takes verifications for independent, agreement where a number is missing,
a planted fault that changes nothing, a repair that does not do what the kernel does.
"""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bebop_megatron.convert import import_checkpoint
from benchmarks.vllm_check import cpu_repair, engine, expectation, plants, requirements
from benchmarks.vllm_check.comparison import as_json, compare
from benchmarks.vllm_check.plan import GAMMA, MODELS
from benchmarks.vllm_check.publish import block, document_with, publish
from benchmarks.vllm_check.verifications import Verified, check_counters, prefix_counts, read_sequences
from tests.bridges import models
from tests.bridges.reference import MtpBlock

ROOT = Path(__file__).resolve().parent.parent
VLLM = ROOT / ".venv-vllm"
FIELDS = "model rule gamma position vllm ours expected stderr num_drafts agree".split()


def _verified(*accepted: int, tokens: int | None = None) -> Verified:
    produced = 1 + sum(accepted) + len(accepted)
    return Verified((0,) * (produced if tokens is None else tokens), accepted, 3)


def test_verifications_start_where_the_text_stands():
    sequence = _verified(0, 3, 1, 0, tokens=9)
    assert sequence.starts == [1, 2, 6, 8]
    # 9 tokens: the last draft of the one that starts with 8 has no target in the text
    assert sequence.compared() == [(1, 0), (2, 3), (6, 1)]
    assert prefix_counts([sequence, _verified(2, 2)], 2).accepted == (1.0, 2.0)
    assert prefix_counts([sequence, _verified(2, 2)], 2).verifications == (3.0, 2.0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"tokens": [1] * 9, "accepted": [0, 3]}, "prompt 0: 2 verifications that accepted 3 drafts make 6 tokens"),
        ({"tokens": [1] * 2, "accepted": [4]}, "accepted 4 to 4 of 3 drafts"),
        ({"tokens": [1] * 6, "accepted": [0, 3], "drafted": [3, 2]}, "1 verifications had 2 drafts, not 3"),
    ],
    ids=["a-step-without-drafts", "too-many-accepted", "a-short-draft"],
)
def test_numbers_that_do_not_add_up_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        read_sequences([row], 3)


def test_counters_are_read_and_compared_with_the_requests():
    metrics = [
        SimpleNamespace(name="vllm:spec_decode_num_drafts", value=4),
        SimpleNamespace(name="vllm:spec_decode_num_draft_tokens", value=12),
        SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens", value=6),
        SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[3, 2, 1]),
        SimpleNamespace(name="vllm:num_requests_running", value=1),
    ]
    counters = engine.counters(metrics)
    assert counters["num_accepted_tokens_per_pos"] == [3, 2, 1]
    assert len(counters) == 4
    sequences = [_verified(0, 3, 1), _verified(2)]
    check_counters(sequences, counters)
    with pytest.raises(ValueError, match=r"num_drafts: 5 in the metrics, 4 by request"):
        check_counters(sequences, counters | {"num_drafts": 5})


def test_errors_take_prompts_as_units():
    # every verification of a prompt alike: 50 of them are worth no more than one
    first = [_verified(*[3] * 50), _verified(*[0] * 50)]
    other = [_verified(*[0] * 50), _verified(*[3] * 50)]
    (row, *_) = compare("m", "rejection", first, other, None)
    share = prefix_counts(first, 1)
    # each prompt is off by half of its share of the verifications, in both samples and in opposite directions
    assert row.vllm == pytest.approx(share.accepted[0] / sum(share.verifications))
    assert row.stderr == pytest.approx(1.0, rel=0.02)


def _many(rate: int) -> list[Verified]:
    # rate of 10 prompts accept one draft each time; 200 prompts
    return [_verified(*[int(index % 10 < rate)] * 40) for index in range(200)]


def _hoped(sequences: list[Verified], shift: float) -> list[list[list[float]]]:
    return [[[(taken >= i) + shift for i in (1, 2, 3)] for _, taken in each.compared()] for each in sequences]


@pytest.mark.parametrize(
    ("ours", "shift", "agrees"), [(5, 0.0, True), (6, 0.0, False), (5, 0.1, False), (5, None, False)]
)
def test_agreement_needs_all_three_numbers(ours, shift, agrees):
    vllm = _many(5)
    expected = None if shift is None else _hoped(vllm, shift)
    rows = compare("m", "target-only", vllm, _many(ours), expected)
    assert [row.position for row in rows] == [1, 2, 3]
    assert rows[0].agree == agrees
    assert set(FIELDS) <= as_json(rows)[0].keys()


def test_agreement_needs_small_errors():
    few = [_verified(*[index % 2] * 3) for index in range(10)]
    shuffled = few[1:] + few[:1]
    row = compare("m", "rejection", few, shuffled, _hoped(few, 0.0))[0]
    assert row.stderr > 0.01
    assert not row.agree


def test_repair_does_what_the_kernel_does():
    cu_num_tokens = torch.tensor([2, 2, 5], dtype=torch.int32)
    output = torch.full((5,), math.nan)
    cpu_repair.expand(output, torch.tensor([0.5, 9.0, 0.0]), cu_num_tokens, 0, 1)
    assert output.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
    assert not cpu_repair.is_broken(cpu_repair.expand)
    # what vLLM 0.32.0 does: writes into a copy
    assert cpu_repair.is_broken(lambda output, *rest: cpu_repair.expand(output.long(), *rest))


def test_requirements_are_those_of_this_platform_without_torch():
    lines = [
        'b[x]>=1; python_version > "3.0"',
        'c; python_version < "3.0"',
        'd; extra == "e"',
        "torch==2.13.0+cpu",
        "a",
    ]
    assert requirements.needed(lines) == ["a", "b[x]>=1"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vllm-check")
    for name in ("qwen3.5-attention", "qwen3-next"):
        models.make_folder(name, folder / name)
    return folder


@pytest.mark.parametrize("name", plants.PLANTS)
def test_planted_faults_change_the_head_and_nothing_else(exported, tmp_path, name):
    changed = plants.plant(name, exported / "qwen3.5-attention", tmp_path / name)
    before = load_file(exported / "qwen3.5-attention" / "model.safetensors")
    after = load_file(tmp_path / name / "model.safetensors")
    assert changed
    assert all(key.startswith("mtp.") for key in changed)
    assert set(changed) == {
        key for key, value in before.items() if key not in after or not torch.equal(value, after[key])
    }
    assert (tmp_path / name / "config.json").read_text() == (exported / "qwen3.5-attention" / "config.json").read_text()


def test_a_head_without_its_projection_is_told(exported, tmp_path):
    plants.plant("drop-fc", exported / "qwen3.5-attention", tmp_path / "dropped")
    job = {"model": str(tmp_path / "dropped"), "gamma": 3}
    assert expectation.expect(job) == {"missing": ["mtp.fc.weight"]}
    # and our own import does not take it
    with pytest.raises(ValueError, match=r"mtp\.fc\.weight"):
        import_checkpoint(tmp_path / "dropped", tmp_path / "mcore", note=lambda text: None)


@pytest.mark.parametrize("name", ["qwen3.5-attention", "qwen3-next"])
def test_expected_draft_steps_are_those_of_a_chain_decoded_alone(exported, name):
    # not read back: where Megatron's latent attention with YaRN has run, transformers leaves the rotary table of a
    # model that it reads as the memory was
    folder, model = exported / name, models.make_model(name)
    ids = torch.randint(0, 96, (2, 14), generator=torch.Generator().manual_seed(1))
    tensors = load_file(folder / "model.safetensors")
    block = MtpBlock(tensors, json.loads((folder / "config.json").read_text()))
    embedding = torch.nn.functional.embedding(ids, tensors["model.embed_tokens.weight"])
    with torch.no_grad():
        hidden = model.model(ids, use_cache=False).last_hidden_state
        steps = expectation.Head(folder, model.eval()).steps(ids, hidden[:, :11], 3)
        for anchor in (0, 4, 10):
            # a chain is a sequence of its own: the text up to the anchor, then what the head drafted from itself
            chain = hidden[:, : anchor + 1]
            for step, logits in enumerate(steps, start=1):
                output = block(chain, embedding[:, 1 : anchor + step + 1])[:, -1:]
                assert torch.allclose(logits[:, anchor], model.lm_head(output[:, 0]), atol=1e-4)
                chain = torch.cat([chain, output], 1)


def test_expected_prefixes_are_acceptance_over_sampled_text(exported):
    """By enumeration: acceptance of two drafts, over all tokens they may be, is the mean over texts of the target."""
    model = models.make_model("qwen3.5-attention")
    ids = torch.tensor([[5, 7, 11, 13]])
    with torch.no_grad():
        # every token that the target could put behind the anchor's confirmed one, weighted with its probability
        head = expectation.Head(exported / "qwen3.5-attention", model)
        texts = torch.cat([ids.expand(96, -1), torch.arange(96)[:, None], torch.zeros(96, 1, dtype=torch.int64)], 1)
        weights = model(ids, use_cache=False).logits[0, -1].softmax(-1).double()
        anchor = ids.shape[1] - 2
        for rule in ("rejection", "target-only"):
            found = expectation.prefixes(head, texts, rule, 2, 1.0)[:, anchor]
            hidden = model.model(texts, use_cache=False).last_hidden_state
            p = model.lm_head(hidden).softmax(-1)[:, anchor + 1 : anchor + 3].double()
            logits = torch.stack(head.steps(texts, hidden[:, :4], 2))[:, :, anchor]
            q = logits.softmax(-1).double()
            if rule == "target-only":
                q = torch.nn.functional.one_hot(logits.argmax(-1), 96).double()
            # the first step's numbers do not hang on what is put behind the anchor
            accepted_first = torch.minimum(p[0, 0], q[0, 0])
            both = sum(accepted_first[x] * torch.minimum(p[x, 1], q[1, x]).sum() for x in range(96))
            assert float(found[0, 0]) == pytest.approx(float(accepted_first.sum()), rel=1e-4)
            assert float((weights * found[:, 1]).sum()) == pytest.approx(float(both), rel=1e-4)


PUBLISHED = sorted((ROOT / "benchmarks" / "data").glob("vllm-check-*.json"))


def test_the_document_has_what_was_published():
    data = json.loads(PUBLISHED[-1].read_text())
    text = (ROOT / "docs" / "serving.md").read_text()
    assert document_with(text, PUBLISHED[-1].stem, data) == text
    rows = data["results"]
    assert len(rows) == 12
    assert len({(row["model"], row["rule"], row["position"]) for row in rows}) == 12
    for row in rows:
        assert set(FIELDS) <= row.keys()
        assert row["agree"]
        assert row["stderr"] <= 0.01
        assert abs(row["vllm"] - row["ours"]) <= 3 * row["stderr"]
        assert abs(row["vllm"] - row["expected"]) <= 3 * row["stderr"]
    for fault, found in data["planted"].items():
        assert fault in plants.PLANTS
        assert not all(row["agree"] for row in found)
    assert "| qwen3-next | target-only | 3 |" in block(data)


def test_only_a_whole_check_is_published(tmp_path):
    with pytest.raises(ValueError, match="run the check first"):
        publish(tmp_path)
    data = json.loads(PUBLISHED[-1].read_text())
    (tmp_path / "environment.json").write_text(json.dumps(data["environment"]))
    (tmp_path / "summary.json").write_text(json.dumps(data["results"][:3]))
    with pytest.raises(ValueError, match="only a whole check"):
        publish(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps(data["results"]))
    with pytest.raises(ValueError, match="plant every fault first"):
        publish(tmp_path)


def _tiny_folder(folder: Path) -> None:
    settings = MODELS[0].settings | {"vocab_size": 64, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": None}
    torch.manual_seed(1)
    config = transformers.Qwen3_5TextConfig(**settings, mtp_num_hidden_layers=1)
    transformers.Qwen3_5ForCausalLM(config).float().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    head = models.mtp_tensors(tensors, 1, settings["hidden_size"], 1, zero=True)
    save_file(tensors | head, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.vllm
@pytest.mark.skipif(not (VLLM / ".ready").exists(), reason="no vLLM: make vllm-check installs it into .venv-vllm")
def test_vllm_counts_requests_as_its_metrics_do(tmp_path):
    _tiny_folder(tmp_path / "model")
    job = {"model": str(tmp_path / "model"), "dtype": "float32", "gamma": GAMMA, "temperature": 1.0, "max_tokens": 12}
    job |= {"draft_sample_method": None, "max_num_seqs": 2, "seed": 1, "prompts": [[3, 4, 5], [6, 7], [8]]}
    (tmp_path / "job.json").write_text(json.dumps(job))
    script = ROOT / "benchmarks" / "vllm_check" / "engine.py"
    command = [VLLM / "bin" / "python", script, tmp_path / "job.json", tmp_path / "result.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["draft_sample_method"] == "greedy"
    sequences = read_sequences(result["sequences"], GAMMA)
    assert [len(each.tokens) for each in sequences] == [12, 12, 12]
    check_counters(sequences, result["counters"])
