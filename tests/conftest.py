"""For all tests: one thread of torch, real peers one after another, and nothing of ours left alive at the end."""

from __future__ import annotations

import psutil
import pytest
import torch

torch.set_num_threads(1)

BEFORE = pytest.StashKey[set[int]]()


def ours() -> set[int]:
    """Process ids of daemons and peers on this machine."""
    found = set()
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = " ".join(process.info["cmdline"] or [])
        if "hivemind_cli/p2pd" in command or "p2p_muloco.cli.main" in command:
            found.add(process.info["pid"])
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two workers share the tests; those that start processes stay with one of them."""
    for item in items:
        if item.get_closest_marker("processes"):
            item.add_marker(pytest.mark.xdist_group("processes"))


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BEFORE] = ours()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return  # another worker's peers may still run
    left = ours() - session.config.stash[BEFORE]
    if left:
        session.config.get_terminal_writer().line(f"\nFAILED: processes were left behind: {sorted(left)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
