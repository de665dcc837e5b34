"""Score adapters on held-out rows, all adapters of a pack at once, and the base model by the same code."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int32, Int64

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
from plora_jax.config.sweep import METRICS, DataConfig
from plora_jax.data.choices import Choices, accuracy, make_choices
from plora_jax.data.encode import read_examples
from plora_jax.data.examples import Examples
from plora_jax.data.requests import Requests, lay_out
from plora_jax.data.shapes import split_lengths
from plora_jax.engine.rundir import write_json
from plora_jax.errors import UserError
from plora_jax.evaluation.answers import Answer, Questions, make_answer, make_questions, parse_answer
from plora_jax.evaluation.generate import Scales, generate
from plora_jax.evaluation.metrics import USERS, UserMetric, load_metric, normal, wilson
from plora_jax.jobs import Job
from plora_jax.models.attention import choose_attention
from plora_jax.models.decoder import LoRA, Runtime
from plora_jax.models.find import load_config, load_tokenizer, stop_ids
from plora_jax.models.load import Base, load_base
from plora_jax.peft import import_adapter
from plora_jax.training.compiled import keep_programs, program_tokens, quick_options
from plora_jax.training.losses import token_losses

BUCKETS = 8  # lengths that rows are padded to, at most
CACHE_SHARE = 1 / 8  # of the device's memory, that keys and values may take while answers are generated


@dataclass(frozen=True)
class Score:
    """Hold one model's result: `score` is the metric's value, `loss` the mean over trained tokens.

    `low` and `high` are the ends of the score's 95 % interval, None where it is not known.
    """

    score: float
    loss: float
    rows: int
    tokens: int
    low: float | None = None
    high: float | None = None


EvalStep = Callable[[Stack, Scales, nnx.State, Array, Array, Array, Array, Array], Array]


def runtime_for(base: Base) -> Runtime:
    """Choose how a base model runs here: in its own dtype, attention by what the device has, one example a sequence."""
    dtype = jax.tree.leaves(base.params)[0].dtype
    attention = choose_attention(base.config, dtype, jax.default_backend())
    return Runtime(attention, dtype=dtype, segments=False)  # type: ignore[arg-type]


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

    @partial(jax.jit, compiler_options=dict(quick_options()))
    def step(weights: Stack, *rest: Any) -> Array:
        jobs = jax.tree.leaves(weights)[0].shape[1]
        return jax.vmap(partial(one, jobs), in_axes=(1, 1, None, None, None, None, None, None))(
            weights, *rest
        )

    return step


class Scorer:
    """Score adapters of one base model, many at a time, with one compiled step for each shape that occurs.

    `tokens` is how many run at once, over all adapters; it bounds the memory that scoring takes.
    """

    def __init__(self, base: Base, runtime: Runtime | None = None, tokens: int | None = None) -> None:
        self.base, self.runtime = base, runtime or Runtime()
        self.step = make_eval_step(base, runtime)
        self.budget = tokens or (8_192 if jax.default_backend() == "cpu" else 65_536)

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
        return self._scores(weights, scales, evals, self.budget, advance)

    def score_slots(
        self,
        weights: Stack,
        scales: Scales,
        slots: Sequence[int],
        evals: "EvalSet",
        *,
        tokens: int | None = None,
        advance: Callable[[float], None] = lambda tokens: None,
    ) -> list[Score]:
        """Return the scores of adapters that a running pack holds, taken from its stack on the device.

        They go in groups of a power of two, the last one filled up with repeats: a size of group is one program, and
        one that would save less time than it takes to compile is not made.

        Args:
          weights: of the pack, and `scales`: `PackState.weights` and `.scales`. They are read only.
          slots: which of its adapters, in the order of the result.
          evals: the held-out part.
          tokens: how many run at once, over all adapters (one row of each adapter of a group in any case).
          advance: is told the tokens scored, over all adapters, as they are done.
        """
        held, budget = jax.tree.leaves(weights)[0].shape[1], tokens or self.budget
        most = 1 << max(0, (budget // evals.longest).bit_length() - 1)
        scores: list[Score] = []
        for start in range(0, len(slots), most):
            part = list(slots[start : start + most])
            size = 1 << (len(part) - 1).bit_length()
            while size < most and size * evals.tokens < program_tokens():
                size *= 2
            size = min(size, held)
            padded = np.array(part + part[-1:] * (size - len(part)), np.int32)
            some, theirs = _take((weights, scales), padded)
            share = len(part) / size  # of what is run, the rest is repeats
            scores += self._scores(some, theirs, evals, budget, _scaled(advance, share))[: len(part)]
        return scores

    def _scores(
        self, weights: Stack, scales: Scales, evals: "EvalSet", budget: int, advance: Callable[[float], None]
    ) -> list[Score]:
        log_p = self._log_p(weights, scales, evals.requests, budget, advance)
        if evals.questions is None:
            return [score(evals, row) for row in log_p]
        asked = evals.questions
        answers = generate(
            self.base,
            weights,
            scales,
            asked.prompts,
            stops=asked.stops,
            new_tokens=asked.new_tokens,
            runtime=self.runtime,
            at_once=self._cached(budget),
            advance=advance,
        )
        return [score(evals, row, asked.texts(own)) for row, own in zip(log_p, answers, strict=True)]

    def _cached(self, budget: int) -> int:
        """Return how many tokens' keys and values are held at once: no more values than `budget` layer inputs have."""
        c, stats = self.base.config, jax.local_devices()[0].memory_stats() or {}
        values = 2 * c.n_kv_heads * c.head_dim  # a token and layer
        token_bytes = c.n_layers * values * jnp.dtype(self.runtime.dtype).itemsize
        most = int(CACHE_SHARE * stats.get("bytes_limit", 8 << 30)) // token_bytes
        return min(budget, budget * c.d_model // values, most)

    def _log_p(
        self,
        weights: Stack,
        scales: Scales,
        requests: Requests,
        budget: int,
        advance: Callable[[float], None],
    ) -> Float[np.ndarray, "J N"]:
        jobs = jax.tree.leaves(weights)[0].shape[1]
        out = np.zeros((jobs, requests.size))
        starts = np.cumsum([0] + [len(t) for t in requests.targets])
        groups = requests.carriers()
        lengths = np.array([len(requests.sequences[group[0]]) for group in groups])
        tops = _tops(lengths, jobs)
        for low, length in zip([0, *tops], tops, strict=False):
            fits = [groups[i] for i in np.flatnonzero((lengths > low) & (lengths <= length))]
            batches = -(-len(fits) // max(1, budget // (length * jobs)))
            size = -(-len(fits) // batches)
            width = max(sum(len(requests.targets[i]) for i in group) for group in fits)
            for start in range(0, len(fits), size):
                part = fits[start : start + size]
                arrays, ids = lay_out(requests, part, starts, size, length, width)
                losses = np.asarray(self.step(weights, scales, self.base.params, *arrays), np.float64)  # type: ignore[arg-type]
                out[:, ids[ids >= 0]] = -losses[:, ids >= 0]
                advance(jobs * sum(len(requests.sequences[group[0]]) for group in part))
        return out


def _tops(lengths: Int64[np.ndarray, " n"], jobs: int) -> list[int]:
    """Choose the lengths that sequences are padded to: each saves more than it takes to compile its program."""

    def cost(tops: list[int]) -> int:
        padded = np.asarray(tops)[np.searchsorted(tops, lengths)]
        return jobs * int(padded.sum()) + len(tops) * program_tokens()

    most = min(BUCKETS, 1 + len(lengths) // 128)
    return min((split_lengths(lengths, n) for n in range(1, 1 + most)), key=cost)


def _scaled(advance: Callable[[float], None], share: float) -> Callable[[float], None]:
    return lambda tokens: advance(share * tokens)


@jax.jit
def _take(stacks: tuple[Stack, Scales], slots: Int32[Array, " J"]) -> tuple[Stack, Scales]:
    return jax.tree.map(lambda stack: jnp.take(stack, slots, axis=1), stacks)


@dataclass(frozen=True)
class EvalSet:
    """Hold a held-out part, ready to be scored: which requests make up the loss, and which the options.

    The metric is that of `questions` if any, else choice_accuracy of `choices` if any, else the loss.
    """

    requests: Requests
    loss: Int32[np.ndarray, " T"]
    counts: Int32[np.ndarray, " rows"]  # trained tokens of each row, in the order of `loss`
    options: Int32[np.ndarray, " K"]  # in the order of `choices`' entries
    choices: Choices | None
    questions: Questions | None

    @property
    def rows(self) -> int:
        """Count the rows."""
        return len(self.counts)

    @property
    def tokens(self) -> int:
        """Count the tokens that are run at most, for one adapter."""
        return self.requests.tokens + (self.questions.tokens if self.questions else 0)

    @property
    def longest(self) -> int:
        """Count the tokens of the longest sequence that is run, padding and a generated answer included."""
        lengths = np.array([len(sequence) for sequence in self.requests.sequences])
        most = split_lengths(lengths, 1)[0]
        return max(most, self.questions.longest) if self.questions else most


def make_eval_set(
    examples: Examples, choices: Choices | None = None, questions: Questions | None = None
) -> EvalSet:
    """Lay out the requests of a held-out part; without `choices` and `questions` the metric is the loss."""
    requests = Requests()
    rows = zip(examples.tokens, examples.heads, examples.targets, strict=True)
    loss = [requests.add(tokens, heads, targets) for tokens, heads, targets in rows]
    options = np.zeros(0 if choices is None else len(choices.row), np.int32)
    if choices is not None:
        by_sequence = np.argsort(choices.sequence, kind="stable")
        for entries in np.split(by_sequence, np.flatnonzero(np.diff(choices.sequence[by_sequence])) + 1):
            sequence = choices.sequences[choices.sequence[entries[0]]]
            options[entries] = requests.add(sequence, choices.position[entries], choices.target[entries])
    counts = np.array([len(ids) for ids in loss], np.int32)
    return EvalSet(requests, np.concatenate(loss), counts, options, choices, questions)


def read_eval_set(
    data: DataConfig, examples: Examples, train: Examples, tokenizer: Any, model: str, directory: Path
) -> EvalSet:
    """Lay out a held-out part for the metric of `data`.

    Args:
      data: the section of the sweep; its files are not read.
      examples: the rows of the part.
      train: the training rows, whose distinct completions are options where nothing else names any.
      tokenizer: the model's.
      model: its name, for the stop tokens of its generation_config.json.
      directory: where the module of a user's metric may lie.

    Raises:
      UserError: the rows do not fit the metric, or a user's metric cannot be used.
    """
    if data.metric == "loss":
        return make_eval_set(examples)
    if data.metric == "choice_accuracy":
        choices = make_choices(examples, tokenizer, choices=data.choices or None, train=train)
        return make_eval_set(examples, choices)
    metric, stops = metric_of(data, directory), stop_ids(model)
    asked = make_questions(examples, tokenizer, metric, new_tokens=data.max_new_tokens, stops=stops)
    return make_eval_set(examples, questions=asked)


def metric_of(data: DataConfig, directory: Path) -> Answer | UserMetric:
    """Return how generated answers are graded: as `data.answer` says, or by the user's metric.

    Raises:
      UserError: a user's metric cannot be used.
    """
    return make_answer(data.answer) if data.metric == "exact_match" else load_metric(data.metric, directory)


def score(evals: EvalSet, log_p: Float[np.ndarray, " N"], texts: Sequence[str] = ()) -> Score:
    """Turn log-probabilities and generated texts into a score; the loss is the mean over trained tokens."""
    losses = np.add.reduceat(-log_p[evals.loss], np.cumsum(evals.counts) - evals.counts)
    loss = float(-log_p[evals.loss].mean())
    if evals.questions is not None:
        values = evals.questions.grade(texts)
        value = float(values.mean())
        share = evals.questions.proportion
        interval = wilson(value, evals.rows) if share else normal(values, np.ones(evals.rows))
    elif evals.choices is not None:
        value = accuracy(evals.choices, log_p[evals.options])
        interval = wilson(value, evals.rows)
    else:
        value, interval = loss, normal(losses, evals.counts)
    low, high = interval or (None, None)
    return Score(value, loss, evals.rows, len(evals.loss), low, high)


def eval_command(
    model: str,
    adapters: Sequence[Path],
    data: str,
    metric: str,
    json_path: Path | None,
    *,
    max_length: int = 1024,
    answer: str = "whole",
    max_new_tokens: int = 64,
    precision: str = "auto",
) -> int:
    """Score a model and PEFT adapters on it on the rows of a file, print one line each, and return the exit code.

    Options of choice_accuracy are each row's `choices`, else the distinct completions of the file.

    Raises:
      UserError: the model, an adapter, the data or the metric cannot be used.
    """
    if metric not in METRICS and not USERS.fullmatch(metric):
        raise UserError(f"--metric {metric}: allowed are {', '.join(METRICS)}, or module:function")
    if answer != "whole" and metric != "exact_match":
        raise UserError(f"--answer {answer} has no effect with the metric {metric}")
    try:
        how = parse_answer(answer)
    except ValueError as error:
        raise UserError(f"--answer {answer}: {error}") from None
    section = DataConfig(data, metric=metric, answer=how, max_new_tokens=max_new_tokens)
    config = load_config(model)
    tokenizer = load_tokenizer(model)
    examples = read_examples(data, tokenizer, max_length=max_length, vocab_size=config.vocab_size)
    print(f"data: {examples.report}")
    evals = read_eval_set(section, examples, examples, tokenizer, model, Path("."))
    loaded: list[tuple[Job, Adapter] | None] = [None]
    for directory in adapters:
        adapter, fields = import_adapter(directory, config)
        loaded.append((replace(Job(), **fields), adapter))
    keep_programs()
    base = load_base(model, precision=precision)  # type: ignore[arg-type]
    scores = Scorer(base, runtime_for(base)).score(loaded, evals)
    names = [None, *map(str, adapters)]
    rows = [
        {"model": model, "adapter": n, "metric": metric, **vars(s)}
        for n, s in zip(names, scores, strict=True)
    ]
    for row, result in zip(rows, scores, strict=True):
        found = "" if metric == "loss" else f"{metric} {result.score:.4f}{_between(result)}, "
        spread = _between(result) if metric == "loss" else ""
        print(f"{row['adapter'] or 'base model'}: {found}loss {result.loss:.4f}{spread}")
    if json_path:
        write_json(json_path, rows)
    return 0


def _between(score: Score) -> str:
    return "" if score.low is None or score.high is None else f" ({score.low:.4f} to {score.high:.4f})"
