"""`p2p-muloco`: the group, and how errors end a command.

The commands' modules import what is heavy (torch, hivemind: seconds) inside the command, so that `--help` is instant.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from typing import NoReturn

import rich_click as click
from p2p_muloco.cli import bootstrap, demo, init, join, simulate, status

from p2p_muloco import __version__
from p2p_muloco.errors import DiskFull, MulocoError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="p2p-muloco")
def cli() -> None:
    """Train one language model together over the internet: Muon inside DiLoCo, no server.

    See it work on this machine:  p2p-muloco demo

    Join a run:  p2p-muloco join JOIN_STRING

    Start a run:  p2p-muloco init run.toml, then  p2p-muloco bootstrap run.toml
    """


for module in (init, bootstrap, join, status, demo, simulate):
    cli.add_command(module.command)


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 a promise broke, 2 bad input, 3 no state to be had, 4 no network,
    5 the disk is full, 130 Ctrl-C."""
    try:
        code = cli(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except MulocoError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        click.echo("stopped", err=True)
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            _own_fault()
        click.echo(f"error: the disk is full: {error}; make room and start again, it goes on from what was saved", err=True)
        sys.exit(DiskFull.exit_code)
    except Exception:
        _own_fault()


def _own_fault() -> NoReturn:
    traceback.print_exc()
    click.echo("error: this is a fault of p2p-muloco itself; please report the lines above", err=True)
    sys.exit(70)


if __name__ == "__main__":
    main()
