"""The planner's one exception: input from which no plan can be made."""


class PlanError(ValueError):
    """Say what cannot be planned, why, and what would make it possible."""
