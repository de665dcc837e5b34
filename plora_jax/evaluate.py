"""Score adapters on held-out rows, all adapters of a pack at once, and the base model by the same code."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32

from planner import rank_bucket
from planner.memory import HEAD_CHUNK
from plora_jax.adapters import (
    Adapter,
    Stack,
    max_rank,
    pad_adapter,
    ranks,
    stack_adapters,
    stack_scales,
)
from plora_jax.data.choices import Choices, accuracy, make_choices
from plora_jax.data.encode import read_examples
from plora_jax.data.examples import Examples
from plora_jax.data.shapes import split_lengths
from plora_jax.errors import UserError
from plora_jax.jobs import Job
from plora_jax.losses import token_losses
from plora_jax.models.attention import choose_attention
from plora_jax.models.decoder import LoRA, Runtime
from plora_jax.models.find import load_config, load_tokenizer
from plora_jax.models.load import Base, load_base
from plora_jax.peft import import_adapter
from plora_jax.rundir import write_json

HIGHER_IS_BETTER = {"loss": False, "choice_accuracy": True}


@dataclass(frozen=True)
class Score:
    """Hold one model's result: `score` is the metric's value, `loss` the mean over trained tokens."""

    score: float
    loss: float
    rows: int
    tokens: int


@dataclass
class Requests:
    """Collect (sequence, position, target) triples whose log-probabilities are wanted.

    A sequence that begins another one is not run by itself: the model is causal, so its positions are read off the
    longer one. Prompt, options and the completion of a row therefore usually cost one row of compute.
    """

    sequences: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    targets: list[np.ndarray] = field(default_factory=list)
    size: int = 0

    def add(
        self, sequence: np.ndarray, positions: np.ndarray, targets: np.ndarray
    ) -> Int32[np.ndarray, " n"]:
        """Ask for the log-probability of `targets` after `positions`; return where the results will stand."""
        self.sequences.append(np.asarray(sequence[: int(positions.max()) + 1], np.int32))
        self.positions.append(np.asarray(positions, np.int32))
        self.targets.append(np.asarray(targets, np.int32))
        start, self.size = self.size, self.size + len(targets)
        return np.arange(start, self.size, dtype=np.int32)

    @property
    def tokens(self) -> int:
        """Count the tokens that are run to answer everything."""
        return sum(len(self.sequences[group[0]]) for group in self.carriers())

    def carriers(self) -> list[list[int]]:
        """Group requests by the sequence that carries them: the first of each group begins with all the others."""
        order = sorted(range(len(self.sequences)), key=lambda i: self.sequences[i].tolist(), reverse=True)
        groups: list[list[int]] = []
        for i in order:
            carrier = self.sequences[groups[-1][0]] if groups else None
            mine = self.sequences[i]
            if carrier is not None and np.array_equal(carrier[: len(mine)], mine):
                groups[-1].append(i)
            else:
                groups.append([i])
        return sorted(groups, key=lambda group: len(self.sequences[group[0]]))


Scales = dict[str, Float[Array, "L J"]]
EvalStep = Callable[[Stack, Scales, nnx.State, Array, Array, Array, Array, Array], Array]


def runtime_for(base: Base, recompute: str = "none") -> Runtime:
    """Choose how a base model runs here: in its own dtype, attention by what the device has, one example a sequence."""
    dtype = jax.tree.leaves(base.params)[0].dtype
    attention = choose_attention(base.config, dtype, jax.default_backend())
    return Runtime(attention, recompute, dtype, segments=False)  # type: ignore[arg-type]


def make_eval_step(base: Base, runtime: Runtime | None = None) -> EvalStep:
    """Return the jitted step that gives -log p of every target [J, B, P], all J adapters on the same tokens."""
    return _eval_step(base.graphdef, runtime or Runtime())


@lru_cache(maxsize=32)
def _eval_step(graphdef: nnx.GraphDef, runtime: Runtime) -> EvalStep:
    def one(jobs: int, weights: Stack, scales: Scales, params: nnx.State, *batch: Array) -> Array:
        tokens, positions, rows, trained, targets = batch
        model = nnx.merge(graphdef, params)
        sites = {name: LoRA(w.a, w.b, scales[name]) for name, w in weights.items()}
        hidden = model.hidden(tokens, positions, rows, sites, None, runtime=runtime)
        return token_losses(model, hidden, trained, targets, max(1, HEAD_CHUNK // jobs), runtime)

    @jax.jit
    def step(weights: Stack, *rest: Any) -> Array:
        jobs = jax.tree.leaves(weights)[0].shape[1]
        return jax.vmap(partial(one, jobs), in_axes=(1, 1, None, None, None, None, None, None))(
            weights, *rest
        )

    return step


class Scorer:
    """Score adapters of one base model, many at a time, with one compiled step for each shape that occurs."""

    def __init__(self, base: Base, runtime: Runtime | None = None) -> None:
        self.base = base
        self.step = make_eval_step(base, runtime)
        # tokens at once, over all adapters
        self.budget = 8_192 if jax.default_backend() == "cpu" else 65_536

    def score(
        self,
        adapters: Sequence[tuple[Job, Adapter] | None],
        evals: "EvalSet",
        advance: Callable[[float], None] = lambda tokens: None,
    ) -> list[Score]:
        """Return each adapter's score on one held-out part; None stands for the base model itself.

        `advance` is told the tokens scored, over all adapters, as they are done.
        """
        config = self.base.config
        jobs = [Job(rank=1, targets=(config.sites[0].name,)) if a is None else a[0] for a in adapters]
        bucket = rank_bucket(max(max_rank(config, job) for job in jobs))
        used = {name for job in jobs for name in ranks(config, job)}
        sites = [site.name for site in config.sites if site.name in used]
        padded = [pad_adapter(config, a[1] if a else {}, bucket, sites) for a in adapters]
        weights, scales = stack_adapters(padded), stack_scales(config, jobs, sites)
        return [score(evals, row) for row in self._log_p(weights, scales, evals.requests, len(jobs), advance)]

    def _log_p(
        self, weights: Stack, scales: Scales, requests: Requests, jobs: int, advance: Callable[[float], None]
    ) -> Float[np.ndarray, "J N"]:
        out = np.zeros((jobs, requests.size))
        starts = np.cumsum([0] + [len(t) for t in requests.targets])
        groups = requests.carriers()
        lengths = np.array([len(requests.sequences[group[0]]) for group in groups])
        tops = split_lengths(lengths, 1 + len(groups) // 128)
        for low, length in zip([0, *tops], tops, strict=False):
            fits = [groups[i] for i in np.flatnonzero((lengths > low) & (lengths <= length))]
            batches = -(-len(fits) // max(1, self.budget // (length * jobs)))
            size = -(-len(fits) // batches)
            width = max(sum(len(requests.targets[i]) for i in group) for group in fits)
            for start in range(0, len(fits), size):
                part = fits[start : start + size]
                arrays, ids = _batch(requests, part, starts, size, length, width)
                losses = np.asarray(self.step(weights, scales, self.base.params, *arrays), np.float64)
                out[:, ids[ids >= 0]] = -losses[:, ids >= 0]
                advance(jobs * sum(len(requests.sequences[group[0]]) for group in part))
        return out


def _batch(
    requests: Requests,
    groups: Sequence[Sequence[int]],
    starts: np.ndarray,
    size: int,
    length: int,
    width: int,
) -> tuple[tuple[Any, ...], Int32[np.ndarray, "B P"]]:
    tokens, rows = np.zeros((size, length), np.int32), np.full((size, length), -1, np.int32)
    trained, targets = np.zeros((size, width), np.int32), np.full((size, width), -1, np.int32)
    ids = np.full((size, width), -1, np.int64)
    for row, group in enumerate(groups):
        sequence = requests.sequences[group[0]]
        tokens[row, : len(sequence)], rows[row, : len(sequence)] = sequence, row
        at = 0
        for i in group:
            n = len(requests.targets[i])
            trained[row, at : at + n], targets[row, at : at + n] = requests.positions[i], requests.targets[i]
            ids[row, at : at + n] = np.arange(starts[i], starts[i] + n)
            at += n
    positions = np.broadcast_to(np.arange(length, dtype=np.int32), (size, length))
    return (tokens, positions, rows, trained, targets), ids


@dataclass(frozen=True)
class EvalSet:
    """Hold a held-out part, ready to be scored: which requests make up the loss, and which the options."""

    requests: Requests
    loss: Int32[np.ndarray, " T"]
    options: Int32[np.ndarray, " K"]  # in the order of `choices`' entries
    choices: Choices | None  # None: the metric is the loss
    rows: int


def make_eval_set(examples: Examples, choices: Choices | None) -> EvalSet:
    """Lay out the requests of a held-out part; with `choices` the metric is choice_accuracy, else the loss."""
    requests = Requests()
    rows = zip(examples.tokens, examples.heads, examples.targets, strict=True)
    loss = [requests.add(tokens, heads, targets) for tokens, heads, targets in rows]
    options = np.zeros(0 if choices is None else len(choices.row), np.int32)
    if choices is not None:
        by_sequence = np.argsort(choices.sequence, kind="stable")
        for entries in np.split(by_sequence, np.flatnonzero(np.diff(choices.sequence[by_sequence])) + 1):
            sequence = choices.sequences[choices.sequence[entries[0]]]
            options[entries] = requests.add(sequence, choices.position[entries], choices.target[entries])
    return EvalSet(requests, np.concatenate(loss), options, choices, len(examples))


def score(evals: EvalSet, log_p: Float[np.ndarray, " N"]) -> Score:
    """Turn log-probabilities into a score: the loss is the mean over trained tokens, options go by `accuracy`."""
    loss = float(-log_p[evals.loss].mean())
    value = loss if evals.choices is None else accuracy(evals.choices, log_p[evals.options])
    return Score(score=value, loss=loss, rows=evals.rows, tokens=len(evals.loss))


def eval_command(
    model: str,
    adapters: Sequence[Path],
    data: str,
    metric: str,
    json_path: Path | None,
    *,
    max_length: int = 1024,
) -> int:
    """Score a model and PEFT adapters on it on the rows of a file, print one line each, and return the exit code.

    Options of choice_accuracy are each row's `choices`, else the distinct completions of the file.

    Raises:
      UserError: the model, an adapter, the data or the metric cannot be used.
    """
    if metric not in HIGHER_IS_BETTER:
        raise UserError(f"--metric {metric}: allowed are {', '.join(HIGHER_IS_BETTER)}")
    config = load_config(model)
    tokenizer = load_tokenizer(model)
    examples = read_examples(data, tokenizer, max_length=max_length, vocab_size=config.vocab_size)
    print(f"data: {examples.report}")
    choices = make_choices(examples, tokenizer, train=examples) if metric == "choice_accuracy" else None
    evals = make_eval_set(examples, choices)
    loaded: list[tuple[Job, Adapter] | None] = [None]
    for directory in adapters:
        adapter, fields = import_adapter(directory, config)
        loaded.append((replace(Job(), **fields), adapter))
    base = load_base(model)
    scores = Scorer(base, runtime_for(base)).score(loaded, evals)
    names = [None, *map(str, adapters)]
    rows = [
        {"model": model, "adapter": n, "metric": metric, **vars(s)}
        for n, s in zip(names, scores, strict=True)
    ]
    for row in rows:
        found = "" if metric == "loss" else f"{metric} {row['score']:.4f}, "
        print(f"{row['adapter'] or 'base model'}: {found}loss {row['loss']:.4f}")
    if json_path:
        write_json(json_path, rows)
    return 0
