"""From a sweep to a plan: the planner's words for its model, jobs and devices. Imports no JAX."""

import math
import shutil
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import planner
from planner.devices import DEVICES
from plora_jax.config.sweep import Sweep
from plora_jax.data.examples import Examples
from plora_jax.data.layout import steps_per_epoch, total_steps
from plora_jax.engine.rundir import write_atomic
from plora_jax.errors import UserError
from plora_jax.jobs import LINEAR, Job
from plora_jax.machine import Gpu, cores, memory_bytes, visible_gpus
from plora_jax.models.config import ModelConfig
from plora_jax.search.early_stop import EarlyStop, bracket_of
from plora_jax.sizes import Size, data_size, token_counter

CHECKPOINTS = 3  # of a pack on disk at once: the last two, and the one being written


def model_shape(config: ModelConfig, name: str) -> planner.ModelShape:
    """Describe a model to the planner."""
    return planner.ModelShape(
        name=name,
        n_layers=config.n_layers,
        d_model=config.d_model,
        d_ff=config.d_ff,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        tied=config.tied,
        n_params=config.n_params,
        sites=tuple((site.name, site.d_in, site.d_out) for site in config.sites),
        norms=2 * (config.pre_norm + config.post_norm),
        qk_norm=config.qk_norm != "none",
        flash=not config.cudnn_obstacle,
    )


def trained_rows(job: Job, n: int) -> int:
    """Count the rows a job trains on until its last step, of n a pass; a pass may end in a partial batch."""
    epochs, rest = divmod(total_steps(job, n), steps_per_epoch(n, job.batch_size))
    return epochs * n + rest * job.batch_size  # of what is left, only a pass's last batch can be partial


def job_spec(job: Job, size: Size, data: str, scored: int = 0) -> planner.JobSpec:
    """Describe a job to the planner; `scored` tokens are its evaluations'."""
    targets = (
        (job.targets,) if isinstance(job.targets, str) else job.targets
    )  # names, or paths that end in one
    return planner.JobSpec(
        job_id=job.job_id,
        rank=max([job.rank, *(rank for _, rank in job.rank_pattern)]),
        batch_size=job.batch_size,
        rows=trained_rows(job, size.rows),
        row_tokens=size.row_tokens,
        max_row_tokens=size.max_row_tokens,
        data=f"{job.train or data} order {job.data_seed}",
        targets=None if job.targets == LINEAR else frozenset(name.rsplit(".", 1)[-1] for name in targets),
        has_dropout=job.dropout > 0,
        optimizer=job.optimizer,
        eval_tokens=scored,
    )


def examples_size(examples: Examples) -> Size:
    """Return the size of rows that are read."""
    return Size(len(examples), float(examples.lengths.mean()), int(examples.lengths.max()), "")


class Problem(NamedTuple):
    """Hold what is planned, in the planner's words, and what the reader should know about it."""

    jobs: Sequence[Job]
    specs: Sequence[planner.JobSpec]
    shape: planner.ModelShape
    devices: planner.Devices | planner.Mixture
    precision: str
    early_stop: EarlyStop
    slots: int | None = None  # most of a pack
    notes: tuple[str, ...] = ()
    by_rung: bool | None = False  # None: where that is expected to end earlier


