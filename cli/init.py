"""`p2p-muloco init`: a run file that explains itself."""

from __future__ import annotations

from pathlib import Path

import rich_click as click

from p2p_muloco.config import RunConfig
from p2p_muloco.errors import ConfigError

HEADER = """\
# A run of p2p-muloco. Everything here is the law of the run: peers get it by its hash and can't change it.
# Start it with:  p2p-muloco bootstrap {name}
"""


@click.command("init")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False), default=Path("run.toml"))
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
def command(file: Path, force: bool) -> None:
    """Write a commented run file, with every field at its default. FILE: run.toml if not given."""
    if file.exists() and not force:
        raise ConfigError(f"{file} exists; name another file, or overwrite it with --force")
    file.write_text(HEADER.format(name=file) + "\n" + RunConfig().to_toml(), encoding="utf-8")
    click.echo(f"wrote {file}; edit it, then run:  p2p-muloco bootstrap {file}", err=True)
