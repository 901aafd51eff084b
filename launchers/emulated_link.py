"""The --link flag: what stands between a learner and its gateway when both run on one machine."""

import contextlib
import dataclasses
from collections.abc import Iterator

from longhaul.errors import ConfigError
from longhaul.relay import Relay

_FORM = "rtt_ms=MILLISECONDS,rate_mbit=MEGABITS_PER_SECOND, such as rtt_ms=50,rate_mbit=20"


@dataclasses.dataclass(frozen=True)
class EmulatedLink:
    """A link's figures.

    Attributes:
      rtt_s: round-trip time.
      rate_bytes_per_s: of each direction; 0 is unlimited.
    """

    rtt_s: float
    rate_bytes_per_s: float


def parse_link(text: str | None) -> EmulatedLink | None:
    """Reads the flag; an empty one is None, plain loopback.

    Raises:
      ConfigError: it is not of the form above.
    """
    if not text:
        return None
    values = {"rtt_ms": 0.0, "rate_mbit": 0.0}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if name not in values or not 0 <= value < float("inf"):
            raise ConfigError(f"--link={text}: {part!r} can't be read; the form is {_FORM}")
        values[name] = value
    return EmulatedLink(rtt_s=values["rtt_ms"] / 1e3, rate_bytes_per_s=values["rate_mbit"] * 1e6 / 8)


@contextlib.contextmanager
def reach(target: tuple[str, int], link: EmulatedLink | None) -> Iterator[str]:
    """Yields the address at which `target` is reached across the link, while the link stands."""
    if link is None:
        yield f"{target[0]}:{target[1]}"
        return
    with Relay(target, rtt_s=link.rtt_s, rate_bytes_per_s=link.rate_bytes_per_s) as relay:
        yield relay.address