def plan_jobs(
    sweep: Sweep,
    config: ModelConfig,
    jobs: Sequence[Job],
    train: Mapping[str, Examples],
    scored: Mapping[str, int],
    devices: planner.Devices | planner.Mixture,
    *,
    corners: Sequence[Job] = (),
    cost_model: planner.CostModel | None = None,
    incumbent: Sequence[planner.Pack] | None = None,
    begun: Mapping[str, float] | None = None,
    rung: int = 0,
    busy_until: Sequence[float] = (),
) -> planner.Plan:
    """Plan jobs whose data is read: `train` holds each job's rows, `scored` the tokens it is scored on.

    With `corners`, which ask for all that a search space can, the jobs are places for any job of the space. An
    `incumbent` is the packs of an earlier plan, which takes part; `busy_until` the seconds until each device is free.
    With `begun`, the share of their training that jobs have done (others none), they are planned as far as their next
    rungs, in packs of rung number `rung`.

    Raises:
      UserError: no plan is possible, or the sweep names other devices than this process has.
    """
    specs = [
        job_spec(job, examples_size(train[job.job_id]), sweep.data.train, scored[job.job_id]) for job in jobs
    ]
    if corners:
        most = [job_spec(job, examples_size(train[job.job_id]), sweep.data.train) for job in corners]
        specs = _widened(specs, most)
    problem = _problem(sweep, config, jobs, specs, devices)
    if begun is None:
        return solve(problem, cost_model, incumbent, busy_until)
    ladders = _ladders(sweep.early_stop) or (lambda _: planner.Ladder(1, ()))
    rests = [
        planner.rest(spec, ladders(spec), begun.get(spec.job_id, 0.0), problem.shape)
        for spec in problem.specs
    ]
    problem = problem._replace(specs=rests, early_stop=EarlyStop(), by_rung=False)
    plan = solve(problem, cost_model, incumbent or (), busy_until)
    return replace(plan, packs=tuple(replace(pack, rung=rung) for pack in plan.packs))


def first_packs(plan: planner.Plan) -> list[dict[str, Any]]:
    """Return the packs that a plan begins with, as plan.json has them: rung by rung, the others are planned later."""
    return [pack for pack in plan.to_dict()["packs"] if not pack["rung"]]


def _widened(specs: Sequence[planner.JobSpec], corners: Sequence[planner.JobSpec]) -> list[planner.JobSpec]:
    """Let every job ask for as much as any job of the space may, so that any will fit in the place of any."""
    sites: frozenset[str] = frozenset()
    for corner in corners:
        sites |= corner.targets or frozenset()
    everywhere = any(corner.targets is None for corner in corners)
    return [
        replace(
            spec,
            rank=max(corner.rank for corner in corners),
            batch_size=math.gcd(*(corner.batch_size for corner in corners)),
            targets=None if everywhere else sites,
            max_row_tokens=max(corner.max_row_tokens for corner in corners),
            has_dropout=any(corner.has_dropout for corner in corners),
            accumulate=len({corner.batch_size for corner in corners}) > 1,
        )
        for spec in specs
    ]


def sweep_problem(
    sweep: Sweep, jobs: Sequence[Job], *, devices: str | None = None, rows: int | None = None
) -> Problem:
    """State a sweep's planning problem from its files alone; `rows` stands in for training data not at hand.

    Raises:
      UserError: the model is unknown or unsupported, the data or an adapter to start from cannot be read, or a
        pattern matches no module.
    """
    from plora_jax.models.find import load_config

    config = load_config(sweep.model)
    if any(job.init_adapter for job in jobs):
        from plora_jax.engine.task import start_adapters

        jobs, _ = start_adapters(sweep, config, jobs)
    patterned = [
        job for job in jobs if job.rank_pattern or job.alpha_pattern or any("." in t for t in job.targets)
    ]
    # only these, and targets that are paths, need the modules' names, and what knows them imports JAX
    if patterned:
        from plora_jax.adapters import alphas, ranks

        for job in patterned:
            ranks(config, job)
            alphas(config, job)
    rows, count, data = rows or sweep.data.rows, token_counter(sweep.model), sweep.data
    names = dict.fromkeys(job.train or data.train for job in jobs)
    sizes = {name: data_size(sweep, name, count, rows) for name in names}
    scored = 0
    if data.eval and (rows is None or sweep.path(data.eval).exists()):
        held_out = data_size(sweep, data.eval, count)
        scored = math.ceil(held_out.rows * held_out.row_tokens)
    specs = [job_spec(job, sizes[job.train or data.train], data.train, scored) for job in jobs]
    notes = tuple(f"{name}: {size}" for name, size in sizes.items())
    return _problem(sweep, config, jobs, specs, find_devices(devices or sweep.devices), notes)


