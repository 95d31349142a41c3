import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def no_process_left() -> object:
    """After the whole run nothing of ours is alive: no daemon, no peer."""
    import psutil

    def ours() -> set[int]:
        found = set()
        for process in psutil.process_iter(["pid", "cmdline"]):
            command = " ".join(process.info["cmdline"] or [])
            if "hivemind_cli/p2pd" in command or "p2p_muloco.cli.main" in command:
                found.add(process.info["pid"])
        return found

    before = ours()
    yield
    left = ours() - before
    assert not left, f"processes left behind: {left}"
