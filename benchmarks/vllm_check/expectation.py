"""What acceptance to expect, from the exported Hugging Face weights and transformers' own classes alone.

A process of its own: `python -m benchmarks.vllm_check.expectation JOB.json RESULT.json`. JOB: model, rule, gamma,
temperature, prompts, sequences (of the engine). RESULT: for each prompt, for each verification that is compared, the
probabilities that it accepts its first 1, 2, ... drafts; or `missing`, tensors that the folder lacks.

No code of the evaluator is used, so that one mistake cannot be on both sides. Step i at anchor t is given the hidden
state of step i-1 and the embedding of x_{t+i}, sits at rotary position t+i-1, attends to step 1 at positions up to t
and to its own chain, and drafts x_{t+i+1}, whose target is p_{t+i}. The text was sampled from the target, so that

    E[ prod_{k<i} w_k * a_i ],    rejection: w = min(1, q(x)/p(x)), a = sum min(p, q)
                                  target-only: w = [x = argmax q], a = p(argmax q)

is the probability that a verification accepts its first i drafts: w_k turns a text that was sampled into one whose
token k was drafted and accepted.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.vllm_check.verifications import read_sequences

_BATCH = 16
_OUTER = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")


class MissingTensors(Exception):
    """The folder lacks tensors of the head; `names` are those that could be told."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(", ".join(names))
        self.names = names


