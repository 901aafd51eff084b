"""Every error that longhaul raises on purpose, as one tree.

    LonghaulError
    |-- ConfigError          a flag, a config field or a space that can't be used; exit status 2
    |-- MismatchError        two ends that disagree on the experience or the protocol; exit status 2
    |-- Outage               the other end can't be reached now; retried until a deadline
    |   `-- DeadlineExceeded the retries' deadline has passed; exit status 1
    |-- Corruption           bytes that fail their checks; refused and counted, never used
    |-- Refused              the other end said no: authentication, permission, superseded; exit status 1
    |-- WorkerFailed         a process or thread of ours ended when it should not have; exit status 1
    `-- Stopped              an orderly shutdown was asked for while something waited

Outage, shutdown and corruption are three things and never caught as one.
"""


class LonghaulError(Exception):
    """Base of all errors raised on purpose; its text is one line fit for a user."""

    exit_status = 1


class ConfigError(LonghaulError):
    """A user's setting can't be used; the text names the field, the value and the mend."""

    exit_status = 2


class MismatchError(LonghaulError):
    """Two ends disagree; the text names what, and each end's value."""

    exit_status = 2


class Outage(LonghaulError):
    """The other end does not answer at present."""


class DeadlineExceeded(Outage):
    """An outage has lasted longer than the user allows."""


class Corruption(LonghaulError):
    """Received or stored bytes fail their checksum, size bound or shape."""


class Refused(LonghaulError):
    """The other end refuses us and will go on doing so."""


class WorkerFailed(LonghaulError):
    """A worker process or thread ended unexpectedly."""


class Stopped(LonghaulError):
    """The stop event was set while a call waited; not a failure."""
