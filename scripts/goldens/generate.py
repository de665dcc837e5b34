"""Make tests/goldens/generate.json: greedy generation of tiny models by transformers, peft and torch.

    python scripts/goldens/generate.py

needs torch, transformers and peft, which the project itself never imports. Models are those of
scripts/goldens/models.py; the adapters' weights come from their tensors' names, as tests/models/tiny.py makes them.
Each model generates without an adapter and with each of three, all prompts in one batch, padded on the left. EOS is a
token that ends some of the answers early.
"""

import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[0] = str(ROOT)  # not this folder: its peft.py would hide the package

import numpy as np  # noqa: E402
import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from scripts.goldens.models import CASES, TINY  # noqa: E402
from tests.models.seeded import seeded  # noqa: E402

OUT = ROOT / "tests" / "goldens" / "generate.json"
MODELS = ["llama", "qwen2-tied", "gemma2", "smollm3", "mistral-window", "phi3-longrope-long"]
LENGTHS = [1, 4, 9, 13, 14, 19]
NEW = 24
GAIN = 4.0  # of the layers' outputs, so that what comes before a token counts beside the token itself
ADAPTERS = [{"rank": 2, "alpha": 4.0}, {"rank": 3, "alpha": 6.0}, {"rank": 5, "alpha": 2.0}]


def seed(model, norm_mean, prefix=""):
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if prefix and "lora_" not in key:
                continue
            key = key.removeprefix("base_model.model.").replace(".default", "").replace(".base_layer", "")
            gain = GAIN if key.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            parameter.copy_(torch.from_numpy(gain * seeded(prefix + key, tuple(parameter.shape), norm_mean)))


def generate(model, prompts, eos, alone):
    """Return the new tokens of each prompt, up to and with EOS, and the least margin of a choice over the next best."""
    batches = [[p] for p in prompts] if alone else [prompts]
    out, margin = [], np.inf
    for batch in batches:
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        made = {}
        for cached in (True, False):
            made[cached] = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=NEW,
                eos_token_id=eos,
                pad_token_id=0,
                use_cache=cached,
                output_scores=True,
                return_dict_in_generate=True,
            )
        assert torch.equal(made[True].sequences, made[False].sequences)
        new = made[True].sequences[:, width:].tolist()
        for row, tokens in enumerate(new):
            ends = [i for i, token in enumerate(tokens) if eos is not None and token == eos]
            kept = tokens[: ends[0] + 1] if ends else tokens
            out.append(kept)
            for scores in made[True].scores[: len(kept)]:
                top = torch.topk(scores[row], 2).values
                margin = min(margin, float(top[0] - top[1]))
    return out, margin


def make(name):
    model_type, more, _ = CASES[name]
    config = AutoConfig.for_model(
        model_type, **{**TINY, **json.loads(json.dumps(more)), "tie_word_embeddings": False}
    )
    config._attn_implementation = "eager"
    rng = np.random.default_rng(len(name))
    prompts = [rng.integers(3, TINY["vocab_size"], n).tolist() for n in LENGTHS]
    norm_mean = 0.0 if model_type.startswith("gemma") else 1.0
    alone = "longrope" in name  # transformers chooses the factors for a whole batch

    def models():
        for i in range(-1, len(ADAPTERS)):
            model = AutoModelForCausalLM.from_config(config).float().eval()
            seed(model, norm_mean)
            if i >= 0:
                lora = LoraConfig(
                    r=ADAPTERS[i]["rank"], lora_alpha=ADAPTERS[i]["alpha"], target_modules="all-linear"
                )
                model = get_peft_model(model, lora).eval()
                seed(model, norm_mean, f"{i}.")
            yield model

    free = [row for model in models() for row in generate(model, prompts, None, alone)[0]]
    ends = Counter(token for row in free for token in set(row[1:15]))
    eos = min(sorted(ends), key=lambda token: abs(ends[token] - len(free) / 3))
    tokens, margins = zip(*(generate(model, prompts, eos, alone) for model in models()), strict=True)
    early = sum(len(row) < NEW for rows in tokens for row in rows)
    print(
        name, "eos", eos, "early", early, "of", len(free), "margin", min(margins),
        "distinct", np.mean([len(set(row)) for rows in tokens for row in rows]),
    )  # fmt: skip
    assert min(margins) > 1e-4 and len(free) / 4 <= early <= len(free) / 2
    assert all(a != b for i, a in enumerate(tokens) for b in tokens[:i])
    written = config.to_dict()
    noise = ("id2label", "label2id", "transformers_version", "return_dict", "problem_type", "architectures")
    return {
        "config": {k: v for k, v in written.items() if k not in noise},
        "prompts": prompts,
        "eos": eos,
        "new": NEW,
        "adapters": ADAPTERS,
        "tokens": tokens,  # of the base, then of each adapter
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    golden = {name: make(name) for name in MODELS}
    OUT.write_text(json.dumps(golden) + "\n", encoding="utf-8")