def _fused_experts(layer: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts as transformers holds them: one tensor for all."""
    count = 1 + max((int(name.split(".")[2]) for name in layer if name.startswith("mlp.experts.")), default=-1)
    if not count:
        return layer
    take = lambda e, part: layer[f"mlp.experts.{e}.{part}_proj.weight"]  # noqa: E731
    kept = {name: value for name, value in layer.items() if not name.startswith("mlp.experts.")}
    gate_up = [torch.cat([take(e, "gate"), take(e, "up")]) for e in range(count)]
    down = [take(e, "down") for e in range(count)]
    return kept | {"mlp.experts.gate_up_proj": torch.stack(gate_up), "mlp.experts.down_proj": torch.stack(down)}


class Head:
    """The MTP head of a folder, built from the family's decoder layer and norm. Computes in float32."""

    def __init__(self, folder: Path, model: Any) -> None:
        from safetensors.torch import load_file

        tensors: dict[str, Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            tensors |= {name: value.float() for name, value in load_file(file).items() if name.startswith("mtp.")}
        missing = [f"mtp.{name}.weight" for name in _OUTER if f"mtp.{name}.weight" not in tensors]
        if missing:
            raise MissingTensors(missing)
        self.model, config = model, model.config
        modeling = importlib.import_module(type(model).__module__)
        family = type(model).__name__.removesuffix("ForCausalLM")
        attention = config.layer_types.index("full_attention")
        self.layer = getattr(modeling, f"{family}DecoderLayer")(config, attention).float().eval()
        inner = {name.removeprefix("mtp.layers.0."): value for name, value in tensors.items() if ".layers.0." in name}
        found = self.layer.load_state_dict(_fused_experts(inner), strict=False)
        if found.missing_keys or found.unexpected_keys:
            raise MissingTensors([f"mtp.layers.0.{name}" for name in (*found.missing_keys, *found.unexpected_keys)])
        self.fc = tensors["mtp.fc.weight"]
        norm = getattr(modeling, f"{family}RMSNorm")
        self.norms = {}
        for name in _OUTER[1:]:
            self.norms[name] = norm(config.hidden_size, eps=config.rms_norm_eps)
            self.norms[name].weight.data.copy_(tensors[f"mtp.{name}.weight"])

    def _input(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        embedding = self.norms["pre_fc_norm_embedding"](self.model.model.embed_tokens(tokens))
        return torch.cat([embedding, self.norms["pre_fc_norm_hidden"](hidden)], -1) @ self.fc.T

    def _rotary(self, inputs: Tensor, positions: Tensor) -> Any:
        positions = positions.expand(len(inputs), -1)
        if "mrope_section" in (getattr(self.model.config, "rope_parameters", None) or {}):
            # text advances all three coordinates together
            positions = positions.expand(3, *positions.shape)
        return self.model.model.rotary_emb(inputs, positions)

    def steps(self, ids: Tensor, hidden: Tensor, gamma: int) -> list[Tensor]:
        """Logits of the draft steps at every anchor.

        Shape: ids [b, s] (x_0 ..), hidden [b, n, h] of anchors 0 .. n-1 with n = s - gamma -> gamma times [b, n, v].
        """
        n = hidden.shape[1]
        anchors = torch.arange(n)
        inputs, positions, out = [], [], []
        for step in range(1, gamma + 1):
            inputs.append(self._input(ids[:, step : step + n], hidden))
            positions.append(anchors + step - 1)
            # all steps so far in one sequence, step after step
            of_step = torch.arange(1, step + 1).repeat_interleave(n)
            at, seen_from = anchors.repeat(step), anchors.repeat(step)[:, None]
            earlier = (of_step == 1) & (at <= seen_from)
            own = (of_step > 1) & (of_step <= of_step[:, None]) & (at == seen_from)
            mask = torch.zeros(n * step, n * step).masked_fill(~(earlier | own), torch.finfo(torch.float32).min)
            everything = torch.cat(inputs, 1)
            rotary = self._rotary(everything, torch.cat(positions)[None])
            output = self.layer(everything, position_embeddings=rotary, attention_mask=mask[None, None])
            output = output[0] if isinstance(output, tuple) else output
            hidden = self.norms["norm"](output[:, -n:])
            out.append(self.model.lm_head(hidden))
        return out


def prefixes(head: Head, ids: Tensor, rule: str, gamma: int, temperature: float) -> Tensor:
    """Prefix acceptance at every anchor with gamma more tokens behind it.

    Shape: ids [b, s] int64 -> [b, s - gamma, gamma] float64.
    """
    hidden = head.model.model(ids, use_cache=False).last_hidden_state
    target = (head.model.lm_head(hidden) / temperature).softmax(-1)
    n = ids.shape[1] - gamma
    # the last step has no token to weigh with, and needs none
    following = torch.cat([ids, ids.new_zeros(len(ids), 1)], 1)
    before, out = torch.ones(len(ids), n, dtype=torch.float64), []
    for step, logits in enumerate(head.steps(ids, hidden[:, :n], gamma), start=1):
        p, q = target[:, step : step + n], (logits / temperature).softmax(-1)
        token = following[:, step + 1 : step + 1 + n, None]
        if rule == "rejection":
            step_accepts = torch.minimum(p, q).sum(-1)
            weight = (q.gather(-1, token) / p.gather(-1, token)).clamp(max=1)[..., 0]
        else:
            best = logits.argmax(-1, keepdim=True)
            step_accepts = p.gather(-1, best)[..., 0]
            weight = (best == token)[..., 0]
        out.append(before * step_accepts.double())
        before = before * weight.double()
    return torch.stack(out, -1)


def expect(job: dict[str, Any]) -> dict[str, Any]:
    """Prefix acceptance of the engine's verifications that are compared."""
    import transformers

    torch.set_grad_enabled(False)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        job["model"], dtype=torch.float32, attn_implementation="eager"
    ).eval()
    gamma = job["gamma"]
    try:
        head = Head(Path(job["model"]), model)
    except MissingTensors as error:
        return {"missing": error.names}
    sequences = read_sequences(job["sequences"], gamma)
    texts = [[*prompt, *each.tokens] for prompt, each in zip(job["prompts"], sequences, strict=True)]
    out: list[list[list[float]]] = []
    for first in range(0, len(texts), _BATCH):
        part = texts[first : first + _BATCH]
        # nothing looks ahead, so that padding behind a text changes nothing in it
        longest = max(map(len, part))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in part])
        values = prefixes(head, ids, job["rule"], gamma, job["temperature"])
        for index, row in enumerate(values, start=first):
            anchors = [len(job["prompts"][index]) + start - 2 for start, _ in sequences[index].compared()]
            out.append(row[anchors].tolist())
    return {"prefixes": out}


if __name__ == "__main__":
    outcome = json.dumps(expect(json.loads(Path(sys.argv[1]).read_text())))
    Path(sys.argv[2]).write_text(outcome)