def _problem(
    sweep: Sweep,
    config: ModelConfig,
    jobs: Sequence[Job],
    specs: Sequence[planner.JobSpec],
    devices: planner.Devices | planner.Mixture,
    notes: tuple[str, ...] = (),
) -> Problem:
    asked = sweep.precision.base
    kinds = [part.spec for part in devices.parts]
    precision = asked if asked != "auto" else "fp32" if kinds[0].name == "cpu" else "bf16"
    without = [spec.name for spec in kinds if not spec.fp8]
    if precision == "fp8" and without:
        raise UserError(
            f"precision.base: fp8 cannot run on {without[0]}: it has no fp8 products; use bf16, or L40S, "
            "RTX4090, H100 or newer"
        )
    stop = sweep.early_stop
    if ladders := _ladders(stop):  # which score a job at every rung
        specs = [
            replace(spec, eval_tokens=spec.eval_tokens * (1 + len(ladders(spec).rungs))) for spec in specs
        ]
    elif stop.method != "none":
        notes = (*notes, f"early_stop: {stop.method} is not simulated; the makespan is that without stops")
    if sweep.data.packing:  # rows that share a sequence may end a batch later
        specs = [replace(spec, accumulate=True) for spec in specs]
    shape = model_shape(config, sweep.model)
    by_rung = {"auto": None, "always": True, "never": False}[stop.pause]
    if by_rung and len(kinds) > 1:
        raise UserError(
            f"early_stop.pause: always needs devices of one type, and these are {devices}; use auto or never"
        )
    if sweep.search.is_drawn:  # its jobs are not known
        by_rung = False
    return Problem(jobs, specs, shape, devices, precision, stop, sweep.train.slots, notes, by_rung)


def _ladders(config: EarlyStop) -> planner.Ladders | None:
    """Return the rungs of every job; None for a rule whose stops depend on the curves."""
    if config.method not in ("asha", "halving"):
        return None
    brackets = range(config.brackets)
    ladders = [planner.Ladder(config.reduction_factor, config.rungs(bracket)) for bracket in brackets]
    return lambda job: ladders[bracket_of(job.job_id, config)]


def solve(
    problem: Problem,
    cost_model: planner.CostModel | Mapping[str, planner.CostModel] | None = None,
    incumbent: Sequence[planner.Pack] | None = None,
    busy_until: Sequence[float] = (),
) -> planner.Plan:
    """Plan a problem; the plan's `jobs` carry the fields of the sweep beside the planner's.

    With an `incumbent` other methods than ours are not run.

    Raises:
      UserError: no plan is possible; the message says why.
    """
    try:
        plan = planner.make_plan(
            problem.specs,
            problem.shape,
            problem.devices,
            precision=problem.precision,
            cost_model=cost_model,
            options=plan_options(problem, replanned=incumbent is not None),
            incumbent=incumbent,
            busy_until=busy_until,
        )
    except planner.PlanError as error:
        raise UserError(str(error)) from None
    return with_fields(problem, plan)


def plan_options(problem: Problem, replanned: bool = False) -> planner.Options:
    """Return how a problem is planned; planned again, without baselines and as whole jobs."""
    return planner.Options(
        max_slots=problem.slots or planner.Options.max_slots,
        early_stop=_ladders(problem.early_stop),
        by_rung=False if replanned else problem.by_rung,
        baselines=not replanned,
    )


def with_fields(problem: Problem, plan: planner.Plan) -> planner.Plan:
    """Return a plan whose jobs carry the fields of the sweep beside the planner's, and with the problem's notes."""
    fields = {job.job_id: job.to_dict() for job in problem.jobs}
    jobs = {name: spec | fields[name] for name, spec in plan.jobs.items()}
    return replace(plan, jobs=jobs, notes=(*plan.notes, *problem.notes))


def disk_bytes(config: ModelConfig, plan: planner.Plan) -> int:
    """Return what a run needs on disk: every adapter in float32, and the checkpoints of the packs that run at once.

    The base is never written. A checkpoint holds weights, gradients and moments of every slot at its rank bucket.
    Rung by rung, every job may wait at a rung, and the half that pass, at most, at the next one too.
    """
    adapters = sum(4 * config.lora_params(job["rank"]) for job in plan.jobs.values())
    states: dict[tuple[int, ...], int] = {}  # the largest pack of each device group
    for pack in plan.packs:
        moments = {plan.jobs[a.job_id]["optimizer"] for a in pack.assign}
        number = 8 + sum(planner.MOMENT_BYTES[kind] for kind in moments)
        state = sum(number * config.lora_params(bucket) for bucket in pack.slots)
        states[pack.devices] = max(state, states.get(pack.devices, 0))
    waiting = 0 if plan.packs[0].rung is None else int(1.5 * 3 * adapters)  # weights and two moments
    return adapters + waiting + CHECKPOINTS * sum(states.values())


