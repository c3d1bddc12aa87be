"""Training through Megatron Bridge, as a user starts it, against our own entry point over Megatron's loop.

Catches: a loss mask that never reaches the MTP loss, another normalisation, a frozen part that moves, a schedule that
starts anew at a resume, metrics that are logged nowhere, recipes whose settings Bridge does not have.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.launch import ROOT, log, pretrain
from tests.saved import saved_tensors

pytestmark = [
    pytest.mark.bridge,
    pytest.mark.skipif(importlib.util.find_spec("modelopt") is None, reason="needs Megatron Bridge: make bridge-check"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform"),
]

FAMILIES = {"qwen3": "qwen3", "qwen3_next": "qwen3-next", "qwen3_5": "qwen3.5", "qwen3_5-moe": "qwen3.5-moe"}
SCHEDULE = "none:2,backbone:2,mtp:2"
TINY = """model.tensor_model_parallel_size=1 model.sequence_parallel=false model.mtp_num_layers=2 model.seq_length=32
dataset.seq_length=32 dataset.split=100,0,0 dataset.num_workers=0 validation.eval_iters=0 train.global_batch_size=4
train.micro_batch_size=2 optimizer.lr=1e-2 optimizer.min_lr=1e-2 scheduler.lr_warmup_iters=0 logger.log_interval=1
ddp.overlap_grad_reduce=false ddp.overlap_param_gather=false tokenizer.tokenizer_type=NullTokenizer
tokenizer.tokenizer_model=null tokenizer.vocab_size=95""".split()
PLAIN_ADAM = ["ddp.use_distributed_optimizer=false", "optimizer.use_distributed_optimizer=false"]
ONE_EXPERT_RANK = ["model.expert_model_parallel_size=1"]
MEGATRON = """--seq-length 32 --vocab-size 96 --make-vocab-size-divisible-by 96 --split 100,0,0 --eval-iters 0
--weight-decay 0 --mtp-loss-scaling-factor 1.0 --mtp-loss tv --mtp-attention chain --train-iters 6""".split()


class Runs:
    """Logs of all runs, the checkpoints of the first, and what Megatron's own loop printed."""

    def __init__(self, root: Path) -> None:
        from bebop_megatron.convert import import_checkpoint
        from tests.bridges import models
        from tests.bridges.prompts import write_prompts

        self.root = root
        for name in FAMILIES.values():
            models.make_folder(name, root / name / "hf")
            config = root / name / "hf" / "config.json"
            settings = json.loads(config.read_text())
            settings["rope_parameters"]["rope_theta"] = 1e7 if name != "qwen3" else 1e6
            config.write_text(json.dumps(settings))
            import_checkpoint(root / name / "hf", root / name / "mcore", kind="gpt", depth=2, note=lambda _: None)
        write_prompts(root / "data", 96)
        common = [f"dataset.data_path={root}/data", f"dataset.path_to_cache={root}/cache", *TINY]
        saved = [f"checkpoint.{key}={root}/out" for key in ("save", "load")]
        runs = {}
        ours = ["qwen3", *self._model("qwen3"), *common, *PLAIN_ADAM, f"freezing.schedule={SCHEDULE}"]
        runs["ours"] = ["run", *ours, *saved, "checkpoint.save_interval=1", "train.train_iters=6"]
        runs["resumed"] = ["run", *ours, saved[1], "checkpoint.ckpt_step=3", "train.train_iters=6"]
        runs["stock"] = ["stock", *ours, "train.train_iters=1", f"checkpoint.save={root}/stock"]
        for recipe, name in FAMILIES.items():
            settings = [*self._model(name), *common, *(ONE_EXPERT_RANK if name != "qwen3" else [])]
            recipe = recipe.partition("-")[0]
            runs[f"built-{name}"] = ["build", recipe, *settings]
            if name != "qwen3":
                where = [f"checkpoint.{key}={root}/out-{name}" for key in ("save", "load")]
                runs[f"trained-{name}"] = ["run", recipe, *settings, *where, "train.train_iters=2"]
        sharded = ["model.tensor_model_parallel_size=2", "model.sequence_parallel=true"]
        runs["tp2"] = ["pair", *ours, *sharded, f"checkpoint.save={root}/tp2", "train.train_iters=4"]
        self.codes = self._fork(runs)
        flags = (root / "qwen3" / "mcore" / "megatron_arguments.txt").read_text().split()
        data = ["--data-path", f"{root}/data", "--data-cache-path", f"{root}/cache-megatron"]
        start = ["--pretrained-checkpoint", f"{root}/qwen3/mcore", "--mtp-freeze-schedule", SCHEDULE]
        done = pretrain(*MEGATRON, *data, *start, mock_data=False, model=flags)
        assert done.returncode == 0, done.stderr[-3000:]
        self.megatron = log(done.stdout)

    def _model(self, name: str) -> list[str]:
        return [f"hf={self.root}/{name}/hf", f"checkpoint.pretrained_checkpoint={self.root}/{name}/mcore"]

    def _fork(self, runs: dict[str, list[str]]) -> dict[str, int]:
        command = [sys.executable, "-W", "ignore", "-m", "tests.bridges.bridge_process", str(self.root)]
        environment = os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
        subprocess.run(
            command, input=json.dumps(runs), text=True, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL
        )
        return json.loads((self.root / "codes.json").read_text())

    def text(self, name: str) -> str:
        """The output of a run that has to have succeeded."""
        text = (self.root / f"{name}.log").read_text()
        assert self.codes[name] == 0, text[-3000:]
        return text

    def saved(self, iteration: int) -> dict[str, torch.Tensor]:
        """Every tensor of a checkpoint of the first run, with its optimizer's."""
        state = saved_tensors(self.root / "out" / f"iter_{iteration:07d}", optimizer=True)
        return {name: value for name, value in state.items() if "rng" not in name}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("bridge")
    yield Runs(root)
    shutil.rmtree(root)


