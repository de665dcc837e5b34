"""How slow this machine is just now, so that bounds on processor time hold on shared and busy ones too."""

import time

FREE = 0.1  # seconds that the loop below takes on a core of about 3.5 GHz which nobody shares


def slowness() -> float:
    """Return how many times longer than a free core this one takes for plain Python at the moment; at least 1."""
    started, total = time.process_time(), 0
    for number in range(2_000_000):
        total += number
    return max(1.0, (time.process_time() - started) / FREE)
