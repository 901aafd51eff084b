"""The --link flag: what stands between a learner and its gateway when both run on one machine."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from longhaul.errors import ConfigError
from longhaul.relay import Relay

_FORM = (
    "rtt_ms=MILLISECONDS,rate_mbit=MEGABITS_PER_SECOND[,up_mbit=...][,outage_at_s=SECONDS,outage_s=SECONDS], such as "
    "rtt_ms=50,rate_mbit=20"
)


@dataclasses.dataclass(frozen=True)
class EmulatedLink:
    """A link's figures.

    Attributes:
      rtt_s: round-trip time.
      rate_bytes_per_s: of each direction; 0 is unlimited.
      up_rate_bytes_per_s: of the way to the site, which carries priorities and weights; None: as the other.
      outage_at_s: when the outage begins, after the run's first update; None: in the middle of the run.
      outage_s: how long nothing is carried; 0 is no outage.
    """

    rtt_s: float
    rate_bytes_per_s: float
    up_rate_bytes_per_s: float | None = None
    outage_at_s: float | None = None
    outage_s: float = 0.0


class Reached(NamedTuple):
    """The way to a target.

    Attributes:
      address: host:port to connect to.
      relay: what emulates the link; None where there is none.
    """

    address: str
    relay: Relay | None


def parse_link(text: str | None) -> EmulatedLink | None:
    """Reads the flag; an empty one is None, plain loopback.

    Raises:
      ConfigError: it is not of the form above.
    """
    if not text:
        return None
    names = ("rtt_ms", "rate_mbit", "up_mbit", "outage_at_s", "outage_s")
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if name not in names or not 0 <= value < float("inf"):
            raise ConfigError(f"--link={text}: {part!r} can't be read; the form is {_FORM}")
        values[name] = value
    return EmulatedLink(
        rtt_s=values.get("rtt_ms", 0.0) / 1e3,
        rate_bytes_per_s=values.get("rate_mbit", 0.0) * 1e6 / 8,
        up_rate_bytes_per_s=values["up_mbit"] * 1e6 / 8 if "up_mbit" in values else None,
        outage_at_s=values.get("outage_at_s"),
        outage_s=values.get("outage_s", 0.0),
    )


@contextlib.contextmanager
def reach(target: tuple[str, int], link: EmulatedLink | None) -> Iterator[Reached]:
    """Yields how `target` is reached across the link, while the link stands."""
    if link is None:
        yield Reached(f"{target[0]}:{target[1]}", None)
        return
    with Relay(
        target,
        rtt_s=link.rtt_s,
        rate_bytes_per_s=link.rate_bytes_per_s,
        up_rate_bytes_per_s=link.up_rate_bytes_per_s,
    ) as relay:
        yield Reached(relay.address, relay)


class OutagePlan:
    """Holds the relay for the outage that a link's figures ask for.

    Args:
      link: None has no outage.
      relay: None carries everything.
      run_s: length of the run, for an outage in its middle; 0 if it is not known.
    """

    def __init__(self, link: EmulatedLink | None, relay: Relay | None, run_s: float):
        self._relay = relay
        self._span_s: tuple[float, float] | None = None
        if link is not None and relay is not None and link.outage_s:
            begins_s = link.outage_at_s if link.outage_at_s is not None else (run_s - link.outage_s) / 2
            self._span_s = (max(0.0, begins_s), max(0.0, begins_s) + link.outage_s)
        self._held = False

    def follow(self, elapsed_s: float) -> None:
        """Starts or ends the outage if it is time: `elapsed_s` after the first update."""
        if self._relay is None or self._span_s is None:
            return
        held = self._span_s[0] <= elapsed_s < self._span_s[1]
        if held and not self._held:
            self._relay.hold()
        elif self._held and not held:
            self._relay.release()
        self._held = held