def test_losses_and_acceptance_are_those_of_megatrons_loop(runs):
    ours = log(runs.text("ours"))
    assert sorted(ours) == sorted(runs.megatron) == [1, 2, 3, 4, 5, 6]
    for iteration, line in ours.items():
        expected = runs.megatron[iteration]
        names = {name for name in expected if name.startswith("mtp ")} | {"lm loss", "grad norm", "freeze phase"}
        if iteration == 2:
            # Megatron's second log line after a start averages over the first as well
            names.remove("lm loss")
        assert len(names) > 10 or iteration > 4
        for name in sorted(names):
            if name == "freeze phase":
                assert line[name] == expected[name]
            else:
                assert float(line[name]) == pytest.approx(float(expected[name]), rel=2e-6, abs=1e-9), (iteration, name)


def test_two_ranks_that_share_every_layer_give_the_same_losses(runs):
    one, two = log(runs.text("ours")), log(runs.text("tp2"))
    assert sorted(two) == [1, 2, 3, 4]
    for iteration, line in two.items():
        judged = [
            name for name in one[iteration] if name.startswith(("mtp tv", "mtp alpha", "mtp accept", "lm loss", "grad"))
        ]
        assert len(judged) > 6 or iteration == 4
        for name in judged:
            assert float(line[name]) == pytest.approx(float(one[iteration][name]), rel=1e-5, abs=1e-8), (
                iteration,
                name,
            )


def test_bridges_own_forward_step_trains_on_prompts(runs):
    stock, ours = log(runs.text("stock"))[1], log(runs.text("ours"))[1]
    assert stock["lm loss"] == ours["lm loss"]
    assert abs(float(stock["mtp tv loss"]) - float(ours["mtp tv loss"])) > 1e-3


@pytest.mark.parametrize(("part", "first", "last"), [("backbone", 2, 4), ("mtp", 4, 6)])
def test_frozen_part_is_bit_identical_and_the_other_moves(runs, part, first, last):
    runs.text("ours")
    before, after = runs.saved(first), runs.saved(last)
    assert before.keys() == after.keys()
    moved = {"mtp": [], "backbone": []}
    for name, value in before.items():
        if not torch.equal(value, after[name]):
            moved["mtp" if "mtp" in name.split(".") else "backbone"].append(name)
    (other,) = set(moved) - {part}
    assert not moved[part]
    assert any(name.startswith("optimizer.") for name in moved[other])
    assert any(not name.startswith("optimizer.") for name in moved[other])


def test_run_resumed_inside_a_phase_continues_it(runs):
    resumed, whole = log(runs.text("resumed")), log(runs.text("ours"))
    assert sorted(resumed) == [4, 5, 6]
    assert resumed == {iteration: whole[iteration] for iteration in resumed}


@pytest.mark.parametrize("name", FAMILIES.values())
def test_recipe_is_built(runs, name):
    assert json.loads(runs.text(f"built-{name}").splitlines()[-1]) == [2, True, 2]


@pytest.mark.parametrize("name", [name for name in FAMILIES.values() if name != "qwen3"])
def test_recipe_trains_the_head_of_its_family(runs, name):
    lines = log(runs.text(f"trained-{name}"))
    assert sorted(lines) == [1, 2]
    assert lines[1]["freeze phase"].startswith("backbone frozen")
    assert 0 < float(lines[1]["mtp tv loss"]) < 1
    assert float(lines[1]["mtp grad norm"]) > 0
    assert lines[1]["mtp tv loss"] != lines[2]["mtp tv loss"]


@pytest.mark.parametrize("name", [name for name in FAMILIES.values() if name != "qwen3"])
def test_adapted_head_is_exported_over_an_untouched_backbone(runs, name):
    from bebop_megatron.convert import export_checkpoint
    from tests.bridges import models

    runs.text(f"trained-{name}")
    folder = runs.root / name
    export_checkpoint(runs.root / f"out-{name}", folder / "hf", folder / "served", note=lambda _: None)
    before, after = models.read_folder(folder / "hf"), models.read_folder(folder / "served")
    assert before.keys() == after.keys()
    same = {key: torch.equal(value, after[key]) for key, value in before.items()}
    assert {key for key, equal in same.items() if not equal} == {key for key in before if key.startswith("mtp.")}
