"""The plan: packs × device groups × order in time, as data, and its stable JSON (schema 1)."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from planner.errors import PlanError

SCHEMA = 1


@dataclass(frozen=True)
class Assign:
    """Place one job in a slot from start to end (seconds since the plan's start); scoring ends the span."""

    job_id: str
    slot: int
    start_s: float
    end_s: float
    scoring_s: float


@dataclass(frozen=True)
class Pack:
    """Hold one pack: its program (degree, J = len(slots), m, policy, buckets), its place, and its jobs in
    time.
    """

    jobs: tuple[str, ...]
    degree: int
    m: int
    policy: str
    slots: tuple[int, ...]  # rank bucket of each slot
    length_buckets: tuple[int, ...]
    row_tokens: float  # mean length a row is laid out in, padding included
    step_s: float
    steps: int
    assign: tuple[Assign, ...]
    devices: tuple[int, ...]
    start_s: float
    end_s: float
    setup_s: float  # loading the base and compiling, before the first step
    memory_bytes: int
    memory_limit_bytes: int
    device: str = ""  # the type of its devices
    rung: int | None = None  # which stretch of its jobs it trains, in a plan rung by rung; None: whole jobs

    @property
    def J(self) -> int:
        """Return the number of slots."""
        return len(self.slots)

    @staticmethod
    def from_dict(raw: dict[str, Any]) -> "Pack":
        """Read a pack as plan.json has it."""
        tuples: dict[str, Any] = {name: tuple(raw[name]) for name in ("jobs", "length_buckets", "devices")}
        slots = tuple(slot["bucket"] for slot in raw["slots"])
        return Pack(**{**raw, **tuples, "slots": slots, "assign": tuple(Assign(**a) for a in raw["assign"])})


@dataclass(frozen=True)
class Plan:
    """Hold a whole plan with its bound; `gap` is makespan / bound − 1."""

    makespan_s: float
    lower_bound_s: float
    bound: str  # longest | lp | pigeonhole | groups: which lower bound binds
    packs: tuple[Pack, ...]
    jobs: dict[str, dict[str, Any]]
    device: str
    device_count: int
    model: str
    precision: str
    method: str
    planning_s: float = 0.0
    baselines_s: float = 0.0
    truncated: bool = False
    baselines: dict[str, float | None] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)  # why a baseline is null
    notes: tuple[str, ...] = ()
    prices: dict[str, float] = field(
        default_factory=dict
    )  # of jobs, which prove a bound of the kind `groups`
    device_types: dict[str, int] = field(
        default_factory=dict
    )  # how many of each type, in the order of their numbers
    busy_until: tuple[float, ...] = ()  # seconds until each device is free; (): all are
    expected_s: float | None = None  # with early stopping: simulated mean; makespan_s is then an upper bound
    whole: dict[str, float] | None = None  # of a plan rung by rung: makespan_s and expected_s of whole jobs

    @property
    def gap(self) -> float:
        """Return how far the makespan may be above the best possible, as a share."""
        return self.makespan_s / self.lower_bound_s - 1 if self.lower_bound_s > 0 else 0.0

    @property
    def hardware(self) -> str:
        """Write what the plan is for: 8 × H200, or 4 × A100-40GB + 4 × H200."""
        types = self.device_types or {self.device: self.device_count}
        return " + ".join(f"{count} × {name}" for name, count in types.items())

    @property
    def is_mixed(self) -> bool:
        """Say whether the devices are of several types."""
        return len(self.device_types) > 1

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain JSON values, in the order of the published contract."""
        raw = asdict(self)
        raw["jobs"] = dict(self.jobs)
        raw["packs"] = [{**pack, "slots": [{"bucket": b} for b in pack["slots"]]} for pack in raw["packs"]]
        return {"schema": SCHEMA, "makespan_s": raw.pop("makespan_s"), "gap": self.gap, **raw}

    def to_json(self) -> str:
        """Return the plan as indented JSON."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """Read a plan.

        Raises:
            PlanError: not JSON, another schema version, or a field missing or unknown.
        """
        try:
            raw = json.loads(text)
            if raw["schema"] != SCHEMA:
                raise PlanError(f"plan has schema {raw['schema']}; this version reads schema {SCHEMA}")
            raw = {key: value for key, value in raw.items() if key not in ("schema", "gap")}
            packs = tuple(Pack.from_dict(pack) for pack in raw.pop("packs"))
            return Plan(
                **{
                    **raw,
                    "packs": packs,
                    "notes": tuple(raw.get("notes", ())),
                    "busy_until": tuple(raw.get("busy_until", ())),
                }
            )
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"this is not a plan: {type(error).__name__}: {error}") from None
