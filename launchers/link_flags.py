"""The flags of the long-haul link, read by the learner and passed on to it by `local`."""

from absl import flags

BUDGET = flags.DEFINE_float(
    "link_budget", 0.0, "bytes/s that the link may carry in each direction; 0 is no limit", lower_bound=0.0
)
DEADLINE_S = flags.DEFINE_float(
    "link_deadline_s", 0.0, "give up after an outage of this many seconds; 0 tries for ever", lower_bound=0.0
)


def arguments() -> list[str]:
    """Returns the link's flags as words for a learner's command line."""
    return [f"--link_budget={BUDGET.value}", f"--link_deadline_s={DEADLINE_S.value}"]
