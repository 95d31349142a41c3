"""The one tree of errors a user can meet. Each message names the thing, its value, the rule and the remedy.

    MulocoError
      ConfigError         a run.toml, option or join string breaks a rule
      CorpusError         the text of a run is absent or is another text
      BadPacket           bytes from another peer break a rule; costs one record, never the process
      StateUnavailable    nobody could hand over the state that is needed
      DiskFull            the folder of this peer has no room for what it must keep
      NetworkError        the swarm, an address or a port can't be used
      ClockError          this machine's clock is too far from the others'
"""

from __future__ import annotations

__all__ = ["BadPacket", "ClockError", "ConfigError", "CorpusError", "DiskFull", "MulocoError", "NetworkError",
           "StateUnavailable"]


class MulocoError(Exception):
    """Root of the tree. `exit_code` is what the command line ends with."""

    exit_code = 1


class ConfigError(MulocoError, ValueError):
    exit_code = 2


class CorpusError(MulocoError):
    exit_code = 2


class BadPacket(MulocoError, ValueError):
    pass


class StateUnavailable(MulocoError):
    exit_code = 3


class DiskFull(MulocoError):
    exit_code = 5


class NetworkError(MulocoError):
    exit_code = 4


class ClockError(MulocoError):
    exit_code = 2
