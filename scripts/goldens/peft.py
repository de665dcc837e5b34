"""Make, or check against, the goldens of PEFT + torch in float32.

    python -m scripts.goldens.peft make          # writes tests/goldens/peft*; needs torch, transformers, peft
    python -m scripts.goldens.peft check DIR     # loads what scripts.goldens.export wrote to DIR, strictly

`make` trains every setting of `tests/goldens/peft_recipe.py` with torch.optim, transformers' schedulers and
torch's gradient clipping, and saves PEFT adapters with their logits. `check` proves that exported adapters and
merged models load with no missing and no unexpected key and give the logits that JAX computed.
"""

import json
import sys
from pathlib import Path

import numpy as np
import peft
import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.goldens import peft_recipe as recipe

GOLDENS = Path(recipe.__file__).parent
VERSIONS = {m.__name__: m.__version__ for m in (torch, transformers, peft, np)}


def base_model(family: str) -> torch.nn.Module:
    """Build the recipe's model in float32 with eager attention."""
    values = dict(recipe.MODELS[family])
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    state = {name: torch.from_numpy(w) for name, w in recipe.weights(recipe.MODELS[family]).items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model


def lora_model(setting: dict) -> peft.PeftModel:
    """Wrap the base in PEFT as a setting asks."""
    config = peft.LoraConfig(
        r=setting["rank"],
        lora_alpha=setting["alpha"],
        use_rslora=setting.get("use_rslora", False),
        target_modules=setting.get("targets", list(recipe.SITES)),
        rank_pattern=setting.get("rank_pattern", {}),
        alpha_pattern=setting.get("alpha_pattern", {}),
        task_type="CAUSAL_LM",
    )
    return peft.get_peft_model(base_model(setting["model"]), config)


def set_adapter(model: peft.PeftModel, random_b: bool = False) -> None:
    """Give every adapter tensor its value from the recipe."""
    shapes = {key: tuple(t.shape) for key, t in peft.get_peft_model_state_dict(model).items()}
    drawn = {key: torch.from_numpy(w) for key, w in recipe.adapter(shapes, random_b).items()}
    assert not peft.set_peft_model_state_dict(model, drawn).unexpected_keys


def scheduler(optimizer: torch.optim.Optimizer, setting: dict) -> torch.optim.lr_scheduler.LambdaLR:
    """Return transformers' schedule; the warmup ratio rounds up, as in TrainingArguments."""
    warmup = setting.get("warmup_steps")
    if warmup is None:
        warmup = int(np.ceil(setting.get("warmup_ratio", 0.0) * recipe.STEPS))
    return named_schedule(setting["scheduler"], optimizer, warmup, recipe.STEPS)


def named_schedule(
    name: str, optimizer: torch.optim.Optimizer, warmup: int, total: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return transformers' schedule of this name; its `constant` has no warmup, so the one with it is taken."""
    return transformers.get_scheduler(
        "constant_with_warmup" if name == "constant" else name, optimizer, warmup, total
    )


def rates(name: str, warmup: int, total: int) -> list[float]:
    """Return the factor on the learning rate at every optimizer step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, out = named_schedule(name, optimizer, warmup, total), []
    for _ in range(total):
        out.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return out


def token_losses(model: torch.nn.Module, rows: list) -> torch.Tensor:
    """Return the sum of the label tokens' losses over padded rows."""
    length = max(len(tokens) for tokens, _ in rows)
    tokens = torch.zeros((len(rows), length), dtype=torch.long)
    labels = torch.full((len(rows), length), -100)
    mask = torch.zeros((len(rows), length), dtype=torch.long)
    for i, (row, trained) in enumerate(rows):
        tokens[i, : len(row)] = torch.from_numpy(row)
        labels[i, : len(row)] = torch.where(torch.from_numpy(trained), torch.from_numpy(row).long(), -100)
        mask[i, : len(row)] = 1
    logits = model(input_ids=tokens, attention_mask=mask).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )


def train(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    """Train one setting and return its records and its final adapter."""
    setting = recipe.DEFAULTS | recipe.SETTINGS[name]
    model = lora_model(setting)
    set_adapter(model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    rate, decay = setting["learning_rate"], setting.get("weight_decay", 0.0)
    if setting.get("optimizer") == "sgd":
        optimizer = torch.optim.SGD(trainable, rate, setting.get("momentum", 0.0), weight_decay=decay)
    else:
        betas = (setting.get("beta1", 0.9), setting.get("beta2", 0.999))
        optimizer = torch.optim.AdamW(trainable, rate, betas, setting.get("eps", 1e-8), decay)
    schedule = scheduler(optimizer, setting)
    rows, size = recipe.rows(name), setting["batch_size"]
    micro = setting.get("micro", size)
    records: dict[str, list] = {"loss": [], "lr": [], "grad_norm": [], "tokens": []}
    for step in range(recipe.STEPS):
        batch = rows[step * size : (step + 1) * size]
        # over the whole optimizer batch; a label at position 0 has nothing that predicts it
        count = sum(int(trained[1:].sum()) for _, trained in batch)
        total = 0.0
        for start in range(0, size, micro):
            loss = token_losses(model, batch[start : start + micro]) / max(count, 1)
            loss.backward()
            total += loss.item()
        limit = setting["max_grad_norm"] or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(trainable, limit)
        records["loss"].append(total)
        records["lr"].append(schedule.get_last_lr()[0])
        records["grad_norm"].append(norm.item())
        records["tokens"].append(count)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    state = peft.get_peft_model_state_dict(model)
    return records, {key: value.detach().numpy() for key, value in state.items()}


def probe_logits(model: torch.nn.Module) -> np.ndarray:
    """Return logits at the probe tokens."""
    with torch.no_grad():
        return model(input_ids=torch.from_numpy(recipe.probe()).long()).logits.numpy()


def make() -> None:
    """Write the goldens."""
    torch.manual_seed(0)
    records, adapters = {}, {}
    for name in recipe.SETTINGS:
        records[name], final = train(name)
        adapters |= {f"{name}/{key}": np.ascontiguousarray(value) for key, value in final.items()}
        loss = records[name]["loss"]
        print(f"{name:20s} loss {loss[0]:.4f} -> {loss[-1]:.4f}")
    save_file(adapters, GOLDENS / "peft_adapters.safetensors")
    checksums = {f: recipe.checksum(recipe.weights(c)) for f, c in recipe.MODELS.items()}
    schedules = [
        {"scheduler": name, "warmup": warmup, "total": total, "factor": rates(name, warmup, total)}
        for name in ("constant", "linear", "cosine")
        for warmup, total in recipe.SCHEDULES
    ]
    golden = {"versions": VERSIONS, "checksums": checksums, "schedules": schedules, "settings": records}
    (GOLDENS / "peft.json").write_text(json.dumps(golden, indent=1) + "\n")

    logits = {}
    for family, name in (("llama", "attention_betas"), ("qwen2", "patterns")):
        model = lora_model(recipe.SETTINGS[name])
        logits[f"{family}_base"] = probe_logits(base_model(family))
        set_adapter(model, random_b=True)
        logits[family] = probe_logits(model)
        moved = np.abs(logits[family] - logits[f"{family}_base"]).max()
        print(f"{family}: the adapter moves logits by {moved:.2f}")
        model.save_pretrained(GOLDENS / f"peft_made_{family}")
        (GOLDENS / f"peft_made_{family}" / "README.md").unlink()
    save_file(logits, GOLDENS / "peft_logits.safetensors")
    print(VERSIONS)


def check(directory: Path) -> None:
    """Load every exported adapter and merged model strictly and compare logits."""
    ours = load_file(directory / "logits.safetensors")
    for name, expected in ours.items():
        folder, family = directory / name, name.split("-")[0]
        if (folder / "adapter_config.json").exists():
            config = peft.PeftConfig.from_pretrained(folder)
            model = peft.get_peft_model(base_model(family), config).eval()
            wanted = set(peft.get_peft_model_state_dict(model))
            tensors = {
                k: torch.from_numpy(v) for k, v in load_file(folder / "adapter_model.safetensors").items()
            }
            result = peft.set_peft_model_state_dict(model, tensors)
            assert wanted == set(tensors), wanted ^ set(tensors)
            assert not result.unexpected_keys, result.unexpected_keys
            loaded = peft.PeftModel.from_pretrained(base_model(family), folder).eval()
            assert np.array_equal(probe_logits(loaded), probe_logits(model))
        else:
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
            )
            assert not any(info.values()), info
        moved = np.abs(expected - probe_logits(base_model(family))).max()
        error = np.abs(expected - probe_logits(model)).max()
        print(f"{name:28s} max |logits - ours| {error:.1e}; the adapter moves them by {moved:.2f}")
        assert error < 1e-4 and moved > 0.1
    print(f"{len(ours)} directories agree; {VERSIONS}")


if __name__ == "__main__":
    if sys.argv[1:] == ["make"]:
        make()
    elif len(sys.argv) == 3 and sys.argv[1] == "check":
        check(Path(sys.argv[2]))
    else:
        sys.exit(__doc__)
