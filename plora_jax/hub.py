"""Whether the Hugging Face hub can be reached, found out in seconds: its client would retry for half a minute."""

import os
import socket
import threading

SECONDS = 5.0


def hub_host() -> tuple[str, int]:
    """Return the host and port of the hub: huggingface.co, or where HF_ENDPOINT points."""
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    scheme, _, rest = endpoint.rpartition("://")
    name, _, port = rest.partition("/")[0].partition(":")
    return name, int(port) if port.isdecimal() else 80 if scheme == "http" else 443


def why_unreachable(seconds: float = SECONDS) -> str:
    """Return why the hub cannot be reached, or nothing when it can."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return "HF_HUB_OFFLINE is set"
    host, port = hub_host()
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return ""  # only the proxy knows
    answer: list[str] = []

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=seconds).close()
            answer.append("")
        except (OSError, ValueError, OverflowError) as error:  # a name or a port that cannot be one
            answer.append(f"{host} cannot be reached: {getattr(error, 'strerror', '') or error}")

    thread = threading.Thread(target=connect, daemon=True)  # looking up a name knows no time limit
    thread.start()
    thread.join(seconds)
    return answer[0] if answer else f"{host} gives no answer within {seconds:.0f} s"