def check_disk(out: Path, needed: int) -> None:
    """Raise UserError when the disk that `out` will be on has less than `needed` bytes free."""
    place = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise UserError(
            f"--out {out}: the run needs {needed / 1e9:.1f} GB on disk and {free / 1e9:.1f} GB are free in {place}; "
            "free some, or give a directory on another disk"
        )


def find_devices(text: str) -> planner.Devices | planner.Mixture:
    """Read `8xA100-40GB`, `4xA100-40GB+4xH200`, `cpu-16GB`, `cpu` (this machine's) or `auto` (its visible GPUs, of
    whatever types, else its CPU).

    A CPU has the cores that this process may use, shared among as many as are asked for.
    """
    text = text.strip()
    found = visible_gpus() if text == "auto" else []
    if found:
        return planner.mix(planner.Devices(gpu_spec(gpu), 1) for gpu in found)
    try:
        if text in ("auto", "cpu"):
            return planner.cpu_device(memory_bytes(), cores())
        asked = planner.devices(text)
    except planner.PlanError as error:
        raise UserError(f"devices: {error}") from None
    if isinstance(asked, planner.Mixture) or asked.spec.name != "cpu":
        return asked
    return replace(asked, spec=replace(asked.spec, cores=max(1, cores() // asked.count)))


def gpu_spec(gpu: Gpu) -> planner.DeviceSpec:
    """Return a GPU's known type, else the nearest smaller one, with the memory that the driver reports."""
    memory = gpu.memory_mib * 2**20
    name = gpu.name.upper().replace(" ", "").replace("-", "")
    named = [s for s in DEVICES.values() if s.name.split("-")[0].upper() in name]
    smaller = [s for s in DEVICES.values() if s.memory_bytes <= memory] or list(DEVICES.values())
    spec = min(named or smaller, key=lambda s: abs(s.memory_bytes - memory))
    return replace(spec, memory_bytes=memory, fp8=spec.fp8 or not named, fused=spec.fused if named else 0)


def load_costs(files: Sequence[Path], problem: Problem) -> dict[str, planner.CostModel]:
    """Read the cost models that a command names, by their types of devices.

    Of several of one type, the one that was fitted to the problem's model counts.

    Raises:
      UserError: one is of a type that is not there; or of several of a type, none or more than one was fitted to the
        model.
    """
    model, names = problem.shape.name, [part.spec.name for part in problem.devices.parts]
    of_type: dict[str, list[tuple[Path, planner.CostModel]]] = {}
    for file in files:
        cost = planner.CostModel.load(file)
        of_type.setdefault(cost.device, []).append((file, cost))
        if cost.device not in names:
            raise UserError(f"--cost-model {file} is of {cost.device}; the devices are {', '.join(names)}")
    found = {}
    for device, read in of_type.items():
        own = [cost for _, cost in read if any(key.startswith(f"{model}/") for key in cost.fitted)]
        own = own if len(read) > 1 else [read[0][1]]
        if len(own) != 1:
            named = ", ".join(str(file) for file, _ in read)
            raise UserError(
                f"--cost-model: of {named}, all of {device}, {len(own)} are fitted to {model}; one must be"
            )
        found[device] = own[0]
    return found


def plan_command(sweep: Sweep, jobs: Sequence[Job], args: Namespace) -> int:
    """Plan a sweep for the command line: print the plan, and write it where `--json` and `--svg` say."""
    problem = sweep_problem(sweep, jobs, devices=args.devices, rows=args.rows)
    cost = load_costs(args.cost_model or (), problem)
    plan = solve(problem, cost)
    print(planner.render_plan(plan))
    if args.explain:
        told = planner.explain_plan(plan, problem.specs, problem.shape, problem.devices, cost_model=cost)
        print(f"\n{told}")
    if args.json:
        write_atomic(args.json, plan.to_json() + "\n")
    if args.svg:
        write_atomic(args.svg, planner.gantt_svg(plan))
    return 0
